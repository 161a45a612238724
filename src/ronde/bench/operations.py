"""The timed calls: one operation of each collective on preallocated buffers.

Collectives that engines lack are built from calls that the engines have. All slicing
is done before the timed loop, so an operation is a function without arguments.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ronde.bench.catalog import Collective, DType, Matrix, Shape, premultiplier
from ronde.collectives import Communicator, ReduceOp, rows

CANARY_BYTES = 256  # on either side of a result, to detect stray writes
# Engines support only in-place calls of these; out of place, a copy precedes.
IN_PLACE_ONLY = frozenset({"all_reduce", "broadcast", "reduce"})

_MAX_VIEWS = 16384

Operation = Callable[[], object]


@dataclass(frozen=True, slots=True)
class CallSpec:
    """The arguments of one rank's call of a collective."""

    test: Collective
    dtype: DType
    op: str  # nccl-tests' name of the reduction; ignored if nothing is reduced
    shape: Shape
    rank: int
    size: int
    root: int = -1
    matrix: Matrix = ()  # elements from rank to rank; only for ``alltoallv``

    @property
    def reduce_op(self) -> ReduceOp:
        return _OPS.get(self.op, ReduceOp.SUM)

    @property
    def prescale(self) -> float:
        return float(premultiplier(self.rank)) if self.op == "mulsum" else 1.0


class Views(NamedTuple):
    """The tensors of one operation. In place, both are views of one buffer."""

    send: Tensor
    receive: Tensor
    is_in_place: bool


class Buffers:
    """Send and receive buffers, allocated once for the largest row."""

    def __init__(
        self, allocate: Callable[[int], Tensor], capacity_bytes: int, unaligned_by: int
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._unaligned_by = unaligned_by
        # The largest elements have 8 bytes.
        num_bytes = capacity_bytes + 2 * CANARY_BYTES + 8 * unaligned_by
        self._send = allocate(num_bytes)
        self._receive = allocate(num_bytes)

    def moving_views(self, spec: CallSpec, *, is_in_place: bool) -> Iterator[Views]:
        """Yield the tensors of a loop's operations in order.

        Each operation uses the memory after the previous operation's, so that small
        messages are not in the cache. The largest row always uses the same memory.
        """
        step = spec.shape.span * spec.dtype.num_bytes
        count = min(_MAX_VIEWS, self.capacity_bytes // step if step else 1)
        for index in range(max(1, count)):
            yield self.views(spec, index, is_in_place=is_in_place)

    def views(self, spec: CallSpec, index: int = 0, *, is_in_place: bool) -> Views:
        shape, num_bytes = spec.shape, spec.shape.span * spec.dtype.num_bytes
        first = self._start(spec) + index * num_bytes
        send, receive = (
            each[first : first + num_bytes].view(getattr(torch, spec.dtype.torch_name))
            for each in (self._send, self._receive)
        )
        if not is_in_place:
            return Views(send[: shape.send], receive[: shape.receive], is_in_place)
        start, end = spec.rank * shape.send_offset, spec.rank * shape.receive_offset
        own = receive[start : start + shape.send]
        return Views(own, receive[end : end + shape.receive], is_in_place)

    def fill(self, pattern: Tensor, num_bytes: int) -> None:
        """Fill the beginning of both buffers with repetitions of ``pattern``."""
        # Zeros and denormal numbers could change the speed of a reduction; numbers that
        # overflow do not.
        end = min(num_bytes + 2 * CANARY_BYTES, self._send.numel())
        for buffer in (self._send, self._receive):
            for start in range(0, end, pattern.numel()):
                part = buffer[start : start + pattern.numel()]
                part.copy_(pattern[: part.numel()])

    def canaries(self, spec: CallSpec, *, is_in_place: bool) -> tuple[Tensor, Tensor]:
        """Return the bytes on either side of the first operation's result."""
        start = self._start(spec)
        # In place the input may be next to the result.
        filled = spec.shape.span if is_in_place else spec.shape.receive
        end = start + filled * spec.dtype.num_bytes
        before = self._receive[start - CANARY_BYTES : start]
        return before, self._receive[end : end + CANARY_BYTES]

    def _start(self, spec: CallSpec) -> int:
        return CANARY_BYTES + self._unaligned_by * spec.dtype.num_bytes


def make_operation(
    spec: CallSpec, communicator: Communicator, views: Views
) -> Operation:
    """Return a function that runs the collective on ``views`` and waits for it.

    On CUDA, only later work on the current stream waits, not the host.
    """
    return _MAKERS[spec.test.name](spec, communicator, views)


def _all_reduce(spec: CallSpec, communicator: Communicator, views: Views) -> Operation:
    call, target = communicator.all_reduce, views.receive
    op, prescale = spec.reduce_op, spec.prescale
    return _after_copy(views, lambda: call(target, op, prescale=prescale).wait())


def _after_copy(views: Views, operation: Operation) -> Operation:
    send, target = views.send, views.receive

    def copy_first() -> None:
        target.copy_(send)
        operation()

    return operation if views.is_in_place else copy_first


def _reduce_scatter(
    spec: CallSpec, communicator: Communicator, views: Views
) -> Operation:
    call, send, target = communicator.reduce_scatter, views.send, views.receive
    op, prescale = spec.reduce_op, spec.prescale
    return lambda: call(send, op, prescale=prescale, out=target).wait()


def _reduce(spec: CallSpec, communicator: Communicator, views: Views) -> Operation:
    """Reduce one share on every rank, then gather the shares at the root."""
    counts = rows(views.receive.numel(), spec.size)
    shares = views.receive.split_with_sizes(counts)
    own = shares[spec.rank]
    reduced = Views(views.receive, own, is_in_place=True)
    scatter = _reduce_scatter(spec, communicator, reduced)
    collect = _to_root(spec, communicator, own, shares)
    return _after_copy(views, lambda: (scatter(), collect()))


def _to_root(
    spec: CallSpec, communicator: Communicator, own: Tensor, slots: Sequence[Tensor]
) -> Operation:
    """Send every other rank's ``own`` to its slot at the root."""
    if spec.rank != spec.root:
        return lambda: communicator.send(own, spec.root).wait()
    others = [(slots[r], r) for r in range(spec.size) if r != spec.rank]

    def receive() -> None:
        for work in [communicator.recv(slot, source) for slot, source in others]:
            work.wait()

    return receive


def _gather(spec: CallSpec, communicator: Communicator, views: Views) -> Operation:
    if not views.receive.numel():
        return lambda: None
    slots = views.receive.chunk(spec.size)
    collect = _to_root(spec, communicator, views.send, slots)
    if spec.rank != spec.root:
        return collect
    own = Views(views.send, slots[spec.rank], views.is_in_place)
    return _after_copy(own, collect)


def _scatter(spec: CallSpec, communicator: Communicator, views: Views) -> Operation:
    if not views.send.numel():
        return lambda: None
    if spec.rank != spec.root:
        return lambda: communicator.recv(views.receive, spec.root).wait()
    slots = views.send.chunk(spec.size)
    own = slots[spec.rank]
    others = [(slots[r], r) for r in range(spec.size) if r != spec.rank]

    def scatter() -> None:
        works = [communicator.send(slot, to) for slot, to in others]
        if not views.is_in_place:
            views.receive.copy_(own)
        for work in works:
            work.wait()

    return scatter


def _all_gather(_spec: CallSpec, communicator: Communicator, views: Views) -> Operation:
    call, send, target = communicator.all_gather, views.send, views.receive
    return lambda: call(send, out=target).wait()


def _broadcast(spec: CallSpec, communicator: Communicator, views: Views) -> Operation:
    call, root, target = communicator.broadcast, spec.root, views.receive

    def broadcast() -> None:
        call(target, root).wait()

    return _after_copy(views, broadcast) if spec.rank == root else broadcast


def _all_to_all(spec: CallSpec, communicator: Communicator, views: Views) -> Operation:
    call, send, receive = communicator.all_to_all, views.send, views.receive
    splits = None
    if spec.matrix:
        splits = list(spec.matrix[spec.rank])
        send = send[: sum(splits)]
        receive = receive[: sum(row[spec.rank] for row in spec.matrix)]
    if not views.is_in_place:
        return lambda: call(send, splits, out=receive).wait()
    return lambda: receive.copy_(call(send, splits).wait()[0])


def _sendrecv(spec: CallSpec, communicator: Communicator, views: Views) -> Operation:
    send, receive = views.send, views.receive
    if spec.size == 1:
        return _after_copy(views, lambda: None)
    following, preceding = (spec.rank + 1) % spec.size, (spec.rank - 1) % spec.size

    def exchange() -> None:
        arriving = communicator.recv(receive, preceding)
        communicator.send(send, following).wait()
        arriving.wait()

    return exchange


def _hypercube(spec: CallSpec, communicator: Communicator, views: Views) -> Operation:
    """Gather by doubling: in round k, ranks that differ in bit k exchange all data."""
    share = views.send.numel()
    if not share:
        return lambda: None
    own = views.receive[spec.rank * share : (spec.rank + 1) * share]
    rounds: list[tuple[Tensor, Tensor, int]] = []
    width = 1
    while width < spec.size:
        first = spec.rank & ~(width - 1)
        have = views.receive[first * share : (first + width) * share]
        other = first ^ width
        missing = views.receive[other * share : (other + width) * share]
        rounds.append((have, missing, spec.rank ^ width))
        width *= 2

    def exchange() -> None:
        for have, missing, peer in rounds:
            arriving = communicator.recv(missing, peer)
            communicator.send(have, peer).wait()
            arriving.wait()

    return _after_copy(Views(views.send, own, views.is_in_place), exchange)


_OPS = {
    "sum": ReduceOp.SUM,
    "prod": ReduceOp.PRODUCT,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "avg": ReduceOp.AVERAGE,
    "mulsum": ReduceOp.SUM,
}
_MAKERS: Mapping[str, Callable[[CallSpec, Communicator, Views], Operation]] = {
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
