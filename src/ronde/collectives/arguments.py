"""Checks of what a collective is given, before anything moves."""

from collections.abc import Sequence

from torch import Tensor

from ronde.errors import UsageError


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
    if tensor.ndim == 0:
        raise UsageError(
            "tensor must have at least one dimension, got a scalar. "
            "Use tensor.reshape(1)."
        )
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
