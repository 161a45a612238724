"""Options of every command, declared by the lines of its help text."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ronde.errors import UsageError

_OPTION = re.compile(r"  (-\S+(?:, -\S+)*)(?: ([^\s-]\S*))?( \.\.\.)?(?:  +\S.*)?")
_OPTIONAL = "[no-]"


class CommandParser(argparse.ArgumentParser):
    """Reads the words of a command as its help text declares them.

    A line of two blanks and a name that begins with ``-`` declares an option:
    ``  -n, --num-proc N  ranks`` takes a value, ``  --json  print JSON`` takes none. A
    value in braces must be one of those words, one in brackets may be left out, and
    with ``...`` behind it the option may be given several times. ``--[no-]x`` is both
    ``--x`` and ``--no-x``. Options that were not given are None, [] or False.
    ``types`` has what reads a value, by its word in the help; ``positionals`` the
    ``nargs`` of each. Errors are ``UsageError``.
    """

    def __init__(
        self,
        command: str,
        help_text: str,
        *,
        types: Mapping[str, Callable[[str], Any]] | None = None,
        positionals: Mapping[str, str | None] | None = None,
    ) -> None:
        # One for all options: argparse would make one for each, and each asks for the
        # terminal's width.
        formatter = argparse.HelpFormatter(command, width=80)
        super().__init__(
            prog=command,
            add_help=False,
            allow_abbrev=False,
            formatter_class=lambda prog: formatter,  # noqa: ARG005 - argparse names it
        )
        self._help, self._types = help_text, types or {}
        self.declare(help_text)
        for name, nargs in (positionals or {}).items():
            self.add_argument(name, nargs=nargs, metavar=name.rstrip("s").upper())

    def declare(self, text: str) -> None:
        """Add the options of further lines, which the help need not show."""
        for match in filter(None, map(_OPTION.fullmatch, text.splitlines())):
            names, value = match[1].split(", "), match[2] or ""
            how: dict[str, Any] = {
                "metavar": value,
                "type": self._types.get(value, str),
            }
            if _OPTIONAL in names[0]:
                names = [names[0].replace(_OPTIONAL, "")]
                how = {"action": argparse.BooleanOptionalAction}
            elif not value:
                how = {"action": "store_true"}
            elif match[3]:
                how = {"action": "append", "default": [], "metavar": value}
            elif value.startswith("{"):
                how["choices"] = value[1:-1].split(",")
            elif value.startswith("["):
                how |= {"nargs": "?", "const": ""}
            self.add_argument(*names, **how)

    def read(self, words: Sequence[str]) -> argparse.Namespace | None:
        """Return the options; None where help was asked for, and shown."""
        if "-h" in words or "--help" in words:
            self.print_help()
            return None
        return self.parse_args(words)

    def format_help(self) -> str:
        return self._help

    def given(self, options: argparse.Namespace) -> dict[str, str]:
        """Return how each option is typed that was given, by its attribute."""
        given: dict[str, str] = {}
        for action in self._actions:
            value = getattr(options, action.dest, action.default)
            is_given = value != action.default and action.const in (None, value)
            if action.option_strings and is_given:
                given[action.dest] = action.option_strings[0]
        return given

    @property
    def options(self) -> Mapping[str, argparse.Action]:
        """Every name of an option, also those that the help does not show."""
        return self._option_string_actions

    def alias(self, option: str, *names: str) -> None:
        """Let further names stand for an option; the help does not show them."""
        for name in names:
            self._option_string_actions[name] = self._option_string_actions[option]

    def add_underscore_twins(self) -> None:
        """Let every ``--a-b`` be typed as ``--a_b``."""
        for name in list(self._option_string_actions):
            self.alias(name, name[:2] + name[2:].replace("-", "_"))

    def error(self, message: str) -> NoReturn:
        if match := re.match(r"(ambiguous option|unrecog.* arguments): (\S+)", message):
            self._refuse_unknown(match[2])
        if match := re.match("the following arguments are required: (.*)", message):
            message = f"{match[1]} must be given, got none"
        if match := re.match(r"argument ([^\s/]+)\S*: (.*)", message):
            option, problem = match[1], match[2]
            message = f"{option}: {problem}"
            if problem.startswith("expected "):
                message = f"{option} must have a value, got none"
            elif explicit := re.match("ignored explicit argument '(.*)'", problem):
                message = f"{option} must have no value, got '{explicit[1]}'"
                if not option.startswith("--"):
                    self._refuse_foreign(option + explicit[1])
        raise UsageError(f"{message}. Type: {self.prog} --help")

    def _refuse_unknown(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            raise UsageError(f"unexpected word {word!r}. Type: {self.prog} --help")
        self._refuse_foreign(word)
        name = word.partition("=")[0]
        known = [n for a in self._actions for n in a.option_strings if n[:2] == "--"]
        near = _nearest(name.replace("_", "-"), known, 0.7)
        meant = f" Did you mean {near}?" if near else ""
        raise UsageError(f"unknown option {name}.{meant} Type: {self.prog} --help")

    def _refuse_foreign(self, word: str) -> None:
        """Refuse a well-known option of another launcher, with what stands for it."""


def _nearest(word: str, known: Sequence[str], cutoff: float) -> str:
    from difflib import get_close_matches  # which nobody needs who types it right

    return next(iter(get_close_matches(word, known, n=1, cutoff=cutoff)), "")


def require_alone(options: argparse.Namespace, *names: str) -> None:
    given = [name for name in names if getattr(options, attribute_of(name))]
    if len(given) > 1:
        raise UsageError(f"{given[0]} must stand alone, got {given[1]} too. Drop one.")


def attribute_of(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def read_number(
    option: str, text: str, cure: str, *, least: int = 0, most: int | None = None
) -> int:
    if re.fullmatch("[0-9]{1,9}", text):
        number = int(text)
        if number >= least and (most is None or number <= most):
            return number
    rule = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise UsageError(f"{option} must be a whole number {rule}, got {text!r}. {cure}")


def read_one_of(option: str, word: str, words: Sequence[str]) -> str:
    if word not in words:
        raise UsageError(
            f"{option} must be {', '.join(words[:-1])} or {words[-1]}, got {word!r}. "
            f"Type: {option} {words[0]}"
        )
    return word


def refuse_verb(word: str, verbs: Sequence[str], command: str) -> NoReturn:
    """Raise ``UsageError``: ``word`` is no verb; which one was meant."""
    cure = f"Type: {command} {verbs[0]} {word} ..., or {command} --help"
    if near := _nearest(word, verbs, 0.6):
        cure = f"Did you mean {command} {near}?"
    elif word.startswith("-"):
        cure = f"Type: {command} --help"
    known = f"{', '.join(verbs[:-1])} or {verbs[-1]}"
    raise UsageError(f"verb must be {known}, got {word!r}. {cure}")
