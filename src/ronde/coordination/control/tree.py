"""Who talks to whom: a tree of ranks, and neighbours that are lost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_ARITY = 16
"""Hosts that report to one host."""


@dataclass(frozen=True, slots=True)
class Tree:
    """One rank's neighbours in a tree rooted at rank 0.

    Attributes:
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
        others = tuple(range(1, size))
        if rank == 0:
            return cls(rank, size, None, others, frozenset(others))
        return cls(rank, size, 0, (), frozenset((0,)))

    @classmethod
    def of_hosts(cls, hosts: Sequence[str], arity: int = _ARITY) -> list["Tree"]:
        """Return every rank's neighbours, in rank order.

        A host's ranks report to its first, and those to each other, ``arity`` to one.
        ``hosts`` has the host of every rank; hosts may interleave.
        """
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


class Loss(NamedTuple):
    """A neighbour that will not answer any more.

    Attributes:
        reason: As the end of a sentence: ``rank 3, process 4711, ended``.
        is_orderly: Whether it had closed its channel.
    """

    rank: int
    reason: str
    is_orderly: bool
