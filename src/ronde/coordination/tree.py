"""Who talks to whom while ranks agree: a tree of ranks, rooted at rank 0."""

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_ARITY = 16
"""Hosts that report to one host."""


@dataclass(frozen=True, slots=True)
class Tree:
    """One rank's neighbours.

    Attributes:
        rank: This process.
        size: Number of ranks.
        parent: Who it reports to; None for the root.
        children: Who reports to it, ascending.
        local: Those of its neighbours that run on its host.
    """

    rank: int
    size: int
    parent: int | None
    children: tuple[int, ...]
    local: frozenset[int]

    @classmethod
    def flat(cls, rank: int, size: int) -> "Tree":
        """Have everyone report to rank 0, on one host."""
        others = tuple(range(1, size))
        if rank == 0:
            return cls(rank, size, None, others, frozenset(others))
        return cls(rank, size, 0, (), frozenset((0,)))

    @classmethod
    def of_hosts(
        cls, rank: int, hosts: Sequence[str], arity: int = DEFAULT_ARITY
    ) -> "Tree":
        """Have each host's ranks report to its first, and those to each other.

        Args:
            rank: This process.
            hosts: The host of every rank, in rank order; hosts may interleave.
            arity: How many hosts report to one host.
        """
        return cls.all_of_hosts(hosts, arity)[rank]

    @classmethod
    def all_of_hosts(
        cls, hosts: Sequence[str], arity: int = DEFAULT_ARITY
    ) -> list["Tree"]:
        """Return every rank's neighbours, in rank order: see ``of_hosts``."""
        members: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            members.setdefault(host, []).append(rank)
        leaders = [ranks[0] for ranks in members.values()]
        size = len(hosts)
        trees: dict[int, Tree] = {}
        for index, (leader, *others) in enumerate(members.values()):
            below = leaders[arity * index + 1 : arity * index + 1 + arity]
            parent = leaders[(index - 1) // arity] if index else None
            children = tuple(sorted([*others, *below]))
            trees[leader] = cls(leader, size, parent, children, frozenset(others))
            for rank in others:
                trees[rank] = cls(rank, size, leader, (), frozenset((leader,)))
        return [trees[rank] for rank in range(size)]
