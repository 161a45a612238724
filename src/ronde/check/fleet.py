"""All hosts that were looked at: what most have, and who differs."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ronde.check.facts import HostFacts, Value

MIN_MAJORITY = 3
"""Of fewer hosts none is in the minority."""


def spell(value: Value) -> str:
    """Return a value as people read it, equal ones alike."""
    if isinstance(value, str):
        return value or "(empty)"
    if isinstance(value, bool):
        return "on" if value else "off"
    return json.dumps(value, sort_keys=True)


class Odd(NamedTuple):
    """A host that differs.

    Attributes:
        host: Its name.
        value: What it has, for people.
        usual: What most others have, for people; of a draw, what the others have.
    """

    host: str
    value: str
    usual: str


class Fleet(NamedTuple):
    """The hosts, in the user's order.

    Attributes:
        hosts: What is known of each.
        settings: What the user said, for checks that need it; see ``Reading``.
    """

    hosts: tuple[HostFacts, ...]
    settings: dict[str, Value]

    def having(self, *names: str) -> Iterator[HostFacts]:
        """Yield the hosts of which all these facts are known."""
        for facts in self.hosts:
            if all(name in facts.values for name in names):
                yield facts

    def odd_ones(
        self, name: str, show: Callable[[Value], str] = spell
    ) -> Iterator[Odd]:
        """Yield the hosts in which a fact is not what most hosts have.

        In a draw, or of two hosts, all are odd: who is right is not for a count to say.

        Args:
            name: The fact's name.
            show: Writes a value for people; what it writes alike is alike.
        """
        told = [(each.host, show(each.values[name])) for each in self.having(name)]
        counts = Counter(value for _, value in told)
        if len(counts) < 2:
            return
        (usual, most), (_, second) = counts.most_common(2)
        is_draw = most == second or len(told) < MIN_MAJORITY
        for host, value in told:
            if is_draw:
                others = [v for v in counts if v != value]
                yield Odd(host, value, f"{', '.join(others)} elsewhere")
            elif value != usual:
                yield Odd(host, value, f"{usual} on {most} hosts")
