"""Reductions: which of MPI's does what was asked, and what is left to do after it."""

from itertools import repeat

import torch
from torch import Tensor

from ronde.collectives.arguments import require_out
from ronde.collectives.arithmetic import (
    HALVES,
    decode,
    encode,
    put_back,
    require_reducible,
    scale_,
    scaled,
)
from ronde.collectives.communicator import Done, ReduceOp, Work, rows
from ronde.collectives.engines.mpi.buffers import (
    Parts,
    datatype,
    flat,
    memory,
    pieces,
)
from ronde.collectives.engines.mpi.library import MPI
from ronde.collectives.engines.mpi.wire import Wire, require_cpu
from ronde.errors import UsageError

_MPI_OPS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.AVERAGE: MPI.SUM,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.PRODUCT: MPI.PROD,
}


def all_reduce(
    wire: Wire, tensor: Tensor, op: ReduceOp, prescale: float, postscale: float
) -> Work[Tensor]:
    """Reduce in place."""
    wire.require_open()
    require_cpu(tensor)
    require_reducible(tensor.dtype, op, prescale, postscale)
    if not tensor.numel():
        return Done(tensor)
    # Of 16-bit floats a copy, else the tensor itself, which may be scaled in place.
    wide = _widened(tensor)
    scale_(wide, prescale)
    encoded = encode(wide, op)

    def start(comm: MPI.Intracomm) -> list[MPI.Request]:
        return [
            comm.Iallreduce(
                MPI.IN_PLACE, [memory(piece), datatype(piece)], _MPI_OPS[op]
            )
            for piece in pieces(flat(encoded), wire.max_count)
        ]

    def finish() -> Tensor:
        result = decode(encoded, wide.dtype, op, wire.size, postscale)
        return put_back(result, tensor)

    return wire.begin("all_reduce", start, finish, (encoded,))


def reduce_scatter(
    wire: Wire,
    tensor: Tensor,
    op: ReduceOp,
    scales: tuple[float, float],
    out: Tensor | None,
) -> Work[Tensor]:
    """Reduce and keep this rank's rows; ``scales`` are those before and after."""
    wire.require_open()
    require_cpu(tensor)
    prescale, postscale = scales
    require_reducible(tensor.dtype, op, prescale, postscale)
    if tensor.ndim == 0:
        raise UsageError(
            "tensor must have at least one dimension, got a scalar. "
            "Use tensor.reshape(1)."
        )
    counts = rows(tensor.shape[0], wire.size)
    own_rows = counts[wire.rank]
    require_out(out, tensor, own_rows)
    place = tensor.new_empty((own_rows, *tensor.shape[1:])) if out is None else out
    if not tensor.numel():
        return Done(place)
    wide = _widened(tensor)
    encoded = encode(scaled(wide, prescale), op)
    rest = encoded.shape[1:]
    reduced = encoded.new_empty((own_rows, *rest))
    parts = Parts.of([count * rest.numel() for count in counts])

    def start(comm: MPI.Intracomm) -> list[MPI.Request]:
        return _scatter(comm, flat(encoded), flat(reduced), parts, (op, wire.max_count))

    def finish() -> Tensor:
        place.detach().copy_(decode(reduced, wide.dtype, op, wire.size, postscale))
        return place

    return wire.begin("reduce_scatter", start, finish, (encoded, reduced))


def _scatter(
    comm: MPI.Intracomm,
    given: Tensor,
    reduced: Tensor,
    parts: Parts,
    how: tuple[ReduceOp, int],
) -> list[MPI.Request]:
    """Reduce the parts of a vector, each to its rank."""
    op, max_count = how
    kind = datatype(given)
    if given.numel() <= max_count:
        places = [memory(given), kind], [memory(reduced), kind]
        return [comm.Ireduce_scatter(*places, parts.counts, _MPI_OPS[op])]
    requests: list[MPI.Request] = []
    for root in range(comm.size):
        part = parts.of_rank(given, root)
        targets = pieces(reduced, max_count) if root == comm.rank else repeat(None)
        for piece, target in zip(pieces(part, max_count), targets, strict=False):
            place = None if target is None else [memory(target), kind]
            source = [memory(piece), kind]
            requests.append(comm.Ireduce(source, place, _MPI_OPS[op], root))
    return requests


def _widened(tensor: Tensor) -> Tensor:
    """Return 16-bit floats in 32 bits, so that they are rounded once; else a view."""
    values = tensor.detach()
    return values.to(torch.float32) if tensor.dtype in HALVES else values
