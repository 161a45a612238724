"""What wakes a rank: a word of memory that others change, and how the rank waits.

Note [Notifications]
    Every ``notify`` stores a value that none before it stored: notifiers count in steps
    as wide as there are notifiers, each from its own number. So whoever has read a
    value and goes to sleep on it is woken by every later one, even if two come at once
    and one hides the other. What is announced is stored before the notification, and a
    waiter reads the value before it looks around: so nothing is missed.

Note [Two halves]
    The two halves of the word hold the same: those who wait for an answer sleep on one,
    the background thread on the other. While anybody waits for an answer, notifications
    need not wake the background thread: a system call less for the notifier, and here a
    thread less that asks for the interpreter's lock.
"""

import ctypes
import itertools
import threading
import time
from itertools import repeat

from ronde.collectives.engines.shared_memory.waiting import (
    CONTENTION,
    IS_WEAKLY_ORDERED,
    fence,
    sleep_while,
    wake_all,
)

DOORBELL_BYTES = 128
"""The doorbell and who sleeps, each in a cache line of its own."""
_VALUE = 0
_ASLEEP = 8
_BOTH_HALVES = (1 << 32) + 1
_HALF = (1 << 32) - 1
_EAGER, _BACKGROUND = 1, 2
_BACKGROUND_AT = 4
_FOR_EVER_S = 3600.0 * 24 * 365
NEAR, FAR = 200, 0
"""How often one who waits for an answer looks for it, and lets others run, before it
sleeps. Answers of other hosts come by threads that want this very interpreter."""


class Doorbell:
    """Notifies one rank; made by each process that does.

    ``words`` is the rank's memory from the doorbell on, in words of eight bytes, zeros
    before the first notification; ``address`` is where that is in this process.
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
        """Announce to the rank what was stored before; any thread may."""
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
    """How a rank waits for its own doorbell.

    ``num_waiters`` are the threads that ``wait`` eagerly and read, again and again.
    """

    def __init__(self, doorbell: Doorbell, num_looks: int) -> None:
        self.doorbell = doorbell
        self._words = doorbell.words
        self._num_looks = num_looks
        self._seen = 0
        self._last_wake = 0
        self._next_wake = itertools.count(1).__next__
        self._thread = threading.local()  # with the last wake that each returned after
        self._lock = threading.Lock()
        self.num_waiters = 0
        self._num_asleep = {_EAGER: 0, _BACKGROUND: 0}
        self._is_closed = False

    def read(self) -> None:
        """Take note of all notifications so far; call it before looking around."""
        self._seen = self._words[_VALUE]
        if IS_WEAKLY_ORDERED:
            fence()

    def wait(self, timeout_s: float | None, *, is_eager: bool) -> None:
        """Return after a notification that nobody has read yet, or ``wake()``.

        What came since the last ``read``, by any thread, and a ``wake`` since the last
        ``wait`` of this thread count. It may also return for nothing. An eager one
        spins and yields for a short while before it sleeps: it wants its answer.
        """
        last_wake = getattr(self._thread, "number", 0)
        kind = _EAGER if is_eager else _BACKGROUND
        if not self._is_due(kind, last_wake) and not (is_eager and self._spin()):
            self._sleep(kind, timeout_s, last_wake)
        self._thread.number = self._last_wake

    def wake(self) -> None:
        self._last_wake = self._next_wake()
        self.doorbell.notify()
        if self._num_asleep[_BACKGROUND]:  # left out while there are waiters
            self.doorbell.wake(_BACKGROUND)

    def add_waiter(self) -> None:
        """Let waits that are not eager sleep on when notified; may be nested."""
        self._count(1)

    def remove_waiter(self) -> None:
        """Wake them again from now on, and now if something was not read."""
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

    def _spin(self) -> bool:
        words, seen = self._words, self._seen
        for _ in repeat(None, CONTENTION.num_looks(self._num_looks)):
            if words[_VALUE] != seen:
                return True
            if not CONTENTION.pause():
                break
        return False

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
        """Count waiters, or who sleeps, and store who is to be woken."""
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
