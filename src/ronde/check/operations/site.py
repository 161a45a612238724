"""What an operation leaves on its host for the next one to find."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from ronde.check.facts import Value


class Site(NamedTuple):
    """What is kept from question to question.

    Attributes:
        memory: Whatever operations put there, by names of their own.
        closing: Undone when the program ends: sockets, files.
    """

    memory: dict[str, Any]
    closing: ExitStack


Operation = Callable[[Site, dict[str, Value]], dict[str, Value]]
"""Does what a question says, and returns what its answer says.

It bounds its own time. What the question cannot be blamed for is part of the answer;
``OSError``, ``ValueError`` and ``KeyError`` become the answer's ``error``.
"""
