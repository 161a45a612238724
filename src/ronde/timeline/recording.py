"""Takes down operations in no time, and hands them on in batches from a thread."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ronde.timeline.events import Recorded

MAX_WAITING = 1 << 16
"""Operations that may wait for the thread; more are dropped, and counted."""

_SLICE = 32
"""Operations formatted at a time. Note [Kind to the trainer]"""

_logger = logging.getLogger("ronde")

_Item = TypeVar("_Item")


class Sink(Protocol):
    """Where records go. Called by one thread."""

    def take(self, records: Sequence[Recorded], cycles: Sequence[int] = ()) -> None:
        """Write records down; an OSError here or below ends the sink."""
        ...

    def flush(self) -> None:
        """Hand all that was taken to the system."""
        ...

    def close(self, num_lost: int) -> None:
        """Write the end down, with the number of operations that are missing."""
        ...


class ThreadedRecorder:
    """Takes down operations from any thread.

    An operation costs its thread an append. Nothing runs while nothing is taken down.

    Note [Kind to the trainer]
        The thread formats a few operations at a time, about 0.1 ms, and then lets go of
        the interpreter: otherwise a program that waits for it would wait for the whole
        switch interval, 5 ms. It runs at the program's own priority: at a lower one it
        could be held up for long while it holds the interpreter, and the program with
        it.

    Args:
        sinks: Where the records go.
        gather_s: How long records may wait for others.
        has_cycles: Whether to take cycles down.
    """

    def __init__(
        self, sinks: Sequence[Sink], *, gather_s: float, has_cycles: bool = False
    ) -> None:
        self._sinks = list(sinks)
        self._gather_s = gather_s
        self._has_cycles = has_cycles
        self._operations: deque[Recorded] = deque()
        self._cycles: deque[int] = deque()
        self._num_lost = 0
        self._losing = threading.Lock()
        self._has_some = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="ronde-timeline", daemon=True
        )
        self._thread.start()

    def operation(self, recorded: Recorded) -> None:
        """Take down an operation that is over."""
        if len(self._operations) >= MAX_WAITING:
            with self._losing:
                self._num_lost += 1
            return
        self._operations.append(recorded)
        if not self._has_some.is_set():
            self._has_some.set()

    def cycle(self, at_ns: int) -> None:
        """Take down that submissions were sent off for agreement."""
        if self._has_cycles and len(self._cycles) < MAX_WAITING:
            self._cycles.append(at_ns)
            if not self._has_some.is_set():
                self._has_some.set()

    def close(self) -> None:
        """Write all that was taken down, and end the thread."""
        self._closing.set()
        self._has_some.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._has_some.wait()
            self._closing.wait(self._gather_s)
            # Before anything is taken out: what comes in later sets it again.
            self._has_some.clear()
            self._hand_on()
        self._hand_on()
        self._each(lambda sink: sink.close(self._num_lost))

    def _hand_on(self) -> None:
        while self._operations or self._cycles:
            records = _pop(self._operations)
            cycles = _pop(self._cycles)
            self._each(lambda sink, r=records, c=cycles: sink.take(r, c))
            time.sleep(0)
        self._each(lambda sink: sink.flush())

    def _each(self, do: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                do(sink)
            except OSError as error:
                self._sinks.remove(sink)
                _logger.warning(
                    "timeline must be written, but that fails: %s. The job goes on; "
                    "what comes now is not taken down.",
                    error,
                )


def _pop(items: "deque[_Item]") -> "list[_Item]":
    return [items.popleft() for _ in range(min(len(items), _SLICE))]
