"""Parse command lines, with options declared by the lines of the help text."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ronde.errors import UsageError

_OPTION = re.compile(r"  (-\S+(?:, -\S+)*)(?: ([^\s-]\S*))?( \.\.\.)?(?:  +\S.*)?")
_OPTIONAL = "[no-]"


class CommandParser(argparse.ArgumentParser):
    """A parser with the options that the help text declares.

    A line that begins with two blanks and a ``-`` declares an option:
    ``  -n, --num-proc N  ranks`` takes a value, ``  --json  print JSON`` takes none. A
    value in braces must be one of those words, one in brackets may be left out, and
    with ``...`` behind it the option may be given several times. ``--[no-]x`` is both
    ``--x`` and ``--no-x``. Options that were not given are None, [] or False.

    Args:
        types: Functions that convert a value, by the option's first name or by the
            value's word in the help. They raise ``UsageError``.
        positionals: The ``nargs`` of each positional argument, by its name.

    Raises:
        UsageError: The command line is invalid.
    """

    def __init__(
        self,
        command: str,
        help_text: str,
        *,
        types: Mapping[str, Callable[[str], Any]] | None = None,
        positionals: Mapping[str, str | None] | None = None,
    ) -> None:
        # argparse would make one for each option, and each asks for the terminal's
        # width.
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
        """Add the options that further lines of help declare."""
        for match in filter(None, map(_OPTION.fullmatch, text.splitlines())):
            names, value = match[1].split(", "), match[2] or ""
            usual = one_of(*value[1:-1].split(",")) if value.startswith("{") else str
            read = self._types.get(names[0]) or self._types.get(value, usual)
            how: dict[str, Any] = {"metavar": value, "type": _argparse_type(read)}
            if _OPTIONAL in names[0]:
                names = [names[0].replace(_OPTIONAL, "")]
                how = {"action": argparse.BooleanOptionalAction}
            elif not value:
                how = {"action": "store_true"}
            elif match[3]:
                how |= {"action": "append", "default": []}
            elif value.startswith("["):
                how |= {"nargs": "?", "const": ""}
            self.add_argument(*names, **how)

    def read(self, words: Sequence[str]) -> argparse.Namespace | None:
        """Return the options; with ``--help`` print the help and return None."""
        if "-h" in words or "--help" in words:
            self.print_help()
            return None
        return self.parse_args(words)

    def format_help(self) -> str:
        return self._help

    def given(self, options: argparse.Namespace) -> dict[str, str]:
        """Return the first names of the options that were given, by attribute."""
        given: dict[str, str] = {}
        for action in self._actions:
            value = getattr(options, action.dest, action.default)
            is_own = action.nargs == "?" or action.const in (None, value)
            is_given = value != action.default and is_own
            if action.option_strings and is_given:
                given[action.dest] = action.option_strings[0]
        return given

    @property
    def options(self) -> Mapping[str, argparse.Action]:
        """All options by name, including those that the help does not show."""
        return self._option_string_actions

    def alias(self, option: str, *names: str) -> None:
        """Accept further names of an option; the help does not show them."""
        for name in names:
            self._option_string_actions[name] = self._option_string_actions[option]

    def add_underscore_twins(self) -> None:
        """Accept ``--a_b`` for every ``--a-b``."""
        for name in list(self._option_string_actions):
            self.alias(name, name[:2] + name[2:].replace("-", "_"))

    def error(self, message: str) -> NoReturn:
        if match := re.match(r"(ambiguous option|unrecog.* arguments): (\S+)", message):
            self._refuse_unknown(match[2])
        if match := re.match("the following arguments are required: (.*)", message):
            message = f"{match[1]} {'are' if ',' in match[1] else 'is'} required"
        if match := re.match(r"argument ([^\s/]+)\S*: (.*)", message):
            option, problem = match[1], match[2]
            sign = "" if problem.startswith("must ") else ":"
            message = f"{option}{sign} {problem}"
            if message.endswith("."):
                raise UsageError(message)
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
        near = nearest(name.replace("_", "-"), known, 0.7)
        meant = f" Did you mean {near}?" if near else ""
        raise UsageError(f"unknown option {name}.{meant} Type: {self.prog} --help")

    def _refuse_foreign(self, word: str) -> None:
        """Refuse another launcher's well-known option, and name ronde's instead."""


def _argparse_type(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a converter so that argparse keeps its ``UsageError`` message."""
    if isinstance(read, type):
        return read

    def convert(text: str) -> object:
        try:
            return read(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def nearest(word: str, known: Sequence[str], cutoff: float) -> str:
    """Return the known word most like a misspelt one, or "" if none is."""
    from difflib import get_close_matches  # only needed for a misspelt word

    return next(iter(get_close_matches(word, known, n=1, cutoff=cutoff)), "")


def require_alone(options: argparse.Namespace, *names: str) -> None:
    given = [name for name in names if getattr(options, attribute_of(name))]
    if len(given) > 1:
        raise UsageError(f"{given[0]} cannot be combined with {given[1]}. Drop one.")


def attribute_of(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def whole_number(least: int = 0, most: int | None = None) -> Callable[[str], int]:
    """Return an argparse type that accepts whole numbers within limits."""

    def read(text: str) -> int:
        if re.fullmatch("[0-9]{1,9}", text):
            number = int(text)
            if number >= least and (most is None or number <= most):
                return number
        rule = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"must be a whole number {rule}, got {text!r}")

    return read


def one_of(*words: str) -> Callable[[str], str]:
    """Return an argparse type that accepts only these words."""

    def read(text: str) -> str:
        if text not in words:
            raise UsageError(f"must be {_list_choices(words)}, got {text!r}")
        return text

    return read


def read_number(
    name: str, text: str, cure: str, *, least: int = 0, most: int | None = None
) -> int:
    try:
        return whole_number(least, most)(text)
    except UsageError as error:
        raise UsageError(f"{name} {error}. {cure}") from None


def read_nodes(
    text: str, name: str = "--nodes", cure: str = "Type: ronde run -H a,b --nodes 2 ..."
) -> tuple[int, int]:
    """Read a number of nodes, such as ``3``, or a range, such as ``2:4``."""
    few, is_range, many = text.partition(":")
    least = read_number(name, few, cure, least=1)
    most = read_number(name, many, cure, least=1) if is_range else least
    if least > most:
        raise UsageError(
            f"{name} must begin with the smaller number, got {text!r}. {cure}"
        )
    return least, most


def read_one_of(option: str, word: str, words: Sequence[str]) -> str:
    try:
        return one_of(*words)(word)
    except UsageError as error:
        raise UsageError(f"{option} {error}. Type: {option} {words[0]}") from None


def refuse_verb(word: str, verbs: Sequence[str], command: str) -> NoReturn:
    """Raise a ``UsageError`` that names the verb most like ``word``."""
    cure = f"Type: {command} {verbs[0]} {word} ..., or {command} --help"
    if near := nearest(word, verbs, 0.6):
        cure = f"Did you mean {command} {near}?"
    elif word.startswith("-"):
        cure = f"Type: {command} --help"
    raise UsageError(f"verb must be {_list_choices(verbs)}, got {word!r}. {cure}")


def _list_choices(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
