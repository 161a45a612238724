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
from dataclasses import dataclass, field
from time import monotonic, perf_counter_ns
from typing import Any, Protocol, Self

import torch

from ronde.bench.operations import Operation
from ronde.bench.options import Loop


class CudaEvent:
    """The moment at which the current stream has done all it was given so far."""

    def __init__(self) -> None:
        # torch gives its events no type.
        cuda: Any = torch.cuda
        self._event: Any = cuda.Event(enable_timing=True)
        self._event.record()

    def seconds_to(self, later: Self) -> float:
        """Return the time between two moments that are both over."""
        return float(self._event.elapsed_time(later._event)) / 1e3


Expired = Callable[[str], None]


class Watchdog:
    """Calls somebody when a stretch of work takes too long."""

    def __init__(self, timeout_s: float, on_expired: Expired) -> None:
        self._timeout_s = timeout_s
        self._on_expired = on_expired
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._what = ""
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, what: str) -> Generator[None]:
        if not self._timeout_s:
            yield
            return
        self._arm(what, monotonic() + self._timeout_s)
        try:
            yield
        finally:
            self._arm("", None)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _arm(self, what: str, deadline: float | None) -> None:
        with self._changed:
            self._what, self._deadline = what, deadline
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._is_closed:
                if self._deadline is None:
                    self._changed.wait()
                    continue
                left_s = self._deadline - monotonic()
                if left_s <= 0:
                    self._on_expired(self._what)
                    self._deadline = None
                    continue
                self._changed.wait(left_s)


WAIT_AND_BARRIER = 1
WAIT = 2
WAIT_AND_BARRIER_OUTSIDE = 3


@dataclass(frozen=True, slots=True)
class Elapsed:
    """What one rank's clock says of one loop."""

    total_s: float  # from the first call to the end of the last operation
    called_s: float  # from the first call to the return of the last
    iterations_s: tuple[float, ...] = ()  # each iteration, where that was asked for


class TimingEvent(Protocol):
    """A moment on the device."""

    def seconds_to(self, later: Self) -> float:
        """Return the time between two moments that are both over."""
        ...


@dataclass(frozen=True, slots=True)
class HostEvent:
    """A moment on the host: for devices that are done when a call returns."""

    at_ns: int = field(default_factory=perf_counter_ns)

    def seconds_to(self, later: Self) -> float:
        return (later.at_ns - self.at_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Clock:
    """How this device is timed."""

    synchronize: Operation  # waits for all that the device was given
    barrier: Operation  # waits for all ranks
    mark: Callable[[], TimingEvent] = HostEvent

    def time(self, operations: Sequence[Operation], loop: Loop) -> Elapsed:
        count = loop.iterations * loop.aggregated
        turns = -(-count // len(operations))
        calls = (list(operations) * turns)[:count]
        with _no_collector():
            if loop.blocking or loop.is_each_timed:
                return self._in_steps(calls, loop)
            return self._straight(calls)

    def _straight(self, calls: Sequence[Operation]) -> Elapsed:
        start = perf_counter_ns()
        for call in calls:
            call()
        called = perf_counter_ns()
        self.synchronize()
        end = perf_counter_ns()
        return Elapsed((end - start) / 1e9, (called - start) / 1e9)

    def _in_steps(self, calls: Sequence[Operation], loop: Loop) -> Elapsed:
        """Do what comes after each operation, and after each iteration."""
        after_call = self._after_call(loop)
        is_closed = loop.blocking == WAIT_AND_BARRIER_OUTSIDE
        marks: list[tuple[TimingEvent, TimingEvent]] = []
        untimed = 0
        start = perf_counter_ns()
        begun = self.mark() if loop.is_each_timed else None
        for number, call in enumerate(calls, 1):
            call()
            after_call()
            if number % loop.aggregated:
                continue
            if is_closed:
                self.synchronize()
            if begun is not None:
                ended = self.mark()
                marks.append((begun, ended))
                begun = ended
            if is_closed:
                untimed += self._leave_out()
                begun = self.mark() if begun is not None else None
        called = perf_counter_ns()
        self.synchronize()
        end = perf_counter_ns()
        iterations_s = tuple(begun.seconds_to(ended) for begun, ended in marks)
        total_s, called_s = end - start - untimed, called - start - untimed
        return Elapsed(total_s / 1e9, called_s / 1e9, iterations_s)

    def _leave_out(self) -> int:
        """Wait for all ranks; return the nanoseconds that it took."""
        begun = perf_counter_ns()
        self.barrier()
        return perf_counter_ns() - begun

    def _after_call(self, loop: Loop) -> Operation:
        if loop.blocking == WAIT:
            return self.synchronize
        if loop.blocking != WAIT_AND_BARRIER:
            return _nothing

        def wait_for_all() -> None:
            self.synchronize()
            self.barrier()

        return wait_for_all


def combine(times_s: Sequence[float], average: int) -> float:
    """Make one time of those of all ranks, as nccl-tests' ``-a`` says."""
    match average:
        case 0:
            return times_s[0]
        case 1:
            return sum(times_s) / len(times_s)
        case 2:
            return min(times_s)
        case _:
            return max(times_s)


@contextmanager
def _no_collector() -> Generator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _nothing() -> None:
    """Do nothing after an operation."""
