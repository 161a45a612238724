"""Lists of tensors as one vector of all their elements, and back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ronde.collectives import ReduceOp
from ronde.errors import UsageError


def flattened(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as a vector, in memory of its own if need be."""
    return tensor.data.reshape(-1)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements of some tensors of one dtype, as one vector."""
    if len(tensors) == 1:
        return flattened(tensors[0])
    return torch.cat([flattened(tensor) for tensor in tensors])


def put_apart(joint: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a vector's elements to where ``joined`` would take them from."""
    parts = joint.split_with_sizes([tensor.numel() for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        tensor.data.copy_(part.view(tensor.shape))


def only(tensors: Sequence[Tensor], name: str) -> Tensor:
    """Return the one tensor of a list."""
    if len(tensors) != 1:
        raise UsageError(f"{name} must be one tensor in a list, got {len(tensors)}.")
    return tensors[0]


def require_count(tensors: Sequence[Tensor], size: int, name: str) -> None:
    if len(tensors) != size:
        raise UsageError(
            f"{name} must have one tensor for each rank, {size}, got {len(tensors)}."
        )


def require_dtype(tensors: Sequence[Tensor], like: Tensor, name: str) -> None:
    for tensor in tensors:
        if tensor.dtype is not like.dtype:
            raise UsageError(
                f"{name} must be of {like.dtype}, as the others are, got "
                f"{tensor.dtype}. tensor.to({like.dtype}) makes it so."
            )


def require_ratio(
    large: Tensor, small: Tensor, size: int, large_name: str, small_name: str
) -> None:
    if large.numel() != size * small.numel():
        raise UsageError(
            f"{large_name} must have size * the elements of {small_name}, {size} * "
            f"{small.numel()}, got {large.numel()}."
        )


def require_rows(
    tensor: Tensor, splits: Sequence[int], size: int, name: str
) -> Sequence[int]:
    """Return the rows for each rank: ``splits``, or if that is empty equally many."""
    num_rows = tensor.shape[0] if tensor.ndim else 1
    if not splits and num_rows % size == 0:
        return [num_rows // size] * size
    if len(splits) != size or sum(splits) != num_rows:
        given = f"{list(splits)}" if splits else f"{size} ranks and no splits"
        raise UsageError(
            f"{name} must be split into its rows, {num_rows}, a number for each rank, "
            f"got {given}."
        )
    return splits


def require_lengths(sent: Sequence[int], lengths: Sequence[int]) -> None:
    """Refuse outputs that are not as long as what the ranks sent."""
    for rank, (numel, length) in enumerate(zip(sent, lengths, strict=True)):
        if numel != length:
            raise UsageError(
                f"the output for rank {rank} must have as many elements as it sent, "
                f"{numel}, got {length}."
            )


def as_real(tensor: Tensor, op: ReduceOp) -> Tensor:
    """Return complex numbers as pairs of real ones; whatever reduces, as it is."""
    detached = tensor.data
    if not detached.is_complex():
        return detached
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise UsageError(f"op must be SUM or AVG for complex tensors, got {op}.")
    return torch.view_as_real(detached)


def place_of(tensor: Tensor) -> Tensor | None:
    """Return a tensor's memory as a vector; None if it is not one."""
    detached = tensor.data
    return detached.view(-1) if detached.is_contiguous() else None


def put(result: Tensor, target: Tensor) -> None:
    """Copy a vector to where ``place_of`` had no place for it."""
    if not target.is_contiguous():
        target.data.copy_(result.view(target.shape))


def received(
    results: Sequence[tuple[Tensor, Sequence[int]]],
    outputs: list[Tensor],
    lengths: Sequence[int] = (),
) -> list[Tensor]:
    """Put what ``all_to_all`` received in ``outputs``.

    ``lengths`` are the elements from each rank, where that is not an output a rank.
    """
    joint, sent = results[0]
    require_lengths(sent, lengths or [output.numel() for output in outputs])
    put_apart(joint, outputs)
    return outputs
