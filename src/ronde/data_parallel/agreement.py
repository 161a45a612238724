"""What the ranks agree on once, so that no training step has to negotiate."""

import hashlib
from collections.abc import Sequence
from typing import cast

import torch

from ronde.collectives import Communicator, ReduceOp, all_gather_object
from ronde.data_parallel.gradient import Gradient
from ronde.errors import CollectiveError


def check_same_gradients(
    communicator: Communicator, gradients: Sequence[Gradient]
) -> None:
    """Refuse ranks whose parameters differ; collective.

    Raises:
        CollectiveError: On every rank, naming the first parameter that differs.
    """
    mine = [_describe(gradient) for gradient in gradients]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()[:8]
    key = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    keys = communicator.all_gather(key).wait()
    if bool((keys == keys[0]).all()):
        return
    everyone = all_gather_object(communicator, mine)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise CollectiveError(_difference(everyone[0], theirs, rank))


def agree_on_order(communicator: Communicator, arrivals: Sequence[int]) -> list[int]:
    """Return rank 0's ``arrivals`` on every rank; collective.

    Args:
        communicator: The ranks that agree.
        arrivals: Indices of gradients in the order in which backward made them here;
            the number of them may differ between ranks.
    """
    length = torch.tensor([len(arrivals)])
    communicator.broadcast(length, 0).wait()
    order = torch.zeros(int(length), dtype=torch.int64)
    if communicator.rank == 0:
        order.copy_(torch.tensor(list(arrivals), dtype=torch.int64))
    communicator.broadcast(order, 0).wait()
    return cast("list[int]", order.tolist())


def agree_on_sparse(communicator: Communicator, gradients: Sequence[Gradient]) -> None:
    """Note of which gradients some rank has a sparse one; collective.

    A rank that did not use an embedding learns it so from those that did.
    """
    dims = torch.tensor([_sparse_dims(gradient) for gradient in gradients])
    communicator.all_reduce(dims, ReduceOp.MAX).wait()
    for gradient, sparse_dims in zip(
        gradients, cast("list[int]", dims.tolist()), strict=True
    ):
        gradient.sparse_dims = sparse_dims


def _sparse_dims(gradient: Gradient) -> int:
    grad = gradient.parameter.grad
    return grad.sparse_dim() if grad is not None and grad.is_sparse else 0


def _describe(gradient: Gradient) -> str:
    parameter = gradient.parameter
    trained = "trained" if parameter.requires_grad else "frozen"
    return (
        f"{gradient.name} {tuple(parameter.shape)} strides {parameter.stride()} "
        f"{parameter.dtype} on {parameter.device.type}, {trained}"
    )


def _difference(first: list[str], other: list[str], rank: int) -> str:
    if len(first) != len(other):
        return (
            f"num_parameters must be the same on all ranks, got {len(first)} on rank 0 "
            f"and {len(other)} on rank {rank}. Build the same model everywhere."
        )
    mine, theirs = next((a, b) for a, b in zip(first, other, strict=True) if a != b)
    return (
        f"parameters must be the same on all ranks, got {mine} on rank 0 and {theirs} "
        f"on rank {rank}. Build the same model everywhere."
    )
