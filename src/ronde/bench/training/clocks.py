"""Clocks that a training step tells where it is."""

import time
from collections.abc import Callable
from typing import Protocol

from ronde.bench.training.phases import Phase


class Clock(Protocol):
    """Hears when a step begins and when each of its phases is over."""

    def start(self) -> None:
        """Note that a step begins."""
        ...

    def mark(self, phase: Phase) -> None:
        """Note that ``phase`` is over."""
        ...


class Stopwatch:
    """Adds up what each phase takes, over any number of steps.

    Args:
        synchronize: Waits until the device has done all it was given; called at every
            boundary.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._since_ns = 0
        self._total_ns = dict.fromkeys(Phase, 0)

    def start(self) -> None:
        """Note that a step begins."""
        self._synchronize()
        self._since_ns = time.perf_counter_ns()

    def mark(self, phase: Phase) -> None:
        """Note that ``phase`` is over."""
        self._synchronize()
        now_ns = time.perf_counter_ns()
        self._total_ns[phase] += now_ns - self._since_ns
        self._since_ns = now_ns

    def seconds_a_step(self, num_steps: int) -> dict[Phase, float]:
        """Return the mean of each phase over the steps that were marked."""
        return {phase: ns / num_steps / 1e9 for phase, ns in self._total_ns.items()}


class NoClock:
    """Hears nothing, so that the device is never waited for."""

    def start(self) -> None:
        """Do nothing."""

    def mark(self, phase: Phase) -> None:
        """Do nothing."""
