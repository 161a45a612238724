"""All hosts at once: what is asked of them, and the facts that they answer.

A step has all hosts do something at the same time. On each host runs
``ronde.check.node``, which calls an operation for each question: a function that takes
the ``NodeContext`` and the question, and returns the answer. It bounds its own time;
``OSError``, ``ValueError`` and ``KeyError`` become the answer's ``error``.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from ronde.check.fleet import HostFacts, Value

if TYPE_CHECKING:
    # It is long to import, and every probe imports this.
    from ronde.launch.job.programs import RemotePrograms

_END_S = 5.0


class NodeContext(NamedTuple):
    """What is kept on a host from question to question."""

    memory: dict[str, Any]  # by names of the operations' own
    closing: ExitStack  # undone when the program ends: sockets, files


class Reply(NamedTuple):
    """The answer of one host; times are by this machine's monotonic clock."""

    values: dict[str, Any]
    failure: str  # why there is none, without a subject; empty where there is one
    asked_s: float
    answered_s: float


class HostSet:
    """The hosts that can be asked, by name, and what is known of each so far.

    ``addresses``: by which others reach them; empty for a host that has none.
    """

    def __init__(
        self,
        programs: "RemotePrograms",
        addresses: Mapping[str, str],
        settings: dict[str, Value],
    ) -> None:
        self.addresses = dict(addresses)
        self.settings = settings
        self.facts = {name: HostFacts(name, {}, {}, {}) for name in addresses}
        self._programs = programs

    @property
    def names(self) -> list[str]:
        return list(self.facts)

    def ask(
        self, questions: Mapping[str, Mapping[str, Value]], timeout_s: float
    ) -> dict[str, Reply]:
        """Ask some hosts, by name, and wait for the last answer."""
        lines = {name: json.dumps(each) for name, each in questions.items()}
        answers = self._programs.ask(lines, timeout_s) if lines else {}
        replies: dict[str, Reply] = {}
        for name, (line, failure, asked_s, answered_s) in answers.items():
            try:
                values: Any = {"error": failure} if failure else json.loads(line)
                reason = values.pop("error", "")
            except (ValueError, AttributeError, TypeError):
                values, reason = {}, "its answer cannot be understood"
            replies[name] = Reply(values, reason, asked_s, answered_s)
        return replies

    def ask_all(
        self, question: Mapping[str, Value], timeout_s: float
    ) -> dict[str, Reply]:
        return self.ask(dict.fromkeys(self.names, question), timeout_s)

    def end(self) -> None:
        self.ask_all({"do": "end"}, _END_S)

    def note(self, host: str, name: str, value: Value) -> None:
        self.facts[host].values[name] = value

    def note_unread(self, host: str, name: str, reason: str) -> None:
        self.facts[host].unreadable[name] = reason


class ProbeStep(NamedTuple):
    """A step, which is left out where no check needs its facts."""

    name: str
    run: Callable[[HostSet], None]
    facts: tuple[str, ...]  # what it may store
    reads: tuple[str, ...] = ()  # facts of others that it uses
    setting: str = ""  # what the user must have asked for; empty for nothing
