"""Where the main thread's time goes, step by step.

Note [The cost of a step's times]
    Entering and leaving an activity reads the clock twice, and only if the main thread
    blocks. A finished step appends one tuple. The reporter's thread samples them once
    a second.
"""

import functools
import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import NamedTuple
from weakref import ref

_LEAST, _MOST_STEPS = 4, 16  # in a report
_RECENT_S = 8.0  # reports of two ranks may be seconds apart
_MOST_KEPT = 4096
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 by the golden ratio: multiples spread evenly
_MOST_OTHERS = 8  # steps of other optimizers before one of them counts


class StepTime(NamedTuple):
    """The time of one step on one rank, and the parts of it that the main thread spent.

    The rest of ``total_s`` is the program's own work.
    """

    step: int
    total_s: float
    blocked_s: float  # in collectives
    input_s: float  # in the DataLoader
    gc_s: float  # in Python's garbage collector


class _Clock:
    """The state that all activities of a meter share."""

    def __init__(self, read_s: Callable[[], float]) -> None:
        self.read_s = read_s
        self.thread = threading.main_thread().ident
        self.depth = 0
        self.begun_s = 0.0


class TimedActivity:
    """A context manager that adds up the time that the main thread spends in it."""

    __slots__ = ("_clock", "total_s")

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self.total_s = 0.0

    def __enter__(self) -> None:
        clock = self._clock
        if threading.get_ident() == clock.thread:
            clock.depth += 1
            if clock.depth == 1:
                clock.begun_s = clock.read_s()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        clock = self._clock
        if threading.get_ident() == clock.thread:
            clock.depth -= 1
            if clock.depth == 0:
                self.total_s += clock.read_s() - clock.begun_s


class StepMeter:
    """Divides a rank's time into steps, each ended by an optimizer or by the program.

    Of several optimizers the first counts, as long as it makes steps.
    """

    def __init__(self, read_s: Callable[[], float] = time.monotonic) -> None:
        self._clock = _Clock(read_s)
        self.blocked = TimedActivity(self._clock)  # in collectives
        self.input = TimedActivity(self._clock)  # in the DataLoader
        self._gc_s = self._gc_begun_s = 0.0
        self._owner: ref[object] | None = None
        self._num_others = 0
        self._is_explicit = False  # the program ends the steps
        self._steps: deque[tuple[float, StepTime]] = deque(maxlen=_MOST_KEPT)
        self._ended_s = 0.0
        self._before = (0.0, 0.0, 0.0)

    def watch_gc(self) -> None:
        gc.callbacks.append(self._on_gc)

    def step_done(self, owner: object, step: int) -> None:
        """End step number ``step`` of ``owner``, an optimizer."""
        if self._is_explicit:
            return
        current = None if self._owner is None else self._owner()
        if current is not owner:
            self._num_others += 1
            if current is not None and self._num_others <= _MOST_OTHERS:
                return
            self._owner = ref(owner)
            self._forget()
        self._num_others = 0
        self._end(step)

    def report(self, step: int) -> None:
        """End step number ``step`` as the program counts; optimizers' steps do not."""
        if not self._is_explicit:
            self._is_explicit = True
            self._forget()
        self._end(step)

    def sample(self, newest: int | None = None) -> tuple[StepTime, ...]:
        """Return at most 16 of the last seconds' steps, and at least four.

        Ranks choose equal numbers, but no regular ones, as a program may do something
        in every second step. ``newest`` is the number of the last step if the job
        counts otherwise than the optimizer.
        """
        kept = [*self._steps.copy()]
        since_s = self._clock.read_s() - _RECENT_S
        first = next(
            (i for i, (at_s, _) in enumerate(kept) if at_s >= since_s), 1 << 30
        )
        steps = [step for _, step in kept[min(first, max(0, len(kept) - _LEAST)) :]]
        if newest is not None and steps and not self._is_explicit:
            ahead = newest - steps[-1].step
            steps = [each._replace(step=each.step + ahead) for each in steps]
        below = 1 << 64
        while len(steps) > _MOST_STEPS:
            below //= 2
            steps = [e for e in steps if e.step * _GOLDEN % (1 << 64) < below]
        return tuple(steps)

    def _forget(self) -> None:
        """Begin anew: steps of two counts, or half of one, are not alike."""
        self._steps.clear()
        self._ended_s = 0.0

    def _end(self, step: int) -> None:
        now_s = self._clock.read_s()
        totals = self.blocked.total_s, self.input.total_s, self._gc_s
        if self._ended_s:
            parts = [now - then for now, then in zip(totals, self._before, strict=True)]
            self._steps.append((now_s, StepTime(step, now_s - self._ended_s, *parts)))
        self._ended_s, self._before = now_s, totals

    def _on_gc(self, phase: str, info: Mapping[str, int]) -> None:
        del info
        # It holds all threads up, except one that is blocked anyhow.
        if phase == "start":
            self._gc_begun_s = 0.0 if self._clock.depth else self._clock.read_s()
        elif self._gc_begun_s:
            self._gc_s += self._clock.read_s() - self._gc_begun_s


@functools.cache
def own_meter() -> StepMeter:
    """Return the meter of this process."""
    return StepMeter()
