"""One operation of each collective on memory of its own, ready to be called repeatedly.

What an engine has no call for is made of those that it has. All slicing is done before
the timed loop: an operation is a function without arguments.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor

from ronde.bench.catalog import Collective, DType, Matrix, Shape, premultiplier
from ronde.collectives import Communicator, ReduceOp, rows

CANARY_BYTES = 256
"""Bytes on either side of a result that nobody may touch."""

_MAX_PLACES = 16384

Allocate = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class Views:
    """One operation's arguments."""

    send: Tensor
    # the result; where the operation is in place, the input is in it, or it in the
    # input
    receive: Tensor
    is_in_place: bool  # both are of one buffer


class Buffers:
    """Two buffers that are allocated once and hold the largest row."""

    def __init__(
        self, allocate: Allocate, capacity_bytes: int, unaligned_by: int
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.unaligned_by = unaligned_by
        # 8 bytes is the largest element.
        num_bytes = capacity_bytes + 2 * CANARY_BYTES + 8 * unaligned_by
        self._send = allocate(num_bytes)
        self._receive = allocate(num_bytes)

    def places(
        self, dtype: DType, shape: Shape, rank: int, *, is_in_place: bool
    ) -> Iterator[Views]:
        """Yield the arguments of the first, second, ... operation of a loop.

        Each is behind the one before by what that touched, so that small messages are
        not in the cache already, and round again; the largest row stays where it is.
        """
        step = shape.span * dtype.num_bytes
        count = min(_MAX_PLACES, self.capacity_bytes // step if step else 1)
        for index in range(max(1, count)):
            yield self.views(dtype, shape, rank, index, is_in_place=is_in_place)

    def views(
        self,
        dtype: DType,
        shape: Shape,
        rank: int,
        index: int = 0,
        *,
        is_in_place: bool,
    ) -> Views:
        receive = self._region(self._receive, dtype, shape, index)
        if not is_in_place:
            send = self._region(self._send, dtype, shape, index)
            return Views(send[: shape.send], receive[: shape.receive], is_in_place)
        start, end = rank * shape.send_offset, rank * shape.receive_offset
        return Views(
            receive[start : start + shape.send],
            receive[end : end + shape.receive],
            is_in_place,
        )

    def fill(self, pattern: Tensor, num_bytes: int) -> None:
        """Repeat the bytes of ``pattern`` through the first part of both buffers.

        Timing needs no more. What the timed operations reduce is soon infinite or has
        wrapped; that costs no more time. Zeros, or numbers that become denormal, could.
        """
        end = min(num_bytes + 2 * CANARY_BYTES, self._send.numel())
        for buffer in (self._send, self._receive):
            for start in range(0, end, pattern.numel()):
                part = buffer[start : start + pattern.numel()]
                part.copy_(pattern[: part.numel()])

    def canaries(
        self, dtype: DType, shape: Shape, *, is_in_place: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the bytes on either side of what the first place's operation fills."""
        start = CANARY_BYTES + self.unaligned_by * dtype.num_bytes
        # In place the input may be beside the result.
        filled = shape.span if is_in_place else shape.receive
        end = start + filled * dtype.num_bytes
        return (
            self._receive[start - CANARY_BYTES : start],
            self._receive[end : end + CANARY_BYTES],
        )

    def _region(self, buffer: Tensor, dtype: DType, shape: Shape, index: int) -> Tensor:
        num_bytes = shape.span * dtype.num_bytes
        start = CANARY_BYTES + self.unaligned_by * dtype.num_bytes + index * num_bytes
        return buffer[start : start + num_bytes].view(getattr(torch, dtype.torch_name))


def allocator(
    communicator: Communicator, device: torch.device, *, is_foreign: bool
) -> Allocate:
    """Return what gives memory: the engine's own, or torch's like any other tensor."""

    def allocate(num_bytes: int) -> Tensor:
        if is_foreign:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return communicator.allocate(num_bytes, torch.uint8, device)

    return allocate


@dataclass(frozen=True, slots=True)
class Participant:
    """Which rank of how many, and what is special."""

    rank: int
    size: int  # number of ranks
    root: int = -1  # the root, or -1
    matrix: Matrix = ()  # elements from rank to rank, for ``alltoallv``; else empty


Operation = Callable[[], None]

_OPS = MappingProxyType(
    {
        "sum": ReduceOp.SUM,
        "prod": ReduceOp.PRODUCT,
        "max": ReduceOp.MAX,
        "min": ReduceOp.MIN,
        "avg": ReduceOp.AVERAGE,
        "mulsum": ReduceOp.SUM,
    }
)


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes operations of one collective."""

    test: Collective
    communicator: Communicator  # who moves the bytes
    op: str  # nccl-tests' name of the reduction; ignored where nothing is reduced
    place: Participant  # this rank; the root; the matrix in elements

    def make(self, views: Views) -> Operation:
        """Return an operation on ``views``; it is over when the call returns.

        On CUDA "over" means ordered before what the current stream is given next.
        """
        return _MAKERS[self.test.name](self, views)

    @property
    def reduce_op(self) -> ReduceOp:
        return _OPS.get(self.op, ReduceOp.SUM)

    @property
    def prescale(self) -> float:
        return float(premultiplier(self.place.rank)) if self.op == "mulsum" else 1.0


IN_PLACE_ONLY = frozenset({"all_reduce", "broadcast", "reduce"})
"""Engines do these in place; out of place is a copy and then that."""


def _all_reduce(maker: Maker, views: Views) -> Operation:
    target = views.receive
    call, op, prescale = maker.communicator.all_reduce, maker.reduce_op, maker.prescale

    def reduce() -> None:
        call(target, op, prescale=prescale).wait()

    return _after_copy(views, reduce)


def _after_copy(views: Views, operation: Operation) -> Operation:
    if views.is_in_place:
        return operation
    send, target = views.send, views.receive

    def copy_first() -> None:
        target.copy_(send)
        operation()

    return copy_first


def _reduce_scatter(maker: Maker, views: Views) -> Operation:
    call, op, prescale = (
        maker.communicator.reduce_scatter,
        maker.reduce_op,
        maker.prescale,
    )

    def reduce_scatter() -> None:
        call(views.send, op, prescale=prescale, out=views.receive).wait()

    return reduce_scatter


def _reduce(maker: Maker, views: Views) -> Operation:
    """Every rank reduces its share, and the root gathers the shares."""
    place, target = maker.place, views.receive
    shares = _split(target, rows(target.numel(), place.size))
    own = shares[place.rank]
    call, op, prescale = (
        maker.communicator.reduce_scatter,
        maker.reduce_op,
        maker.prescale,
    )
    collect = _to_root(maker, own, shares)

    def reduce() -> None:
        call(target, op, prescale=prescale, out=own).wait()
        collect()

    return _after_copy(views, reduce)


def _split(tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    ends = [*accumulate(counts)]
    return [tensor[e - c : e] for e, c in zip(ends, counts, strict=True)]


def _to_root(maker: Maker, own: Tensor, slots: Sequence[Tensor]) -> Operation:
    """Return what brings every rank's ``own`` to the root, whose own stays."""
    communicator, place = maker.communicator, maker.place
    if place.rank != place.root:
        return lambda: communicator.send(own, place.root).wait()
    others = [(slots[r], r) for r in range(place.size) if r != place.rank]

    def receive() -> None:
        for work in [communicator.recv(slot, source) for slot, source in others]:
            work.wait()

    return receive


def _gather(maker: Maker, views: Views) -> Operation:
    place = maker.place
    slots = views.receive.chunk(place.size) if views.receive.numel() else ()
    if not slots:
        return lambda: None
    collect = _to_root(maker, views.send, slots)
    if place.rank != place.root or views.is_in_place:
        return collect
    own = slots[place.rank]

    def gather() -> None:
        own.copy_(views.send)
        collect()

    return gather


def _scatter(maker: Maker, views: Views) -> Operation:
    communicator, place = maker.communicator, maker.place
    if not views.send.numel():
        return lambda: None
    if place.rank != place.root:
        return lambda: _finish(communicator.recv(views.receive, place.root).wait())
    slots = views.send.chunk(place.size)
    own = slots[place.rank]
    others = [(slots[r], r) for r in range(place.size) if r != place.rank]

    def scatter() -> None:
        works = [communicator.send(slot, to) for slot, to in others]
        if not views.is_in_place:
            views.receive.copy_(own)
        for work in works:
            work.wait()

    return scatter


def _finish(_result: object) -> None:
    """Have no result."""


def _all_gather(maker: Maker, views: Views) -> Operation:
    call = maker.communicator.all_gather
    return lambda: _finish(call(views.send, out=views.receive).wait())


def _broadcast(maker: Maker, views: Views) -> Operation:
    call, root, target = maker.communicator.broadcast, maker.place.root, views.receive

    def broadcast() -> None:
        call(target, root).wait()

    return _after_copy(views, broadcast) if maker.place.rank == root else broadcast


def _all_to_all(maker: Maker, views: Views) -> Operation:
    call, place = maker.communicator.all_to_all, maker.place
    send, receive = views.send, views.receive
    splits = None
    if place.matrix:
        splits = list(place.matrix[place.rank])
        send = send[: sum(splits)]
        receive = receive[: sum(row[place.rank] for row in place.matrix)]
    if not views.is_in_place:
        return lambda: _finish(call(send, splits, out=receive).wait())

    def exchange() -> None:
        arrived, _ = call(send, splits).wait()
        receive.copy_(arrived)

    return exchange


def _sendrecv(maker: Maker, views: Views) -> Operation:
    communicator, place = maker.communicator, maker.place
    send, receive = views.send, views.receive
    if place.size == 1:
        return _after_copy(views, lambda: None)
    following, preceding = (place.rank + 1) % place.size, (place.rank - 1) % place.size

    def exchange() -> None:
        arriving = communicator.recv(receive, preceding)
        communicator.send(send, following).wait()
        arriving.wait()

    return exchange


def _hypercube(maker: Maker, views: Views) -> Operation:
    """Gather by doubling: in round k ranks that differ in bit k exchange all they have.

    Source: nccl-tests' test of the same name.
    """
    communicator, place = maker.communicator, maker.place
    share = views.send.numel()
    if not share:
        return lambda: None
    own = views.receive[place.rank * share : (place.rank + 1) * share]
    rounds: list[tuple[Tensor, Tensor, int]] = []
    width = 1
    while width < place.size:
        first = place.rank & ~(width - 1)
        have = views.receive[first * share : (first + width) * share]
        other = first ^ width
        missing = views.receive[other * share : (other + width) * share]
        rounds.append((have, missing, place.rank ^ width))
        width *= 2

    def exchange() -> None:
        if not views.is_in_place:
            own.copy_(views.send)
        for have, missing, peer in rounds:
            arriving = communicator.recv(missing, peer)
            communicator.send(have, peer).wait()
            arriving.wait()

    return exchange


_MAKERS: Mapping[str, Callable[[Maker, Views], Operation]] = MappingProxyType(
    {
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "broadcast": _broadcast,
        "reduce": _reduce,
        "alltoall": _all_to_all,
        "alltoallv": _all_to_all,
        "gather": _gather,
        "scatter": _scatter,
        "sendrecv": _sendrecv,
        "hypercube": _hypercube,
    }
)
