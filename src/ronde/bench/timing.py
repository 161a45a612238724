"""Timing of operations, and a watchdog.

Note [What is timed]. Times are the host's wall clock around all iterations and the
final synchronisation. Arguments are made before, and the garbage collector is off.
Each operation on CPU tensors is waited for, as the next operation may use the same
buffers, so ``-z 0`` means ``-z 2`` there.
"""

import gc
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import fmean
from time import perf_counter, perf_counter_ns
from typing import Any, NamedTuple

import torch

from ronde.bench.operations import Operation
from ronde.bench.options import TimingLoop

Expired = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Watchdog:
    """Reports work that takes too long, from another thread."""

    timeout_s: float  # 0 for no watchdog
    on_expired: Expired  # called with the name of the work

    @contextmanager
    def watching(self, work: str) -> Generator[None]:
        if not self.timeout_s:
            yield
            return
        timer = threading.Timer(self.timeout_s, self.on_expired, (work,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


WAIT_AND_BARRIER = 1
WAIT = 2
WAIT_AND_BARRIER_OUTSIDE = 3


class Elapsed(NamedTuple):
    """One rank's times for one timed loop."""

    total_s: float  # from the first call to the end of the last operation
    called_s: float  # from the first call to the return of the last
    iterations_s: tuple[float, ...] = ()  # with ``-I``


class Marks(NamedTuple):
    """Time stamps of the host or of a CUDA stream."""

    mark: Callable[[], Any] = perf_counter
    # Seconds between two time stamps; a device must have been waited for.
    between: Callable[[Any, Any], float] = lambda begun, ended: ended - begun


_HOST = Marks()


def marks_of(device: torch.device) -> Marks:
    if device.type != "cuda":
        return _HOST

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(begun: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        return begun.elapsed_time(ended) / 1e3

    return Marks(mark, between)


@dataclass(frozen=True, slots=True)
class Clock:
    """Measures elapsed time on a device."""

    synchronize: Operation  # waits for all work of the device
    barrier: Operation  # waits for all ranks
    marks: Marks = _HOST

    def time(self, operations: Sequence[Operation], loop: TimingLoop) -> Elapsed:
        """Time ``iterations * aggregated`` calls, cycling through ``operations``."""
        count = loop.iterations * loop.aggregated
        calls = list(islice(cycle(operations), count))
        with without_collector():
            if loop.blocking or loop.is_each_timed:
                return self._in_steps(calls, loop)
            start = perf_counter_ns()
            for call in calls:
                call()
            called = perf_counter_ns()
            self.synchronize()
            end = perf_counter_ns()
        return Elapsed((end - start) / 1e9, (called - start) / 1e9)

    def _in_steps(self, calls: Sequence[Operation], loop: TimingLoop) -> Elapsed:
        is_closed = loop.blocking == WAIT_AND_BARRIER_OUTSIDE
        marks: list[tuple[Any, Any]] = []
        untimed = 0
        start = perf_counter_ns()
        begun = self.marks.mark() if loop.is_each_timed else None
        for number, call in enumerate(calls, 1):
            call()
            if loop.blocking in (WAIT, WAIT_AND_BARRIER):
                self.synchronize()
            if loop.blocking == WAIT_AND_BARRIER:
                self.barrier()
            if number % loop.aggregated:
                continue
            if is_closed:
                self.synchronize()
            if begun is not None:
                ended = self.marks.mark()
                marks.append((begun, ended))
                begun = ended
            if is_closed:
                left = perf_counter_ns()
                self.barrier()
                untimed += perf_counter_ns() - left
                begun = self.marks.mark() if begun is not None else None
        called = perf_counter_ns()
        self.synchronize()
        end = perf_counter_ns()
        iterations_s = tuple(self.marks.between(begun, ended) for begun, ended in marks)
        total_s, called_s = end - start - untimed, called - start - untimed
        return Elapsed(total_s / 1e9, called_s / 1e9, iterations_s)


def combine(times_s: Sequence[float], average: int) -> float:
    """Combine the times of all ranks as nccl-tests' ``-a`` does."""
    if average == 0:
        return times_s[0]
    return (fmean, min, max)[average - 1](times_s)


@contextmanager
def without_collector() -> Generator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
