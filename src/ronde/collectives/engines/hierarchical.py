"""Collectives on two levels: within each host, and between hosts.

They go piece by piece. Pieces overlap: while one travels between hosts, the host works
on the next ones and on those that have come back. Every rank makes the same calls on
each communicator in the same order, whatever comes first.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ronde.collectives.arithmetic import put_back
from ronde.collectives.communicator import Communicator
from ronde.collectives.engine import Engine, ReduceOp, Work
from ronde.collectives.lane import Lane, LaneEngine
from ronde.collectives.shapes import rows

PIECE_BYTES = 2 * 1024 * 1024
"""Large enough for the network's full rate, small enough that several are under way."""
_UNDER_WAY = 2
_MOST_PADDED = 2
"""How many times the bytes may travel so that all ranks' parts are of one length."""


class HostGroups(NamedTuple):
    """For each host, in the order of their lowest ranks, its ranks in order."""

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


class HierarchicalEngine(LaneEngine):
    """Does on each host what need not cross the network.

    ``world`` has all ranks, for the calls that two levels do not help; ``local`` those
    of this host, in order of rank; ``cross`` one of each host, in the order of hosts.
    """

    name = "hierarchical"

    def __init__(
        self,
        world: Engine,
        local: Communicator,
        cross: Communicator | None,
        groups: HostGroups,
    ) -> None:
        """Take communicators over; they are closed with this one."""
        super().__init__(world, Lane(*([local, cross] if cross else [local])))
        self._local, self._cross = local, cross
        self._groups = groups

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate where the host's engine likes it: see ``Engine``."""
        self.require_open()
        return self._local.allocate(numel, dtype, device)

    def clone(self) -> Self:
        self.require_open()
        cross = self._cross.duplicate() if self._cross else None
        world, local = self._world.clone(), self._local.duplicate()
        return type(self)(world, local, cross, self._groups)

    def _reduce_parts(
        self, vector: Tensor, counts: Sequence[int], op: ReduceOp
    ) -> Tensor:
        copy = vector.clone()
        self._reduce(copy, op)
        return _parts(copy, counts)[self.rank]

    def _gather(self, out: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        parts = _parts(out, counts)
        put_back(own, parts[self.rank])
        for root, part in enumerate(parts):
            self._copy(part, root)

    def _copy_on_host(self, piece: Tensor, root: int) -> Callable[[], object]:
        return lambda: self._local.broadcast(piece, root).wait()


class EvenHostsEngine(HierarchicalEngine):
    """All hosts have equally many ranks: each exchanges its share with its likes.

    ``cross`` are the ranks of this rank's place on every host.
    """

    _cross: Communicator

    def _reduce(self, vector: Tensor, op: ReduceOp) -> None:
        """Reduce shares on the host, each over the hosts, and gather."""
        pipeline, local = _Pipeline(), self._local

        def gather(share: Tensor, piece: Tensor) -> Callable[[], object]:
            return lambda: local.all_gather(share, out=piece).wait()

        for piece in _pieces(vector):
            counts = rows(piece.numel(), local.size)
            first = sum(counts[: local.rank])
            share = piece[first : first + counts[local.rank]]
            local.reduce_scatter(piece, op, out=share).wait()
            pipeline.add(self._cross.all_reduce(share, op), gather(share, piece))
        pipeline.drain()

    def _reduce_parts(
        self, vector: Tensor, counts: Sequence[int], op: ReduceOp
    ) -> Tensor:
        """Reduce on the host what goes to each place, then over hosts."""
        parts = _parts(vector, counts)
        result = vector.new_empty(counts[self.rank])
        pipeline = _Pipeline()

        def put(work: Work[Tensor], target: Tensor) -> Callable[[], object]:
            return lambda: target.copy_(work.wait()[0, : target.numel()])

        for begin, end in _windows(vector, counts):
            stack = vector.new_zeros(self._local.size, self._cross.size, end - begin)
            for rank, place in self._slices(stack):
                part = parts[rank][begin:end]
                place[: part.numel()] = part
            column = self._local.reduce_scatter(stack, op).wait()[0]
            work = self._cross.reduce_scatter(column, op)
            pipeline.add(work, put(work, result[begin:end]))
        pipeline.drain()
        return result

    def _gather(self, out: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        """Gather over the hosts what each place has, then on the host.

        Parts that are shorter than the longest are filled up on their way.
        """
        if max(counts) * len(counts) > _MOST_PADDED * sum(counts):
            super()._gather(out, own, counts)
            return
        parts = _parts(out, counts)
        pipeline = _Pipeline()

        def spread(work: Work[Tensor], begin: int, end: int) -> Callable[[], object]:
            def finish() -> None:
                stack = self._local.all_gather(work.wait().unsqueeze(0)).wait()
                for rank, place in self._slices(stack):
                    part = parts[rank][begin:end]
                    part.copy_(place[: part.numel()])

            return finish

        for begin, end in _windows(out, counts):
            part = out.new_zeros(1, end - begin)
            piece = own[begin:end]
            part[0, : piece.numel()] = piece
            work = self._cross.all_gather(part)
            pipeline.add(work, spread(work, begin, end))
        pipeline.drain()

    def _copy(self, data: Tensor, root: int) -> None:
        """Copy to the ranks of the root's place, then on each host."""
        root_host, root_place = self._groups.of(root)
        pipeline = _Pipeline()
        for piece in _pieces(data):
            work = None
            if self._local.rank == root_place:
                work = self._cross.broadcast(piece, root_host)
            pipeline.add(work, self._copy_on_host(piece, root_place))
        pipeline.drain()

    def _slices(self, stack: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each rank's vector of ``stack``, which is by place and host."""
        for host, ranks in enumerate(self._groups.ranks):
            for place, rank in enumerate(ranks):
                yield rank, stack[place, host]


class LeadersEngine(HierarchicalEngine):
    """Hosts have unequal numbers of ranks: the first of each speaks for it.

    ``cross`` are the first ranks of every host; None on all others.
    """

    def _reduce(self, vector: Tensor, op: ReduceOp) -> None:
        """Reduce on each host, over the leaders, and copy back."""
        pipeline = _Pipeline()
        for piece in _pieces(vector):
            self._local.all_reduce(piece, op).wait()
            work = self._cross.all_reduce(piece, op) if self._cross else None
            pipeline.add(work, self._copy_on_host(piece, 0))
        pipeline.drain()

    def _copy(self, data: Tensor, root: int) -> None:
        """Copy on the root's host, to the leaders, on the other hosts."""
        root_host, root_place = self._groups.of(root)
        is_home = self._groups.of(self.rank)[0] == root_host
        pipeline = _Pipeline()
        for piece in _pieces(data):
            if is_home:
                self._local.broadcast(piece, root_place).wait()
            work = self._cross.broadcast(piece, root_host) if self._cross else None
            pipeline.add(work, None if is_home else self._copy_on_host(piece, 0))
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
        self.drain(_UNDER_WAY)

    def drain(self, num_left: int = 0) -> None:
        while len(self._under_way) > num_left:
            work, finish = self._under_way.popleft()
            if work is not None:
                work.wait()
            if finish is not None:
                finish()


def _pieces(vector: Tensor) -> Iterator[Tensor]:
    length = PIECE_BYTES // vector.element_size()
    for start in range(0, vector.numel(), length):
        yield vector[start : start + length]


def _windows(vector: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut what each rank has so that all ranks' together are a piece."""
    width = max(1, PIECE_BYTES // (len(sizes) * vector.element_size()))
    for begin in range(0, max(sizes), width):
        yield begin, min(begin + width, max(sizes))


def _parts(vector: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return torch.split(vector, list(sizes))
