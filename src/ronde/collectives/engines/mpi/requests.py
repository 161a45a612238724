"""Calls of MPI's that move bytes; what is longer than one may take goes in several."""

from collections.abc import Sequence

from torch import Tensor

from ronde.collectives.engines.mpi.buffers import Parts, memory, pieces
from ronde.collectives.engines.mpi.library import MPI


def broadcast(
    comm: MPI.Intracomm, data: Tensor, root: int, max_count: int
) -> list[MPI.Request]:
    """Copy a vector of bytes from ``root``."""
    return [
        comm.Ibcast([memory(piece), MPI.BYTE], root)
        for piece in pieces(data, max_count)
    ]


def gather(
    comm: MPI.Intracomm, data: Tensor, parts: Parts, max_count: int
) -> list[MPI.Request]:
    """Gather the ranks' bytes; every rank's own are in their place already."""
    if data.numel() <= max_count:
        place = [memory(data), (parts.counts, parts.starts), MPI.BYTE]
        return [comm.Iallgatherv(MPI.IN_PLACE, place)]
    return [
        request
        for root in range(comm.size)
        for request in broadcast(comm, parts.of_rank(data, root), root, max_count)
    ]


def exchange(
    comm: MPI.Intracomm, sent: tuple[Tensor, Parts], received: tuple[Tensor, Parts]
) -> list[MPI.Request]:
    """Send every rank its part of the bytes, in one call."""
    places = [
        [memory(data), (parts.counts, parts.starts), MPI.BYTE]
        for data, parts in (sent, received)
    ]
    return [comm.Ialltoallv(*places)]


def exchange_by_pairs(
    comm: MPI.Intracomm,
    sent: tuple[Tensor, Parts],
    received: tuple[Tensor, Parts],
    max_count: int,
) -> list[MPI.Request]:
    """Send every rank its part of the bytes, pair by pair."""
    tag = max_tag(comm)  # no caller's
    requests: list[MPI.Request] = []
    for step in range(comm.size):
        source, to = (comm.rank - step) % comm.size, (comm.rank + step) % comm.size
        arriving = received[1].of_rank(received[0], source)
        leaving = sent[1].of_rank(sent[0], to)
        requests += receive(comm, arriving, source, tag, max_count)
        requests += send(comm, leaving, to, tag, max_count)
    return requests


def send(
    comm: MPI.Intracomm, data: Tensor, to: int, tag: int, max_count: int
) -> list[MPI.Request]:
    """Send a vector of bytes to one rank."""
    return [
        comm.Isend([memory(piece), MPI.BYTE], to, tag)
        for piece in pieces(data, max_count)
    ]


def receive(
    comm: MPI.Intracomm, data: Tensor, source: int, tag: int, max_count: int
) -> list[MPI.Request]:
    """Receive a vector of bytes from one rank."""
    return [
        comm.Irecv([memory(piece), MPI.BYTE], source, tag)
        for piece in pieces(data, max_count)
    ]


def max_tag(comm: MPI.Intracomm) -> int:
    """Return the highest tag that MPI takes here."""
    value = comm.Get_attr(MPI.TAG_UB)
    return 32767 if value is None else int(value)


def is_within(max_count: int, plan: Sequence[Sequence[int]], row_bytes: int) -> bool:
    """Say whether no rank sends or receives more than one call can take.

    Args:
        max_count: Bytes in one call.
        plan: Rows that each rank sends to each.
        row_bytes: Bytes of a row.
    """
    totals = [sum(row) for row in (*plan, *zip(*plan, strict=True))]
    return max(totals) * row_bytes <= max_count
