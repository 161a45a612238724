"""Collectives on two levels: within each host, and between hosts.

Tensors are processed in pieces that overlap: while one piece crosses the network, the
host works on the others. Every rank makes the same calls on each communicator in the
same order.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ronde.collectives.arithmetic import put_back
from ronde.collectives.communicator import Communicator
from ronde.collectives.engine import Engine, ReduceOp, Work
from ronde.collectives.lane import LaneEngine
from ronde.collectives.shapes import rows

PIECE_BYTES = 2 << 20  # large enough for the full rate of the network
_NUM_AHEAD = 2
_MOST_PADDED = 2  # padding to equal parts may at most double the bytes
_Steps = Generator[Work[Tensor] | None, Any, None]  # yields transfers between hosts


class HostGroups(NamedTuple):
    """The ranks of each host, ascending; hosts in the order of their lowest ranks."""

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def from_hosts(cls, hosts: Sequence[str]) -> "HostGroups":
        found: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            found.setdefault(host, []).append(rank)
        return cls(tuple(map(tuple, found.values())))

    @property
    def is_even(self) -> bool:
        return len({len(ranks) for ranks in self.ranks}) == 1

    def of(self, rank: int) -> tuple[int, int]:
        """Return the index of a rank's host, and its local rank."""
        for host, ranks in enumerate(self.ranks):
            if rank in ranks:
                return host, ranks.index(rank)
        raise AssertionError(rank)


class HierarchicalEngine(LaneEngine):
    """Base class of engines that work within each host and between hosts."""

    # ``world`` has all ranks and serves calls that gain nothing from two levels;
    # ``local`` has the ranks of this host, ``cross`` one rank of each host.

    name = "hierarchical"

    def __init__(
        self,
        world: Engine,
        local: Communicator,
        cross: Communicator | None,
        groups: HostGroups,
    ) -> None:
        super().__init__(world, *([local, cross] if cross else [local]))
        self._local, self._cross = local, cross
        self.algorithm = cross.algorithm if cross else ""
        self._groups = groups

    def allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_populated: bool = True,
    ) -> Tensor:
        self.require_open()
        return self._local.allocate(numel, dtype, device, is_populated=is_populated)

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


class EvenHostsEngine(HierarchicalEngine):
    """Engine for equally many ranks per host; each exchanges a share between hosts."""

    # ``cross`` has the ranks with this local rank on every host.

    _cross: Communicator

    def _reduce(self, vector: Tensor, op: ReduceOp) -> None:
        local = self._local

        def reduce(piece: Tensor) -> _Steps:
            counts = rows(piece.numel(), local.size)
            first = sum(counts[: local.rank])
            share = piece[first : first + counts[local.rank]]
            local.reduce_scatter(piece, op, out=share).wait()
            yield self._cross.all_reduce(share, op)
            local.all_gather(share, out=piece).wait()

        _overlap(map(reduce, _pieces(vector)))

    def _reduce_parts(
        self, vector: Tensor, counts: Sequence[int], op: ReduceOp
    ) -> Tensor:
        """Reduce the parts of each local rank within the host, then between hosts."""
        parts = _parts(vector, counts)
        result = vector.new_empty(counts[self.rank])

        def reduce(window: slice) -> _Steps:
            width = window.stop - window.start
            stack = vector.new_zeros(self._local.size, self._cross.size, width)
            for part, padded in zip(parts, self._slices(stack), strict=True):
                piece = part[window]
                padded[: piece.numel()] = piece
            column = self._local.reduce_scatter(stack, op).wait()[0]
            reduced = yield self._cross.reduce_scatter(column, op)
            target = result[window]
            target.copy_(reduced[0, : target.numel()])

        _overlap(map(reduce, _windows(vector, counts)))
        return result

    def _gather(self, out: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        """Gather each local rank's padded parts between hosts, then within the host."""
        if max(counts) * len(counts) > _MOST_PADDED * sum(counts):
            super()._gather(out, own, counts)
            return
        parts = _parts(out, counts)

        def gather(window: slice) -> _Steps:
            padded = out.new_zeros(1, window.stop - window.start)
            piece = own[window]
            padded[0, : piece.numel()] = piece
            column = yield self._cross.all_gather(padded)
            stack = self._local.all_gather(column.unsqueeze(0)).wait()
            for part, source in zip(parts, self._slices(stack), strict=True):
                target = part[window]
                target.copy_(source[: target.numel()])

        _overlap(map(gather, _windows(out, counts)))

    def _copy(self, data: Tensor, root: int) -> None:
        """Broadcast to the ranks with the root's local rank, then within each host."""
        root_host, root_local = self._groups.of(root)

        def copy(piece: Tensor) -> _Steps:
            is_like_root = self._local.rank == root_local
            yield self._cross.broadcast(piece, root_host) if is_like_root else None
            self._local.broadcast(piece, root_local).wait()

        _overlap(map(copy, _pieces(data)))

    def _slices(self, stack: Tensor) -> list[Tensor]:
        """Return ``stack[local_rank, host]`` for each rank, in rank order."""
        positions = map(self._groups.of, range(self.size))
        return [stack[local_rank, host] for host, local_rank in positions]


class LeadersEngine(HierarchicalEngine):
    """Engine for unequal numbers of ranks per host; the first ranks link the hosts."""

    # ``cross`` has the leaders; None on all other ranks.

    def _reduce(self, vector: Tensor, op: ReduceOp) -> None:
        def reduce(piece: Tensor) -> _Steps:
            self._local.all_reduce(piece, op).wait()
            yield self._cross.all_reduce(piece, op) if self._cross else None
            self._local.broadcast(piece, 0).wait()

        _overlap(map(reduce, _pieces(vector)))

    def _copy(self, data: Tensor, root: int) -> None:
        """Broadcast on the root's host, to the leaders, then on the other hosts."""
        root_host, root_local = self._groups.of(root)
        is_home = self._groups.of(self.rank)[0] == root_host

        def copy(piece: Tensor) -> _Steps:
            if is_home:
                self._local.broadcast(piece, root_local).wait()
            yield self._cross.broadcast(piece, root_host) if self._cross else None
            if not is_home:
                self._local.broadcast(piece, 0).wait()

        _overlap(map(copy, _pieces(data)))


def _overlap(pieces: Iterable[_Steps]) -> None:
    """Run all pieces; up to ``_NUM_AHEAD`` later pieces start before one ends."""
    started: deque[tuple[Work[Tensor] | None, _Steps]] = deque()
    for steps in pieces:
        started.append((next(steps), steps))
        if len(started) > _NUM_AHEAD:
            _end(*started.popleft())
    while started:
        _end(*started.popleft())


def _end(work: Work[Tensor] | None, steps: _Steps) -> None:
    with suppress(StopIteration):
        steps.send(None if work is None else work.wait())


def _pieces(vector: Tensor) -> Iterator[Tensor]:
    length = PIECE_BYTES // vector.element_size()
    for start in range(0, vector.numel(), length):
        yield vector[start : start + length]


def _windows(vector: Tensor, sizes: Sequence[int]) -> Iterator[slice]:
    """Yield ranges within a part; the same range of every part makes one piece."""
    width = max(1, PIECE_BYTES // (len(sizes) * vector.element_size()))
    for begin in range(0, max(sizes), width):
        yield slice(begin, min(begin + width, max(sizes)))


def _parts(vector: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return torch.split(vector, list(sizes))
