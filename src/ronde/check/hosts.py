"""Send questions to all hosts at once, and store facts from their answers.

In a step, all hosts work at the same time. Each host runs ``ronde.check.node``, which
calls the operation that the question names. An operation is a function of the
``NodeContext`` and the question, and returns the answer. Operations limit their own
duration. If an operation raises ``OSError``, ``ValueError`` or ``KeyError``, the answer
has ``error``.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from ronde.check.fleet import HostFacts, Value

if TYPE_CHECKING:
    # Every probe imports this module; ``programs`` is slow to import.
    from ronde.launch.job.programs import RemotePrograms

_END_S = 5.0


class NodeContext(NamedTuple):
    """State that the program on a host keeps between questions."""

    memory: dict[str, Any]
    closing: ExitStack  # closed when the program ends: sockets, files


class Reply(NamedTuple):
    """The answer of one host, with times of this machine's monotonic clock."""

    values: dict[str, Any]
    failure: str  # the reason if there is no answer, else empty
    asked_s: float
    answered_s: float


class HostSet:
    """The connected hosts, and the facts collected from them.

    ``addresses`` has, for each host, the address at which the other hosts reach it, or
    "" if no other host has a route to it.
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
        """Send a question to each host in ``questions``, and wait for all answers."""
        lines = {name: json.dumps(each) for name, each in questions.items()}
        answers = self._programs.ask(lines, timeout_s) if lines else {}
        replies: dict[str, Reply] = {}
        for name, (line, failure, asked_s, answered_s) in answers.items():
            try:
                values: Any = {"error": failure} if failure else json.loads(line)
                reason = values.pop("error", "")
            except (ValueError, AttributeError, TypeError):
                values, reason = {}, "its answer is malformed"
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
    """A measurement on all hosts at once, run only if a check needs its facts."""

    name: str
    run: Callable[[HostSet], None]
    facts: tuple[str, ...]  # those that it stores
    reads: tuple[str, ...] = ()  # facts of other probes and steps
    setting: str = ""  # it runs only if this setting is on; empty: always
