"""An allocator in memory shared by all ranks of a machine, for in-place collectives.

All ranks make the arena together. Afterwards each rank allocates and frees without
waiting for others. A part is freed together with the last tensor that uses it.
"""

import weakref
from bisect import insort
from collections import deque

import torch
from torch import Tensor

_LINE_BYTES = 64


class Arena:
    """Allocator of vectors in one block of memory."""

    def __init__(self, whole: Tensor) -> None:
        self._bytes = whole.numpy()
        self._free = [(0, len(self._bytes))]  # sorted (start, end), never adjacent
        # Parts freed by finalizers, which may run at any time.
        self._gone: deque[tuple[int, int]] = deque()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return an uninitialized vector, or None if there is no room."""
        while self._gone:
            self._free_part(*self._gone.popleft())
        num_bytes = -(-numel * dtype.itemsize // _LINE_BYTES) * _LINE_BYTES
        for index, (start, end) in enumerate(self._free):
            stop = start + num_bytes
            if stop > end:
                continue
            self._free[index : index + 1] = [(stop, end)] if stop < end else []
            part = self._bytes[start : start + numel * dtype.itemsize]
            weakref.finalize(part, self._gone.append, (start, stop)).atexit = False
            with torch.inference_mode(mode=False):
                return torch.from_numpy(part).view(dtype)
        return None

    def _free_part(self, start: int, end: int) -> None:
        insort(self._free, (start, end))
        joined: list[tuple[int, int]] = []
        for first, last in self._free:
            touches = bool(joined) and joined[-1][1] == first
            joined.append((joined.pop()[0] if touches else first, last))
        self._free = joined
