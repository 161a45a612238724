"""What wakes a rank: a word of memory that others change, and how the rank waits.

Note [Rings]
    Every ring stores a value that no ring before it stored: ringers count in steps as
    wide as there are ringers, each from its own number. So whoever has read a value and
    goes to sleep on it is woken by every later ring, even if two come at once and one
    hides the other; an addition, which takes a load and a store, would not do.

    What a ring tells of is stored before the ring, and whoever hears notes the ring's
    value before it looks around. So what was not seen has yet to ring, or has changed
    the value.

Note [Two ears]
    The two halves of the word hold the same, and those who wait for an answer sleep on
    one, those who listen on the other. While somebody attends, rings need not wake the
    listeners: a system call less for the ringer, and here a thread less that asks for
    the interpreter's lock.
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

NUM_BYTES = 128
"""The bell and who sleeps, each in a cache line of its own."""
_BELL = 0
_ASLEEP = 8
_BOTH_HALVES = (1 << 32) + 1
_HALF = (1 << 32) - 1
_EAGER, _LISTENING = 1, 2
_LISTENERS_AT = 4
_FOR_EVER_S = 3600.0

NEAR = 200
"""How often one who waits for an answer looks for it, and lets others run, before it
sleeps; they may need this very core. Looking without pause would gain 0.3 us at best,
and costs ten where they do."""
FAR = 0
"""The same where answers come from other hosts, by threads that want this core and this
interpreter."""


class Bell:
    """Rings at one rank, for one process.

    Attributes:
        words: The rank's memory from the bell on, in words of eight bytes.
        address: Where that is in this process.
    """

    __slots__ = ("_next_value", "address", "words")

    def __init__(
        self, words: memoryview, address: int, *, ringer: int, num_ringers: int
    ) -> None:
        """Take a bell.

        Args:
            words: See above; zeros before the first ring.
            address: See above.
            ringer: The number of this process among those that ring here.
            num_ringers: How many there are.
        """
        self.words = words
        self.address = address
        self._next_value = itertools.count(ringer + 1, num_ringers).__next__

    @classmethod
    def of_its_own(cls) -> "Bell":
        """Make one that no other process sees."""
        memory = (ctypes.c_uint64 * (NUM_BYTES // 8))()
        words = memoryview(memory).cast("B").cast("Q")
        return cls(words, ctypes.addressof(memory), ringer=0, num_ringers=1)

    def ring(self) -> None:
        """Tell the rank of what was stored before; any thread may."""
        words = self.words
        if IS_WEAKLY_ORDERED:
            fence()
        words[_BELL] = (self._next_value() & _HALF) * _BOTH_HALVES
        fence()  # the ringer's half of what words.py says of sleeping
        asleep = words[_ASLEEP]
        if asleep:
            self.wake(asleep)

    def has_sleeper(self) -> bool:
        """Say whether a thread of the rank sleeps for an answer."""
        return bool(self.words[_ASLEEP] & _EAGER)

    def wake(self, asleep: int) -> None:
        """Wake those who sleep, of the kinds that are given."""
        if asleep & _EAGER:
            wake_all(self.address)
        if asleep & _LISTENING:
            wake_all(self.address + _LISTENERS_AT)


class _Thread(threading.local):
    """What each thread remembers."""

    wake = 0
    """The last ``wake()`` that made a ``wait`` of it return."""


class Ears:
    """How a rank waits for its own bell: see ``Channel`` for what the calls promise.

    Attributes:
        bell: What others ring; this process too.
    """

    def __init__(self, bell: Bell, num_looks: int) -> None:
        """Listen to a bell.

        Args:
            bell: This rank's.
            num_looks: ``NEAR`` or ``FAR``.
        """
        self.bell = bell
        self._words = bell.words
        self._num_looks = num_looks
        self._heard = 0
        self._last_wake = 0
        self._next_wake = itertools.count(1).__next__
        self._thread = _Thread()
        self._lock = threading.Lock()
        self._num_attending = 0
        self._num_asleep = {_EAGER: 0, _LISTENING: 0}
        self._is_closed = False

    def hear(self) -> None:
        """Take note of all rings so far; to be called before looking around."""
        self._heard = self._words[_BELL]
        if IS_WEAKLY_ORDERED:
            fence()

    def wait(self, timeout_s: float | None, *, is_eager: bool) -> None:
        """Return after a ring that nobody heard yet, or ``wake()``."""
        thread = self._thread
        kind = _EAGER if is_eager else _LISTENING
        if not self._is_due(kind, thread.wake) and not (is_eager and self._look()):
            self._sleep(kind, timeout_s)
        thread.wake = self._last_wake

    def wake(self) -> None:
        """Have every ``wait`` of this process return."""
        self._last_wake = self._next_wake()
        self.bell.ring()
        if self._num_asleep[_LISTENING]:  # whoever attends has it left out
            self.bell.wake(_LISTENING)

    def attend(self) -> None:
        """Let listeners sleep on when it rings."""
        with self._lock:
            self._num_attending += 1
            self._tell()

    def leave(self) -> None:
        """Wake listeners again when it rings, and now if it rang unheard."""
        with self._lock:
            self._num_attending -= 1
            self._tell()
        if not self._num_attending and self._words[_BELL] != self._heard:
            self.bell.ring()

    def close(self) -> None:
        """Have every ``wait`` return, now and from now on."""
        self._is_closed = True
        self.wake()

    def _is_due(self, kind: int, last_wake: int) -> bool:
        if self._last_wake != last_wake or self._is_closed:
            return True
        is_deaf = kind == _LISTENING and self._num_attending
        return self._words[_BELL] != self._heard and not is_deaf

    def _look(self) -> bool:
        """Look again and again for a short while; say whether it rang."""
        words, heard = self._words, self._heard
        for _ in repeat(None, CONTENTION.num_looks(self._num_looks)):
            if words[_BELL] != heard:
                return True
            if not CONTENTION.pause():
                break
        return False

    def _sleep(self, kind: int, timeout_s: float | None) -> None:
        left_s = _FOR_EVER_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + left_s
        address = self.bell.address + (_LISTENERS_AT if kind == _LISTENING else 0)
        self._count_asleep(kind, 1)
        try:
            while left_s > 0:
                value = self._words[_BELL]
                if self._is_due(kind, self._thread.wake):
                    return
                sleep_while(address, value & _HALF, left_s)
                if timeout_s is not None:
                    left_s = deadline - time.monotonic()
        finally:
            self._count_asleep(kind, -1)

    def _count_asleep(self, kind: int, change: int) -> None:
        with self._lock:
            self._num_asleep[kind] += change
            self._tell()

    def _tell(self) -> None:
        """Store who is to be woken; the lock is held."""
        num_asleep = self._num_asleep
        asleep = _EAGER if num_asleep[_EAGER] else 0
        if num_asleep[_LISTENING] and not self._num_attending:
            asleep |= _LISTENING
        self._words[_ASLEEP] = asleep
        fence()
