"""Collectives made of several of torch's."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ronde.collectives.arguments import apart_from
from ronde.collectives.arithmetic import as_bytes, dense, reduce_stack, scale_
from ronde.collectives.communicator import ReduceOp, rows
from ronde.collectives.engines.torch_distributed.groups import (
    Backend,
    all_gather_even,
    broadcast,
)
from ronde.collectives.engines.torch_distributed.work import Pending


def reduce_by_shares(
    backend: Backend,
    size: int,
    *,
    tensor: Tensor,
    op: ReduceOp,
    prescale: float,
    postscale: float,
) -> None:
    """Reduce in place: each rank reduces one share of all, then all gather the shares.

    As many bytes travel as in a ring. Sums are rounded once, not once a rank.
    """
    numel = tensor.numel()
    share = -(-numel // size)
    shares = torch.zeros(size * share, dtype=tensor.dtype, device=tensor.device)
    shares[:numel] = dense(tensor).reshape(-1)
    scale_(shares, prescale)
    received = torch.empty_like(shares)
    backend.alltoall_base(as_bytes(received), as_bytes(shares), [], []).wait()
    reduced = reduce_stack(received.view(size, share), op, postscale)
    all_gather_even(backend, as_bytes(shares), as_bytes(reduced)).wait()
    tensor.detach().copy_(shares[:numel].view(tensor.shape))


def exchange_rows(
    backend: Backend,
    tensor: Tensor,
    sent: Sequence[int],
    counts: Sequence[int],
    out: Tensor | None = None,
    *,
    is_empty: bool,
) -> tuple[list[Pending], Tensor]:
    """Send consecutive rows to the ranks.

    Args:
        backend: What moves them.
        tensor: The rows; those past the sum of ``sent`` stay.
        sent: Rows for each rank.
        counts: Rows from each rank.
        out: Where they go to, if not into a new tensor.
        is_empty: No rank sends any row to any.

    Returns:
        Pending works, and where the received rows will be.
    """
    shape = tensor.shape[1:]
    received = tensor.new_empty((sum(counts), *shape)) if out is None else out
    if is_empty or not shape.numel():
        return [], received
    row_bytes = shape.numel() * tensor.element_size()
    pending: Pending = backend.alltoall_base(
        as_bytes(received.detach()),
        as_bytes(dense(apart_from(tensor[: sum(sent)], out))),
        [count * row_bytes for count in counts],
        [count * row_bytes for count in sent],
    )
    return [pending], received


def scatter_rows(
    backend: Backend, rank: int, size: int, tensor: Tensor
) -> tuple[list[Pending], Tensor]:
    """Send every rank the rows that it is to reduce.

    Returns:
        Pending works, and where the rows for this rank will be: ``(size, rows, ...)``.
    """
    sent = rows(tensor.shape[0], size)
    pending, received = exchange_rows(
        backend, tensor, sent, [sent[rank]] * size, is_empty=not tensor.shape[0]
    )
    return pending, received.view(size, sent[rank], *tensor.shape[1:])


def gather_rows(
    backend: Backend,
    rank: int,
    tensor: Tensor,
    counts: list[int],
    out: Tensor | None = None,
) -> tuple[list[Pending], Tensor]:
    """Gather ``counts[r]`` rows of every rank r.

    Returns:
        Pending works, and where all rows will be.
    """
    result = tensor.new_empty((sum(counts), *tensor.shape[1:])) if out is None else out
    if not result.numel():
        return [], result
    gathered = result.detach()
    own = dense(apart_from(tensor, out, sum(counts[:rank])))
    if len(set(counts)) == 1:
        return [all_gather_even(backend, as_bytes(gathered), as_bytes(own))], result
    # torch gathers no uneven shares: every rank broadcasts its own into place.
    parts: tuple[Tensor, ...] = torch.split(gathered, counts)
    parts[rank].copy_(own)
    pending = [
        broadcast(backend, as_bytes(part), root)
        for root, part in enumerate(parts)
        if part.numel()
    ]
    return pending, result
