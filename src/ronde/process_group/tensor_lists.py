"""Conversion between lists of tensors and one vector of all their elements."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ronde.collectives import ReduceOp
from ronde.errors import UsageError


def flattened(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as a vector, copied if necessary."""
    return tensor.data.reshape(-1)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors, which must have one dtype, as a vector."""
    if len(tensors) == 1:
        return flattened(tensors[0])
    return torch.cat([flattened(tensor) for tensor in tensors])


def copy_apart(joint: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a vector's elements back into tensors: the inverse of ``joined``."""
    parts = joint.split_with_sizes([tensor.numel() for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        tensor.data.copy_(part.view(tensor.shape))


def only(tensors: Sequence[Tensor], name: str) -> Tensor:
    if len(tensors) != 1:
        raise UsageError(
            f"{name} must be a list of one tensor, got {len(tensors)} tensors."
        )
    return tensors[0]


def require_count(tensors: Sequence[Tensor], size: int, name: str) -> None:
    if len(tensors) != size:
        raise UsageError(
            f"{name} must have {size} tensors, one per rank, got {len(tensors)}."
        )


def require_dtype(tensors: Sequence[Tensor], like: Tensor, name: str) -> None:
    for tensor in tensors:
        if tensor.dtype is not like.dtype:
            raise UsageError(
                f"{name} must have the dtype of the other tensors, {like.dtype}, got "
                f"{tensor.dtype}. Use tensor.to({like.dtype})."
            )


def require_ratio(
    large: Tensor, small: Tensor, size: int, large_name: str, small_name: str
) -> None:
    if large.numel() != size * small.numel():
        raise UsageError(
            f"{large_name} must have as many elements as {small_name} on all ranks: "
            f"{size} * {small.numel()} = {size * small.numel()}, got {large.numel()}."
        )


def require_rows(
    tensor: Tensor, splits: Sequence[int], size: int, name: str
) -> Sequence[int]:
    """Return the rows for each rank: ``splits``, or an even split if it is empty."""
    num_rows = tensor.shape[0] if tensor.ndim else 1
    if not splits and num_rows % size == 0:
        return [num_rows // size] * size
    if len(splits) != size or sum(splits) != num_rows:
        given = f"{list(splits)}" if splits else "no splits"
        raise UsageError(
            f"{name} splits must be {size} numbers, one per rank, that add up to the "
            f"{num_rows} rows of {name}, got {given}."
        )
    return splits


def require_lengths(sent: Sequence[int], lengths: Sequence[int]) -> None:
    for rank, (numel, length) in enumerate(zip(sent, lengths, strict=True)):
        if numel != length:
            raise UsageError(
                f"the output for rank {rank} must have {numel} elements, as many as "
                f"rank {rank} sent, got {length}."
            )


def as_real(tensor: Tensor, op: ReduceOp) -> Tensor:
    """Return a tensor's data, with complex numbers as pairs of real numbers."""
    detached = tensor.data
    if not detached.is_complex():
        return detached
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise UsageError(f"op must be SUM or AVG for complex tensors, got {op}.")
    return torch.view_as_real(detached)


def memory_of(tensor: Tensor) -> Tensor | None:
    """Return a 1-D view of a contiguous tensor's memory; None for other tensors."""
    detached = tensor.data
    return detached.view(-1) if detached.is_contiguous() else None


def copy_if_needed(result: Tensor, target: Tensor) -> None:
    """Copy a result into a target that is not contiguous: see ``memory_of``."""
    if not target.is_contiguous():
        target.data.copy_(result.view(target.shape))


def received(
    results: Sequence[tuple[Tensor, Sequence[int]]],
    outputs: list[Tensor],
    lengths: Sequence[int] = (),
) -> list[Tensor]:
    """Copy the result of ``all_to_all`` into ``outputs``.

    ``lengths`` has the number of elements from each rank. If it is empty, output r is
    from rank r.
    """
    joint, sent = results[0]
    require_lengths(sent, lengths or [output.numel() for output in outputs])
    copy_apart(joint, outputs)
    return outputs
