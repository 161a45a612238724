"""A rank's doorbell, a word that other ranks change to wake it, and its waiter.

Note [Notifications]
    Every ``notify`` stores a new value: the k-th of n notifiers counts k, k + n, k +
    2n, ... So a waiter that sleeps on a value is woken by every later notification,
    even if two are simultaneous and one overwrites the other. No data is missed, as
    notifiers store data before they notify, and waiters read the value before the data.

Note [Two halves]
    Both halves of the word hold the same value. Eager waits sleep on one half, the
    background thread on the other. While a thread waits eagerly, notifications do not
    wake the background thread. That saves a system call in the notifier, and in this
    process a thread that would take the interpreter's lock.
"""

import ctypes
import itertools
import threading
import time

from ronde.collectives.engines.shared_memory.waiting import (
    CONTENTION,
    IS_WEAKLY_ORDERED,
    fence,
    sleep_while,
    wake_all,
)

DOORBELL_BYTES = 128
"""Size of the doorbell and the sleepers' flags, each in its own cache line."""
_VALUE = 0
_ASLEEP = 8
_BOTH_HALVES = (1 << 32) + 1
_HALF = (1 << 32) - 1
_EAGER, _BACKGROUND = 1, 2
_BACKGROUND_AT = 4
_FOR_EVER_S = 3600.0 * 24 * 365
NEAR, FAR = 200, 0
"""Number of polls of an eager wait before it sleeps. Messages from other hosts are
received by threads that need the interpreter's lock, so waits for them do not poll."""


class Doorbell:
    """Notifies one rank; each notifying process has its own object.

    ``words`` is the notified rank's memory from the doorbell on, in words of eight
    bytes, initially zeros; ``address`` is the address of ``words`` in this process.
    """

    __slots__ = ("_next_value", "address", "words")

    def __init__(
        self, words: memoryview, address: int, *, index: int, num_notifiers: int
    ) -> None:
        self.words = words
        self.address = address
        self._next_value = itertools.count(index + 1, num_notifiers).__next__

    @classmethod
    def private(cls) -> "Doorbell":
        memory = (ctypes.c_uint64 * (DOORBELL_BYTES // 8))()
        words = memoryview(memory).cast("B").cast("Q")
        return cls(words, ctypes.addressof(memory), index=0, num_notifiers=1)

    def notify(self) -> None:
        """Notify the rank of data stored before the call; thread-safe."""
        words = self.words
        if IS_WEAKLY_ORDERED:
            fence()
        words[_VALUE] = (self._next_value() & _HALF) * _BOTH_HALVES
        fence()  # the notifier's half: see Note [Memory order] in ``waiting``
        asleep = words[_ASLEEP]
        if asleep:
            self.wake(asleep)

    def has_sleeper(self) -> bool:
        return bool(self.words[_ASLEEP] & _EAGER)

    def wake(self, asleep: int) -> None:
        if asleep & _EAGER:
            wake_all(self.address)
        if asleep & _BACKGROUND:
            wake_all(self.address + _BACKGROUND_AT)


class Waiter:
    """Waits for the doorbell of this rank.

    ``num_waiters`` is the number of threads in a loop of eager waits and reads.
    """

    def __init__(self, doorbell: Doorbell, num_polls: int) -> None:
        self.doorbell = doorbell
        self._words = doorbell.words
        self._num_polls = num_polls
        self._seen = 0
        self._last_wake = 0
        self._next_wake = itertools.count(1).__next__
        self._thread = threading.local()  # holds the last wake that each thread saw
        self._lock = threading.Lock()
        self.num_waiters = 0
        self._num_asleep = {_EAGER: 0, _BACKGROUND: 0}
        self._is_closed = False

    def read(self) -> None:
        """Acknowledge all notifications so far; call it before reading their data."""
        self._seen = self._words[_VALUE]
        if IS_WEAKLY_ORDERED:
            fence()

    def wait(self, timeout_s: float | None, *, is_eager: bool) -> None:
        """Return after a notification since the last ``read`` of any thread.

        Also returns after a ``wake()`` since this thread's last ``wait``. May return
        spuriously. An eager wait polls for a short while before it sleeps.
        """
        last_wake = getattr(self._thread, "number", 0)
        kind = _EAGER if is_eager else _BACKGROUND
        if not self._is_due(kind, last_wake):
            words, seen = self._words, self._seen
            if not is_eager or not CONTENTION.spin(
                lambda: words[_VALUE] != seen, self._num_polls
            ):
                self._sleep(kind, timeout_s, last_wake)
        self._thread.number = self._last_wake

    def wake(self) -> None:
        self._last_wake = self._next_wake()
        self.doorbell.notify()
        if self._num_asleep[_BACKGROUND]:  # skipped while there are waiters
            self.doorbell.wake(_BACKGROUND)

    def add_waiter(self) -> None:
        """Stop notifications from waking background waits; may be nested."""
        self._count(1)

    def remove_waiter(self) -> None:
        """Undo ``add_waiter``; wake background waits if a notification was not read."""
        self._count(-1)
        if not self.num_waiters and self._words[_VALUE] != self._seen:
            self.doorbell.notify()

    def close(self) -> None:
        self._is_closed = True
        self.wake()

    def _is_due(self, kind: int, last_wake: int) -> bool:
        if self._last_wake != last_wake or self._is_closed:
            return True
        is_left_out = kind == _BACKGROUND and self.num_waiters
        return self._words[_VALUE] != self._seen and not is_left_out

    def _sleep(self, kind: int, timeout_s: float | None, last_wake: int) -> None:
        deadline = time.monotonic() + (_FOR_EVER_S if timeout_s is None else timeout_s)
        address = self.doorbell.address + (_BACKGROUND_AT if kind == _BACKGROUND else 0)
        self._count(1, kind)
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                value = self._words[_VALUE]
                if self._is_due(kind, last_wake):
                    return
                sleep_while(address, value & _HALF, left_s)
        finally:
            self._count(-1, kind)

    def _count(self, change: int, kind: int = 0) -> None:
        """Adjust a count of waiters or sleepers; store the kinds of waits to wake."""
        with self._lock:
            if kind:
                self._num_asleep[kind] += change
            else:
                self.num_waiters += change
            asleep = _EAGER if self._num_asleep[_EAGER] else 0
            if self._num_asleep[_BACKGROUND] and not self.num_waiters:
                asleep |= _BACKGROUND
            self._words[_ASLEEP] = asleep
            fence()
