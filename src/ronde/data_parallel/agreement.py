"""What the ranks agree on once, so that no training step has to negotiate."""

import hashlib
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ronde.collectives import Communicator, ReduceOp, all_gather_json
from ronde.data_parallel.gradient import Gradient
from ronde.data_parallel.resumable import Steps
from ronde.errors import CollectiveError

_NO_SAY = -2


def check_same_gradients(
    communicator: Communicator, gradients: Sequence[Gradient]
) -> Steps[None]:
    """Refuse ranks whose parameters differ; collective.

    Raises:
        CollectiveError: On every rank, naming the first parameter that differs.
    """
    mine = [describe(g.name, g.parameter) for g in gradients]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()[:8]
    key = torch.frombuffer(bytearray(digest), dtype=torch.int64) >> 1
    keys = torch.cat([key, -key])
    work = communicator.all_reduce(keys, ReduceOp.MAX)
    yield work
    work.wait()
    if not int(keys.sum()):
        return
    refuse_differences(all_gather_json(communicator, mine))


def agree_on_order(
    communicator: Communicator, arrivals: Sequence[int]
) -> Steps[list[int]]:
    """Return rank 0's ``arrivals`` on every rank; collective.

    Args:
        communicator: The ranks that agree.
        arrivals: Indices of gradients in the order in which backward made them here;
            the number of them may differ between ranks.
    """
    length = torch.tensor([len(arrivals)], device="cpu")
    work = communicator.broadcast(length, 0)
    yield work
    work.wait()
    order = torch.zeros(int(length), dtype=torch.int64, device="cpu")
    if communicator.rank == 0:
        order.copy_(torch.tensor(list(arrivals), dtype=torch.int64, device="cpu"))
    work = communicator.broadcast(order, 0)
    yield work
    work.wait()
    return cast("list[int]", order.tolist())


def agree_on_newcomers(
    communicator: Communicator,
    gradients: Sequence[Gradient],
    *,
    has_joined: bool,
    is_sparse_densified: bool,
) -> Steps[list[int]]:
    """Return which gradients are to be reduced and are not planned yet; collective.

    Notes of which of them some rank has a sparse one: a rank that did not use an
    embedding learns it so.

    Args:
        communicator: The ranks that agree.
        gradients: All gradients.
        has_joined: Whether this rank only keeps up with the others, and has no say.
        is_sparse_densified: Whether sparse ones are to travel dense.

    Returns:
        Indices, equal on all ranks; none if all ranks have joined.

    Raises:
        CollectiveError: On every rank: what one rank trains is frozen on another.
    """
    trained = [int(g.parameter.requires_grad) for g in gradients]
    says = torch.tensor(
        [trained, [-t for t in trained], list(map(_dims, gradients))], device="cpu"
    )
    if has_joined:
        says.fill_(_NO_SAY)
    work = communicator.all_reduce(says, ReduceOp.MAX)
    yield work
    work.wait()
    highest, lowest, dims = cast("list[list[int]]", says.tolist())
    if any(high == 1 and low == 0 for high, low in zip(highest, lowest, strict=True)):
        mine = None if has_joined else [_describe_use(g) for g in gradients]
        refuse_differences(all_gather_json(communicator, mine))
    newcomers = [
        index
        for index, gradient in enumerate(gradients)
        if highest[index] == 1 and not gradient.is_planned
    ]
    for index in newcomers:
        gradients[index].sparse_dims = 0 if is_sparse_densified else dims[index]
    return newcomers


def _dims(gradient: Gradient) -> int:
    grad = gradient.parameter.grad
    return grad.sparse_dim() if grad is not None and grad.is_sparse else 0


def describe(name: str, parameter: Tensor) -> str:
    """Return what must be the same on all ranks."""
    return (
        f"{name} {tuple(parameter.shape)} strides {parameter.stride()} "
        f"{parameter.dtype} on {parameter.device.type}"
    )


def _describe_use(gradient: Gradient) -> str:
    trained = "trained" if gradient.parameter.requires_grad else "frozen"
    return f"{describe(gradient.name, gradient.parameter)}, {trained}"


def refuse_differences(everyone: Sequence[list[str] | None]) -> None:
    """Raise where a rank's descriptions differ from another's.

    Args:
        everyone: What ``describe`` returned on each rank; None of one without a say.

    Raises:
        CollectiveError: Naming the first parameter that differs.
    """
    told = [(rank, theirs) for rank, theirs in enumerate(everyone) if theirs]
    first = told[0]
    for other in told[1:]:
        if other[1] != first[1]:
            raise CollectiveError(_difference(first, other))


def _difference(first: tuple[int, list[str]], other: tuple[int, list[str]]) -> str:
    (one, mine), (another, theirs) = first, other
    if len(mine) != len(theirs):
        return (
            f"num_parameters must be the same on all ranks, got {len(mine)} on rank "
            f"{one} and {len(theirs)} on rank {another}. Build the same model "
            "everywhere."
        )
    here, there = next((a, b) for a, b in zip(mine, theirs, strict=True) if a != b)
    return (
        f"parameters must be the same on all ranks, got {here} on rank {one} and "
        f"{there} on rank {another}. Build the same model everywhere."
    )
