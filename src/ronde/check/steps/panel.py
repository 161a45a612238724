"""All hosts at once: what is asked of them, and where what they say is written down."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ronde.check.facts import HostFacts, Value
from ronde.launch.controller.remote_programs import RemotePrograms

_END_S = 5.0


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


class Panel:
    """The hosts that can be asked, and what is known of each so far.

    Args:
        interview: With ``ronde.check.node`` on each host.
        addresses: By the host's name, the address by which others reach it; empty for
            a host that has none.
        settings: What the user said; see ``Reading``.
    """

    def __init__(
        self,
        interview: RemotePrograms,
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
        """Ask each of some hosts something; return what came of it, by name.

        Args:
            questions: By the host's name; ``do`` names the operation.
            timeout_s: How long to wait for the last answer.
        """
        lines = {name: json.dumps(each) for name, each in questions.items()}
        answers = self._interview.ask(lines, timeout_s)
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
        """Write down a fact of a host."""
        self.facts[host].values[name] = value

    def note_unread(self, host: str, name: str, reason: str) -> None:
        """Write down that a fact of a host could not be read."""
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
