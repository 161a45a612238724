"""What is known of the hosts."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# Setting: what ``ronde run`` would forward to every host, by the variable's name.
ENVIRONMENT = "environment"
Value = Any  # what JSON can hold
Values = Mapping[str, Value]
HostPair = tuple[str, str]


class HostFacts(NamedTuple):
    """All that is known of one host."""

    host: str
    values: dict[str, Value]  # by the fact's name, such as ``host.memlock_bytes``
    unreadable: dict[str, str]  # by the fact's name: why, and what would help
    seconds: dict[str, float]  # by the probe's name: how long it took


class Fleet(NamedTuple):
    """The hosts, in the user's order, and what the user asked for."""

    hosts: tuple[HostFacts, ...]
    settings: dict[str, Value]

    @property
    def num_ranks(self) -> int:
        return int(self.settings.get("num_ranks") or 1)

    def having(self, *names: str) -> Iterator[HostFacts]:
        """Yield the hosts of which all these facts are known."""
        for facts in self.hosts:
            if all(name in facts.values for name in names):
                yield facts

    def known(self, name: str) -> dict[str, Value]:
        return {facts.host: facts.values[name] for facts in self.having(name)}
