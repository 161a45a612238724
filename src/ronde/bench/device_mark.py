"""Moments on a CUDA device, so that single iterations need not be waited for."""

from typing import Any, Self

import torch


class DeviceMark:
    """The moment at which the current stream has done all it was given so far."""

    def __init__(self) -> None:
        """Put it into the current stream."""
        # torch gives its events no type.
        cuda: Any = torch.cuda
        self._event: Any = cuda.Event(enable_timing=True)
        self._event.record()

    def seconds_to(self, later: Self) -> float:
        """Return the time between two moments that are both over."""
        return float(self._event.elapsed_time(later._event)) / 1e3
