"""Makes docs/checks.md from the checks' own texts."""

import re
from collections.abc import Sequence
from pathlib import Path

from ronde.check.catalogue import all_checks
from ronde.check.check import Check, Family
from ronde.render.check import SHOWN_FIELDS

_PAGE_HEAD = """\
# The checks of `ronde check`

Each check: the facts that it reads, its threshold and the source of that, the effect on
training, and the fix. `ronde check explain ID` shows the same.
A check whose facts cannot be read is reported as such and is no fault. See
[ronde check](check.md) for how to use it.

This page is made from the checks themselves: `python scripts/check_pages.py`.
"""
_TITLES = {
    Family.VERSIONS: "Versions and settings",
    Family.GPU: "GPUs",
    Family.HOST: "The host",
    Family.NETWORK: "The network",
    Family.STORAGE: "Storage",
    Family.CLUSTER: "All hosts together",
}


def draw_page(checks: Sequence[Check]) -> str:
    text = _PAGE_HEAD
    for family, title in _TITLES.items():
        own = [check for check in checks if check.family is family]
        text += f"\n## {title} (`{family}`)\n" if own else ""
        for check in own:
            # A title is a sentence without its end, or a question.
            end = "" if check.title.endswith(("?", ".")) else "."
            sentence = f"{check.title[:1].upper()}{check.title[1:]}{end}"
            text += f"\n### {check.id}\n\n{_escape(sentence)}\n\n"
            for name in SHOWN_FIELDS:
                if value := getattr(check, name):
                    text += f"- **{name.capitalize()}:** {_escape(value)}\n"
    return text


def _escape(text: str) -> str:
    """Return text in which Markdown sees no HTML and no emphasis."""
    for mark in ("\\", "*", "`"):
        text = text.replace(mark, f"\\{mark}")
    text = re.sub(r"<(?=[A-Za-z/!?])", r"\\<", text)
    # Inside of a word an underscore is none.
    text = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)
    return " ".join(text.split())


if __name__ == "__main__":
    page = Path(__file__).parents[1] / "docs" / "checks.md"
    page.write_text(draw_page(all_checks()), encoding="utf-8")
