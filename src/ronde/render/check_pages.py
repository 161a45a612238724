"""What each check asks, in words: for the documentation and the terminal."""

import re
from collections.abc import Sequence

from ronde.check.check import Check, Family
from ronde.render.wrapping import WIDTH, wrap

_HEAD = """\
# The checks of `ronde check`

Each check with what it looks at, what is good enough and where that comes from, what
happens to training otherwise, and what to do. `ronde check explain ID` says the same.
A check whose facts cannot be read says so and is no fault. See [ronde check](check.md)
for how to use it.

This page is made from the checks themselves: `python scripts/check_pages.py`.
"""

_ABOUT = {
    Family.VERSIONS: "Versions and settings",
    Family.GPU: "GPUs",
    Family.HOST: "The host",
    Family.NETWORK: "The network",
    Family.STORAGE: "Storage",
    Family.CLUSTER: "All hosts together",
}

_FIELDS = ("reads", "threshold", "source", "severity", "needs", "why", "fix")
_INDENT = 14


def tell_checks(checks: Sequence[Check]) -> str:
    """Return the page of the documentation on all checks, as Markdown."""
    text = _HEAD
    for family, title in _ABOUT.items():
        of_family = [check for check in checks if check.family is family]
        if of_family:
            text += f"\n## {title} (`{family}`)\n"
            text += "".join(_section(check) for check in of_family)
    return text


def list_checks(checks: Sequence[Check], width: int = WIDTH) -> str:
    """Return a line or two on each check, family by family."""
    text = ""
    for family in Family:
        of_family = [check for check in checks if check.family is family]
        text += f"{family}:\n" if of_family else ""
        for check in of_family:
            text += wrap(f"  {check.id:<24}", check.title, width, indent=26)
    return text


def explain_check(check: Check, width: int = WIDTH) -> str:
    """Return all that is to be said of one check."""
    text = wrap(f"{check.id}: ", check.title, width, indent=2)
    for name in _FIELDS:
        value = getattr(check, name)
        if value:
            text += wrap(f"  {name:<{_INDENT - 2}}", value, width, indent=_INDENT)
    return text


def _section(check: Check) -> str:
    fields = ((name, getattr(check, name)) for name in _FIELDS)
    rows = "".join(
        f"- **{name.capitalize()}:** {_escape(value)}\n"
        for name, value in fields
        if value
    )
    return f"\n### {check.id}\n\n{_escape(_sentence(check.title))}\n\n{rows}"


def _sentence(title: str) -> str:
    """Return a title as a sentence, or the question that it is."""
    end = "" if title.endswith(("?", ".")) else "."
    return f"{title[:1].upper()}{title[1:]}{end}"


def _escape(text: str) -> str:
    """Return text in which Markdown sees no HTML and no emphasis."""
    for mark in ("\\", "*", "`"):
        text = text.replace(mark, f"\\{mark}")
    text = re.sub(r"<(?=[A-Za-z/!?])", r"\\<", text)
    # Inside of a word an underscore is none.
    text = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)
    return " ".join(text.split())
