"""Checks of what a collective is given, before anything moves."""

from collections.abc import Collection, Sequence

from torch import Tensor

from ronde.errors import UsageError


def require_device(tensor: Tensor, devices: Collection[str], engine: str) -> None:
    """Refuse what an engine does not move.

    Raises:
        UsageError: ``tensor`` is on another device.
    """
    if tensor.device.type not in devices:
        raise UsageError(
            f"device must be {' or '.join(sorted(devices))} for engine {engine}, got "
            f"{tensor.device}. Copy the tensor to the CPU, or use engine auto or nccl."
        )


def require_dimensions(tensor: Tensor) -> None:
    """Refuse a scalar where rows are meant.

    Raises:
        UsageError: ``tensor`` has no dimensions.
    """
    if tensor.ndim == 0:
        raise UsageError(
            "tensor must have at least one dimension, got a scalar. "
            "Use tensor.reshape(1)."
        )


def require_root(root: int, size: int) -> None:
    """Refuse a root that is no rank.

    Raises:
        UsageError: ``root`` is outside ``0..size-1``.
    """
    if not 0 <= root < size:
        raise UsageError(f"root must be in 0..{size - 1}, got {root}.")


def require_peer(name: str, peer: int, rank: int, size: int) -> None:
    """Refuse a partner that is no other rank.

    Raises:
        UsageError: ``peer`` is outside ``0..size-1``, or this rank itself.
    """
    if not 0 <= peer < size or peer == rank:
        raise UsageError(
            f"{name} must be another rank in 0..{size - 1}, got {peer} on rank {rank}."
        )


def require_splits(
    tensor: Tensor, splits: Sequence[int] | None, size: int
) -> list[int]:
    """Return how many rows each rank is sent.

    Raises:
        UsageError: See ``Communicator.all_to_all``; or ``tensor`` has no dimensions.
    """
    require_dimensions(tensor)
    num_rows = tensor.shape[0]
    if splits is None:
        if num_rows % size:
            raise UsageError(
                f"dimension 0 must be a multiple of size {size} where splits is None, "
                f"got {num_rows}. Give splits."
            )
        return [num_rows // size] * size
    counts = [int(count) for count in splits]
    if len(counts) != size:
        raise UsageError(
            f"splits must have one entry a rank, {size}, got {len(counts)}: {counts}."
        )
    if min(counts) < 0:
        raise UsageError(f"splits must not be negative, got {counts}.")
    if sum(counts) > num_rows:
        raise UsageError(
            f"the sum of splits must be at most dimension 0, {num_rows}, got "
            f"{' + '.join(map(str, counts))} = {sum(counts)}."
        )
    return counts


def require_out(out: Tensor | None, like: Tensor, num_rows: int | None = None) -> None:
    """Refuse a place that cannot hold a result.

    Args:
        out: The place; None, a new tensor, is always right.
        like: The input, whose dtype, device and later dimensions the result has.
        num_rows: Rows of the result; None where only the other ranks know them.

    Raises:
        UsageError: ``out`` is not contiguous, or of another shape, dtype or device.
    """
    if out is None:
        return
    rest = tuple(like.shape[1:])
    fits = (
        out.dtype is like.dtype
        and out.device == like.device
        and out.ndim == max(like.ndim, 1)
        and tuple(out.shape[1:]) == rest
        and (num_rows is None or out.shape[0] == num_rows)
    )
    if not fits:
        rows = "rows" if num_rows is None else str(num_rows)
        shape = ", ".join([rows, *map(str, rest)])
        raise UsageError(
            f"out must be a tensor of {like.dtype} on {like.device} of shape "
            f"[{shape}], got {out.dtype} on {out.device} of {list(out.shape)}. Leave "
            "it out for a new tensor."
        )
    if not out.is_contiguous():
        raise UsageError(
            f"out must be contiguous, got strides {list(out.stride())} of shape "
            f"{list(out.shape)}. Give out.contiguous() and copy the result back."
        )


def apart_from(tensor: Tensor, out: Tensor | None, at_row: int | None = None) -> Tensor:
    """Return ``tensor``, or a copy where writing ``out`` would spoil it.

    Args:
        tensor: What is read.
        out: What is written meanwhile, contiguous.
        at_row: The row of ``out`` that ``tensor`` may begin at and be written by
            itself; None where it may not.
    """
    if out is None or not tensor.numel() or not out.numel():
        return tensor
    if tensor.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
        return tensor
    if at_row is not None and tensor.is_contiguous():
        row_bytes = out[0].numel() * out.element_size()
        if tensor.data_ptr() == out.data_ptr() + at_row * row_bytes:
            return tensor
    first, last = tensor.data_ptr(), _end(tensor)
    if last <= out.data_ptr() or first >= _end(out):
        return tensor
    return tensor.detach().clone()


def _end(tensor: Tensor) -> int:
    """Return the address after the last element, whatever the layout."""
    reach = sum(
        (length - 1) * stride
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr() + (reach + 1) * tensor.element_size()


def rows(num_rows: int, size: int) -> list[int]:
    """Split ``num_rows`` over ``size`` ranks; the first ranks take the extra rows."""
    base, extra = divmod(num_rows, size)
    return [base + (rank < extra) for rank in range(size)]
