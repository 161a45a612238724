"""The facts collected from all hosts, and the settings of the command line."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# Setting: the variables that ``ronde run`` would forward to every host.
ENVIRONMENT = "environment"
Value = Any  # of JSON
Values = Mapping[str, Value]
HostPair = tuple[str, str]


class HostFacts(NamedTuple):
    """The facts read on one host, and the reason for each fact that is unreadable."""

    host: str
    values: dict[str, Value]  # by fact, such as ``host.memlock_bytes``
    unreadable: dict[str, str]  # the reason, by fact
    seconds: dict[str, float]  # duration by probe


class Fleet(NamedTuple):
    """The facts of all hosts in the user's order, and the command line's settings."""

    hosts: tuple[HostFacts, ...]
    settings: dict[str, Value]

    @property
    def num_ranks(self) -> int:
        return int(self.settings.get("num_ranks") or 1)

    def having(self, *names: str) -> Iterator[HostFacts]:
        """Yield the hosts that have all these facts."""
        for facts in self.hosts:
            if all(name in facts.values for name in names):
                yield facts

    def known(self, name: str) -> dict[str, Value]:
        return {facts.host: facts.values[name] for facts in self.having(name)}
