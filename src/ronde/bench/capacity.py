"""How large a row may be, by the memory that is free; no torch."""

from dataclasses import dataclass
from pathlib import Path

from ronde.errors import UsageError
from ronde.memory import available_memory
from ronde.units import format_size

_GIB = 1 << 30
_RESERVE_PER_BYTES = 16 * _GIB
_MAX_RESERVE_BYTES = 4 * _GIB


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """What is free."""

    free_bytes: int  # of the memory that the buffers are in
    what: str  # its name, for a sentence


def free_host_memory(root: Path = Path("/")) -> FreeMemory:
    """Return the scarcest of available memory and control group limits."""
    available = available_memory(root)
    return FreeMemory(available.num_bytes, available.source)


def largest_row(free_bytes: int, num_sharing: int, *, is_checked: bool) -> int:
    """Return the bytes of the largest row for which a rank can have its buffers.

    Keeps a reserve of 1 GiB for every started 16 GiB, at most 4, and another GiB; of
    little memory at most half. Two buffers are needed, and room for a third where
    results are verified. Source: nccl-tests.
    """
    started = -(-free_bytes // _RESERVE_PER_BYTES)
    reserve = min(started * _GIB, _MAX_RESERVE_BYTES) + _GIB
    usable = free_bytes - min(reserve, free_bytes // 2)
    return usable // num_sharing // (3 if is_checked else 2)


def require_room(min_bytes: int, largest_bytes: int, memory: FreeMemory) -> None:
    if min_bytes > largest_bytes:
        raise UsageError(
            f"-b must be at most {largest_bytes} ({format_size(largest_bytes)}), for "
            f"which every rank's buffers fit {memory.what}, {memory.free_bytes} bytes; "
            f"got {min_bytes}. Give -b {largest_bytes} or less."
        )
