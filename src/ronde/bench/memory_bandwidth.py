"""The memory bandwidth that all ranks of a machine have together, by copying."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ronde.collectives.communicator import Communicator
from ronde.collectives.objects import all_gather_json
from ronde.memory import available_memory
from ronde.units import format_size

_ROOT = Path("/")
_CACHES = "sys/devices/system/cpu/cpu*/cache/index*"
_SIZE = re.compile(r"(\d+)([KMG]?)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TIMES_CACHE = 2
_MIN_BYTES = 64 << 20
"""Of all ranks together."""
_MAX_BYTES = 1 << 30
"""Likewise."""
_SHARE_OF_MEMORY = 8
_NUM_ROUNDS = 5
_ROUND_S = 0.06
_PIECE_BYTES = 8 << 20
_TOUCH_S = 0.4
"""How long a rank may take to get its pages; in a virtual machine that may be slow."""


@dataclass(frozen=True, slots=True)
class MemoryBandwidth:
    """What a copy by all ranks at once reads and writes.

    Attributes:
        gb_per_s: By host: bytes read and bytes written together, all its ranks.
        is_beyond_cache: Whether the buffers were larger than the caches.
        size_bytes: All buffers of the host with the smallest ones.
    """

    gb_per_s: dict[str, float]
    is_beyond_cache: bool
    size_bytes: int

    @property
    def note(self) -> str:
        """When a figure may exceed the bound all the same."""
        note = "sizes that stay in the cache may exceed it"
        if self.is_beyond_cache:
            return note
        size = format_size(self.size_bytes)
        return f"{note}; it was measured over {size}, which may have stayed there too"


def cache_bytes(root: Path = _ROOT) -> int:
    """Return the size of all last-level caches of a machine; 0 where it is unknown.

    A virtual machine may show the whole cache of its host's processor.

    Args:
        root: Directory that holds ``sys``.
    """
    sizes: dict[tuple[int, str], int] = {}
    for folder in root.glob(_CACHES):
        try:
            level = int((folder / "level").read_text())
            shared = (folder / "shared_cpu_list").read_text().strip()
            size = _SIZE.match((folder / "size").read_text())
        except (OSError, ValueError):
            continue
        if size is not None:
            sizes[level, shared] = int(size[1]) * _UNITS[size[2]]
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


def buffer_bytes(cache: int, available: int, num_ranks: int) -> int:
    """Return how large each of a rank's two buffers should be.

    Together all are several times the caches, and no more than an eighth of the memory
    that is free.

    Args:
        cache: Size of the last-level caches.
        available: Memory that is free.
        num_ranks: Ranks of this machine.
    """
    wanted = min(max(_TIMES_CACHE * cache, _MIN_BYTES), _MAX_BYTES)
    total = min(wanted, available // _SHARE_OF_MEMORY)
    return max(total // (2 * num_ranks), 1 << 12) & ~0xFFF


def measure_memory(communicator: Communicator, host: str) -> MemoryBandwidth:
    """Copy on all ranks at once and add their rates up by host; collective.

    It takes about a second. Of several rounds the best counts: a bound must not suffer
    from what else the machine did.

    Args:
        communicator: All ranks.
        host: This rank's.
    """
    hosts = all_gather_json(communicator, host)
    available = min(all_gather_json(communicator, available_memory().num_bytes))
    cache = cache_bytes()
    size = buffer_bytes(cache, available, hosts.count(host))
    source, target = _touched(size)
    best: dict[str, float] = {}
    for _ in range(_NUM_ROUNDS):
        communicator.barrier().wait()
        rate = copy_gb_per_s(source, target)
        rates = all_gather_json(communicator, rate)
        for each in set(hosts):
            total = sum(r for h, r in zip(hosts, rates, strict=True) if h == each)
            best[each] = max(total, best.get(each, 0.0))
    sizes = all_gather_json(communicator, 2 * source.numel())
    total = min(
        sum(each for h, each in zip(hosts, sizes, strict=True) if h == name)
        for name in set(hosts)
    )
    largest_cache = max(all_gather_json(communicator, cache))
    return MemoryBandwidth(best, total >= _TIMES_CACHE * largest_cache > 0, total)


def _touched(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two equal buffers of up to ``size`` bytes that have their pages."""
    source = torch.empty(size, dtype=torch.uint8)
    target = torch.empty(size, dtype=torch.uint8)
    start_s = time.perf_counter()
    end = 0
    while end < size and (end == 0 or time.perf_counter() - start_s < _TOUCH_S):
        for buffer in (source, target):
            buffer[end : end + _PIECE_BYTES].fill_(1)
        end = min(end + _PIECE_BYTES, size)
    return source[:end], target[:end]


def copy_gb_per_s(
    source: torch.Tensor,
    target: torch.Tensor,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> float:
    """Copy for a while; return bytes read and written by the time, in GB/s.

    Args:
        source: Bytes.
        target: As many.
        clock_ns: Tells the time.
    """
    num_bytes, start_ns = 0, clock_ns()
    while True:
        target.copy_(source)
        num_bytes += 2 * source.numel()
        elapsed_ns = clock_ns() - start_ns
        if elapsed_ns >= _ROUND_S * 1e9:
            return num_bytes / elapsed_ns
