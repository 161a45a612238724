"""One operation of each collective, ready to be called over and over.

What an engine has no call for is made of those that it has. All slicing is done before
the timed loop: an operation is a function without arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from torch import Tensor

from ronde.bench.buffers import Views
from ronde.bench.catalog import Collective
from ronde.bench.movement import Place
from ronde.bench.patterns import premultiplier
from ronde.collectives import Communicator, ReduceOp, rows

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
    """Makes operations of one collective.

    Attributes:
        test: The collective.
        communicator: Who moves the bytes.
        op: nccl-tests' name of the reduction; ignored where nothing is reduced.
        place: This rank; the root; the matrix in elements.
    """

    test: Collective
    communicator: Communicator
    op: str
    place: Place

    def make(self, views: Views) -> Operation:
        """Return an operation on ``views``; it is over when the call returns.

        On CUDA "over" means ordered before what the current stream is given next.
        """
        return _MAKERS[self.test.name](self, views)

    @property
    def reduce_op(self) -> ReduceOp:
        """The reduction as engines know it."""
        return _OPS.get(self.op, ReduceOp.SUM)

    @property
    def prescale(self) -> float:
        """What this rank's input is multiplied by first."""
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
