"""Reads the options of every command; an error is one sentence."""

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from ronde.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Raises ``UsageError`` where argparse would print its usage and exit with 2."""

    def __init__(self, prog: str, **more: Any) -> None:  # noqa: ANN401  argparse's own
        super().__init__(
            prog=prog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **more,
        )

    def alias(self, option: str, *names: str) -> None:
        """Let further names stand for an option; the help does not show them."""
        for name in names:
            self._option_string_actions[name] = self._option_string_actions[option]

    def add_underscore_twins(self) -> None:
        """Let every ``--a-b`` be typed as ``--a_b``."""
        for name in list(self._option_string_actions):
            self.alias(name, name[:2] + name[2:].replace("-", "_"))

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the command line, by ``UsageError``."""
        if match := re.match(
            r"(?:ambiguous option|unrecognized arguments): (\S+)", message
        ):
            self._refuse_unknown(match[1])
        required = "the following arguments are required: "
        if message.startswith(required):
            message = f"{message.removeprefix(required)} must be given, got none"
        if match := re.match(r"argument ([^\s/]+)\S*: (.*)", message):
            option, problem = match[1], match[2]
            if problem.startswith("expected "):
                message = f"{option} must have a value, got none"
            elif explicit := re.match("ignored explicit argument '(.*)'", problem):
                message = f"{option} must have no value, got '{explicit[1]}'"
                if not option.startswith("--"):
                    self._refuse_foreign(option + explicit[1])
            else:
                message = f"{option}: {problem}"
        raise UsageError(f"{message}. Type: {self.prog} --help")

    def _refuse_unknown(self, word: str) -> NoReturn:
        from difflib import get_close_matches

        if not word.startswith("-"):
            raise UsageError(f"unexpected word {word!r}. Type: {self.prog} --help")
        self._refuse_foreign(word)
        name = word.partition("=")[0]
        known = [n for a in self._actions for n in a.option_strings if n[:2] == "--"]
        near = get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.7)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(f"unknown option {name}.{meant} Type: {self.prog} --help")

    def _refuse_foreign(self, word: str) -> None:
        """Refuse a well-known option of another launcher, with what stands for it."""


def refuse_verb(word: str, verbs: Sequence[str], command: str) -> NoReturn:
    """Say by ``UsageError`` that ``word`` is no verb, and which one was meant."""
    from difflib import get_close_matches

    near = get_close_matches(word, verbs, n=1, cutoff=0.6)
    if near:
        cure = f"Did you mean {command} {near[0]}?"
    elif word.startswith("-"):
        cure = f"Type: {command} --help"
    else:
        cure = f"Type: {command} {verbs[0]} {word} ..., or {command} --help"
    known = f"{', '.join(verbs[:-1])} or {verbs[-1]}"
    raise UsageError(f"verb must be {known}, got {word!r}. {cure}")
