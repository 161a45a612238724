"""All hosts at once: what is asked of them, and the facts that they answer.

A step has all hosts do something at the same time. On each host runs
``ronde.check.node``, which calls an operation for each question.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from ronde.check.facts import HostFacts, Value

if TYPE_CHECKING:
    # It is long to import, and every probe imports this.
    from ronde.launch.controller.starting import RemotePrograms

_END_S = 5.0


class NodeContext(NamedTuple):
    """What is kept on a host from question to question.

    Attributes:
        memory: Whatever operations put there, by names of their own.
        closing: Undone when the program ends: sockets, files.
    """

    memory: dict[str, Any]
    closing: ExitStack


Operation = Callable[[NodeContext, dict[str, Value]], dict[str, Value]]
"""Answers a question on a host.

It bounds its own time. ``OSError``, ``ValueError`` and ``KeyError`` become the answer's
``error``.
"""


class Reply(NamedTuple):
    """What came of a question to one host.

    Attributes:
        values: The answer; empty where there was none.
        failure: Why there was none, in half a sentence; empty where there was one.
        asked_s: When it was asked, on this machine's monotonic clock.
        answered_s: When the answer was here.
    """

    values: dict[str, Any]
    failure: str
    asked_s: float
    answered_s: float


class HostSet:
    """The hosts that can be asked, and what is known of each so far.

    Args:
        interview: With ``ronde.check.node`` on each host.
        addresses: By the host's name, the address by which others reach it; empty for
            a host that has none.
        settings: What the user asked for; see ``Reading``.
    """

    def __init__(
        self,
        interview: "RemotePrograms",
        addresses: Mapping[str, str],
        settings: dict[str, Value],
    ) -> None:
        self.addresses = dict(addresses)
        self.settings = settings
        self.facts = {name: HostFacts(name, {}, {}, {}) for name in addresses}
        self._interview = interview

    @property
    def names(self) -> list[str]:
        """The hosts, in the user's order."""
        return list(self.facts)

    def ask(
        self, questions: Mapping[str, Mapping[str, Value]], timeout_s: float
    ) -> dict[str, Reply]:
        """Ask some hosts; return what came of it, by name.

        Args:
            questions: By the host's name; ``do`` names the operation.
            timeout_s: How long to wait for the last answer.
        """
        lines = {name: json.dumps(each) for name, each in questions.items()}
        answers = self._interview.ask(lines, timeout_s) if lines else {}
        return {name: _reply_of(*answer) for name, answer in answers.items()}

    def ask_all(
        self, question: Mapping[str, Value], timeout_s: float
    ) -> dict[str, Reply]:
        """Ask all hosts the same."""
        return self.ask(dict.fromkeys(self.names, question), timeout_s)

    def end(self) -> None:
        """End the programs on all hosts."""
        self.ask_all({"do": "end"}, _END_S)

    def note(self, host: str, name: str, value: Value) -> None:
        """Store a fact of a host."""
        self.facts[host].values[name] = value

    def note_unread(self, host: str, name: str, reason: str) -> None:
        """Store why a fact of a host could not be read."""
        self.facts[host].unreadable[name] = reason


def _reply_of(line: str, failure: str, asked_s: float, answered_s: float) -> Reply:
    values: Any = {}
    if not failure:
        try:
            values = json.loads(line)
            failure = values.pop("error", "")
        except (ValueError, AttributeError, TypeError):
            values, failure = {}, "its answer cannot be understood"
    return Reply(values, failure, asked_s, answered_s)


class Step(NamedTuple):
    """A step, which is left out where no check needs its facts.

    Attributes:
        name: For people.
        run: Has the hosts do it, and stores the facts.
        facts: Names of the facts that it may store.
        reads: Names of facts of others that it takes into account.
        setting: What the user must have asked for; empty for nothing.
    """

    name: str
    run: Callable[[HostSet], None]
    facts: tuple[str, ...]
    reads: tuple[str, ...] = ()
    setting: str = ""
