"""The clock around operations, and the watchdog of what does not end.

Note [What is timed]. Wall clock of the host around all iterations and the final
synchronisation. Everything that an operation needs is made before; the collector is off
meanwhile. Engines for CPU tensors are waited for after every operation, since the next
one uses the same buffers: ``-z 0`` and ``-z 2`` are one there.
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

from ronde.bench.operations import Operation
from ronde.bench.options import TimingLoop

Expired = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Watchdog:
    """Reports from another thread when a stretch of work takes too long."""

    timeout_s: float  # 0 watches nothing
    on_expired: Expired  # gets the name of the work

    @contextmanager
    def watching(self, what: str) -> Generator[None]:
        if not self.timeout_s:
            yield
            return
        timer = threading.Timer(self.timeout_s, self.on_expired, (what,))
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
    """What one rank measured of one loop."""

    total_s: float  # from the first call to the end of the last operation
    called_s: float  # from the first call to the return of the last
    iterations_s: tuple[float, ...] = ()  # each iteration, where that was asked for


@dataclass(frozen=True, slots=True)
class Clock:
    """How this device is timed."""

    synchronize: Operation  # waits for all that the device was given
    barrier: Operation  # waits for all ranks
    # A moment, and the seconds between two: on the host, or of the device's stream.
    mark: Callable[[], Any] = perf_counter
    between: Callable[[Any, Any], float] = lambda begun, ended: ended - begun

    def time(self, operations: Sequence[Operation], loop: TimingLoop) -> Elapsed:
        """Run the operations in turn, ``iterations`` times ``aggregated`` in all."""
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
        begun = self.mark() if loop.is_each_timed else None
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
                ended = self.mark()
                marks.append((begun, ended))
                begun = ended
            if is_closed:
                left = perf_counter_ns()
                self.barrier()
                untimed += perf_counter_ns() - left
                begun = self.mark() if begun is not None else None
        called = perf_counter_ns()
        self.synchronize()
        end = perf_counter_ns()
        iterations_s = tuple(self.between(begun, ended) for begun, ended in marks)
        total_s, called_s = end - start - untimed, called - start - untimed
        return Elapsed(total_s / 1e9, called_s / 1e9, iterations_s)


def combine(times_s: Sequence[float], average: int) -> float:
    """Make one time of those of all ranks, as nccl-tests' ``-a`` asks."""
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
