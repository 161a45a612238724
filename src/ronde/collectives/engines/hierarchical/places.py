"""Which ranks share a host."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Places:
    """The ranks of every host.

    Attributes:
        ranks: For each host, in the order of their lowest ranks, its ranks in order.
    """

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def from_hosts(cls, hosts: Sequence[str]) -> "Places":
        """Group ranks by the host of each; hosts may interleave."""
        found: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            found.setdefault(host, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in found.values()))

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return len(self.ranks)

    @property
    def is_even(self) -> bool:
        """Whether all hosts have equally many ranks."""
        return len({len(ranks) for ranks in self.ranks}) == 1

    def of(self, rank: int) -> tuple[int, int]:
        """Return the host of ``rank`` and its place there."""
        for host, ranks in enumerate(self.ranks):
            if rank in ranks:
                return host, ranks.index(rank)
        raise AssertionError(rank)
