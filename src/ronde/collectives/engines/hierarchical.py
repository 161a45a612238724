"""Collectives on two levels: within each host, and between hosts.

They go piece by piece. Pieces overlap: while one travels between hosts, the host works
on the next ones and on those that have come back. Every rank makes the same calls on
each communicator in the same order, whatever comes first.
"""

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ronde.collectives.arithmetic import put_back
from ronde.collectives.communicator import Communicator
from ronde.collectives.engine import Engine, ReduceOp, Work
from ronde.collectives.lane import Lane, LaneEngine
from ronde.collectives.shapes import rows


@dataclass(frozen=True, slots=True)
class HostGroups:
    """The ranks of every host.

    Attributes:
        ranks: For each host, in the order of their lowest ranks, its ranks in order.
    """

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def from_hosts(cls, hosts: Sequence[str]) -> "HostGroups":
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


PIECE_BYTES = 2 * 1024 * 1024
"""Large enough for the network's full rate, small enough that several are under way."""
_UNDER_WAY = 2
_MOST_PADDED = 2
"""How many times the bytes may travel so that all ranks' parts are of one length."""


@dataclass(frozen=True, slots=True)
class Levels(ABC):
    """What a rank does on its host and between hosts.

    Attributes:
        places: The ranks of every host.
        rank: This process among all.
        local: The ranks of this host.
    """

    places: HostGroups
    rank: int
    local: Communicator

    @abstractmethod
    def all_reduce(self, vector: Tensor, op: ReduceOp) -> None:
        """Reduce over all ranks, in place.

        Args:
            vector: Contiguous, of one dimension.
            op: Any but AVERAGE.
        """

    @abstractmethod
    def broadcast(self, vector: Tensor, root: int) -> None:
        """Copy ``root``'s vector into every rank's, in place."""

    def reduce_scatter(
        self, vector: Tensor, sizes: Sequence[int], op: ReduceOp
    ) -> Tensor:
        """Return this rank's part of the reduction.

        Args:
            vector: Contiguous, of one dimension.
            sizes: How many elements each rank is to have.
            op: Any but AVERAGE.
        """
        copy = vector.clone()
        self.all_reduce(copy, op)
        return _parts(copy, sizes)[self.rank]

    def all_gather(self, gathered: Tensor, own: Tensor, sizes: Sequence[int]) -> None:
        """Put the vectors of all ranks one after the other.

        Args:
            gathered: Contiguous, of one dimension.
            own: This rank's; it may lie in ``gathered`` already.
            sizes: How many elements each rank has.
        """
        parts = _parts(gathered, sizes)
        put_back(own, parts[self.rank])
        for root, part in enumerate(parts):
            self.broadcast(part, root)


@dataclass(frozen=True, slots=True)
class EvenLevels(Levels):
    """All hosts have equally many ranks: each exchanges its share with its likes.

    Attributes:
        cross: The ranks of equal place on every host.
    """

    cross: Communicator

    def all_reduce(self, vector: Tensor, op: ReduceOp) -> None:
        """Reduce shares on the host, each over the hosts, and gather: see Levels."""
        pipeline = _Pipeline()
        for piece in _pieces(vector):
            counts = rows(piece.numel(), self.local.size)
            first = sum(counts[: self.local.rank])
            share = piece[first : first + counts[self.local.rank]]
            self.local.reduce_scatter(piece, op, out=share).wait()
            pipeline.add(self.cross.all_reduce(share, op), self._gather(share, piece))
        pipeline.drain()

    def reduce_scatter(
        self, vector: Tensor, sizes: Sequence[int], op: ReduceOp
    ) -> Tensor:
        """Reduce on the host what goes to each place, then over hosts: see Levels."""
        parts = _parts(vector, sizes)
        result = vector.new_empty(sizes[self.rank])
        pipeline = _Pipeline()
        for begin, end in _windows(vector, sizes):
            stack = vector.new_zeros(self.local.size, self.cross.size, end - begin)
            self._match(stack, [part[begin:end] for part in parts], _into_stack)
            column = self.local.reduce_scatter(stack, op).wait()[0]
            work = self.cross.reduce_scatter(column, op)
            pipeline.add(work, _put(work, result[begin:end]))
        pipeline.drain()
        return result

    def all_gather(self, gathered: Tensor, own: Tensor, sizes: Sequence[int]) -> None:
        """Gather over the hosts what each place has, then on the host: see Levels.

        Parts that are shorter than the longest are filled up on their way.
        """
        if max(sizes) * len(sizes) > _MOST_PADDED * sum(sizes):
            Levels.all_gather(self, gathered, own, sizes)
            return
        parts = _parts(gathered, sizes)
        pipeline = _Pipeline()
        for begin, end in _windows(gathered, sizes):
            part = gathered.new_zeros(1, end - begin)
            _into_stack(part[0], own[begin:end])
            work = self.cross.all_gather(part)
            targets = [part[begin:end] for part in parts]
            pipeline.add(work, self._spread(work, targets))
        pipeline.drain()

    def broadcast(self, vector: Tensor, root: int) -> None:
        """Copy to the ranks of the root's place, then on each host: see Levels."""
        root_host, root_place = self.places.of(root)
        pipeline = _Pipeline()
        for piece in _pieces(vector):
            work = None
            if self.local.rank == root_place:
                work = self.cross.broadcast(piece, root_host)
            pipeline.add(work, _copy_on_host(self.local, piece, root_place))
        pipeline.drain()

    def _gather(self, share: Tensor, piece: Tensor) -> Callable[[], object]:
        return lambda: self.local.all_gather(share, out=piece).wait()

    def _spread(
        self, work: Work[Tensor], targets: Sequence[Tensor]
    ) -> Callable[[], object]:
        """Put on the host what came from all hosts: a target a rank."""

        def finish() -> None:
            stack = self.local.all_gather(work.wait().unsqueeze(0)).wait()
            self._match(stack, targets, _out_of_stack)

        return finish

    def _match(
        self,
        stack: Tensor,
        parts: Sequence[Tensor],
        copy: Callable[[Tensor, Tensor], None],
    ) -> None:
        """Copy between ``stack``, by place and host, and parts, by rank."""
        for host, ranks in enumerate(self.places.ranks):
            for place, rank in enumerate(ranks):
                copy(stack[place, host], parts[rank])


@dataclass(frozen=True, slots=True)
class LeaderLevels(Levels):
    """Hosts have unequal numbers of ranks: the first of each speaks for it.

    Attributes:
        cross: The first rank of every host; None on all others.
    """

    cross: Communicator | None

    def all_reduce(self, vector: Tensor, op: ReduceOp) -> None:
        """Reduce on each host, over the leaders, and copy back: see Levels."""
        pipeline = _Pipeline()
        for piece in _pieces(vector):
            self.local.all_reduce(piece, op).wait()
            work = self.cross.all_reduce(piece, op) if self.cross else None
            pipeline.add(work, _copy_on_host(self.local, piece, 0))
        pipeline.drain()

    def broadcast(self, vector: Tensor, root: int) -> None:
        """Copy on the root's host, to the leaders, on the other hosts: see Levels."""
        root_host, root_place = self.places.of(root)
        is_home = self.places.of(self.rank)[0] == root_host
        pipeline = _Pipeline()
        for piece in _pieces(vector):
            if is_home:
                self.local.broadcast(piece, root_place).wait()
            work = self.cross.broadcast(piece, root_host) if self.cross else None
            finish = None if is_home else _copy_on_host(self.local, piece, 0)
            pipeline.add(work, finish)
        pipeline.drain()


class _Pipeline:
    """Works between hosts under way, and what each host does when one is over."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[Work[Any] | None, Callable[[], object] | None]] = (
            deque()
        )

    def add(self, work: Work[Any] | None, finish: Callable[[], object] | None) -> None:
        """Add one; finish the oldest where there are enough."""
        self._under_way.append((work, finish))
        if len(self._under_way) > _UNDER_WAY:
            self._finish_oldest()

    def drain(self) -> None:
        """Finish all."""
        while self._under_way:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, finish = self._under_way.popleft()
        if work is not None:
            work.wait()
        if finish is not None:
            finish()


def _copy_on_host(
    local: Communicator, piece: Tensor, root: int
) -> Callable[[], object]:
    return lambda: local.broadcast(piece, root).wait()


def _put(work: Work[Tensor], target: Tensor) -> Callable[[], object]:
    return lambda: target.copy_(work.wait()[0, : target.numel()])


def _pieces(vector: Tensor) -> Iterator[Tensor]:
    length = PIECE_BYTES // vector.element_size()
    for start in range(0, vector.numel(), length):
        yield vector[start : start + length]


def _windows(vector: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut what each rank has so that all ranks' together are a piece."""
    width = max(1, PIECE_BYTES // (len(sizes) * vector.element_size()))
    for begin in range(0, max(sizes), width):
        yield begin, min(begin + width, max(sizes))


def _parts(vector: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    ends = list(itertools.accumulate(sizes))
    return [vector[end - n : end] for end, n in zip(ends, sizes, strict=True)]


def _into_stack(place: Tensor, part: Tensor) -> None:
    place[: part.numel()] = part


def _out_of_stack(place: Tensor, part: Tensor) -> None:
    part.copy_(place[: part.numel()])


class HierarchicalEngine(LaneEngine):
    """Does on each host what need not cross the network."""

    name = "hierarchical"

    def __init__(
        self,
        world: Engine,
        local: Communicator,
        cross: Communicator | None,
        places: HostGroups,
    ) -> None:
        """Take communicators over; they are closed with this one.

        Args:
            world: All ranks; it has the calls that two levels do not help.
            local: The ranks of this host, in order of rank.
            cross: Where all hosts have equally many ranks, those of this rank's place
                on each, in the order of hosts. Else the first of each host, and None
                on the others.
            places: The ranks of every host.
        """
        super().__init__(world, Lane(*([local, cross] if cross else [local])))
        self._local, self._cross = local, cross
        self._places = places
        self._levels: Levels = LeaderLevels(places, world.rank, local, cross)
        if places.is_even and cross is not None:
            self._levels = EvenLevels(places, world.rank, local, cross)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate where the host's engine likes it: see ``Engine``."""
        self.require_open()
        return self._local.allocate(numel, dtype, device)

    def clone(self) -> "HierarchicalEngine":
        """Make another of the same ranks: see ``Engine``."""
        self.require_open()
        return HierarchicalEngine(
            self._world.clone(),
            self._local.duplicate(),
            self._cross.duplicate() if self._cross else None,
            self._places,
        )

    def _reduce(self, vector: Tensor, op: ReduceOp) -> None:
        self._levels.all_reduce(vector, op)

    def _reduce_parts(
        self, vector: Tensor, counts: Sequence[int], op: ReduceOp
    ) -> Tensor:
        return self._levels.reduce_scatter(vector, counts, op)

    def _gather(self, out: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        self._levels.all_gather(out, own, counts)

    def _copy(self, data: Tensor, root: int) -> None:
        self._levels.broadcast(data, root)
