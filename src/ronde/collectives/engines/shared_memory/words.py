"""The words of shared memory by which ranks tell each other how far they are.

Note [Memory order]
    A rank writes data, then a word that says so; another sees the word, then reads the
    data. Each word has one writer and lies in eight aligned bytes, which a memoryview
    loads and stores by a single instruction, so no word is ever seen half.

    The data must not be seen later than the word. x86 keeps the order of stores and
    the order of loads (Intel SDM vol. 3, 8.2.2), except for non-temporal stores, after
    which libc's copies and torch's kernels put a fence of their own. Elsewhere
    ``fence()`` stands before the store of a word and after the load that saw it: it
    frees and takes a lock, and an ARMv8 release is never passed by a later acquire,
    nor what comes before the one by what comes after the other. The interpreter runs
    the statements of one thread in order, and kernels' own worker threads are joined
    before the kernel returns.

    Sleeping needs one thing more, which no processor gives for nothing: that a store
    is seen before a later load is done. The sleeper stores its flag, then looks at the
    word again; the writer stores the word, then looks at the flag. Were each load to
    pass the store before it, the sleeper would miss the word and the writer the flag.
    The fence between them, on either side, rules that out (a locked instruction on
    x86), and from there on the kernel compares the word before it puts anyone to sleep.
"""

import platform
import threading
from dataclasses import dataclass

from ronde.collectives.engines.shared_memory.futex import wake_all
from ronde.collectives.engines.shared_memory.segment import Segment

IS_WEAKLY_ORDERED = platform.machine() not in ("x86_64", "AMD64", "i686")
_LINE = 8
"""Words in a cache line."""
TEXT_BYTES = 256


@dataclass(frozen=True, slots=True)
class Places:
    """Where each word of a rank's header is, in words of eight bytes.

    Attributes:
        size: Number of ranks.
    """

    size: int

    progress = 0
    """How many meetings this rank has come to."""
    bell = _LINE
    """Others change it to have this rank look."""
    is_closed = 2 * _LINE
    signatures = 3 * _LINE
    """Two words, used in turn: what the rank was called for."""
    locations = 3 * _LINE + 2
    """Two words, used in turn: where the rank's tensor is."""
    sleepers = 4 * _LINE
    """A byte for each rank: it sleeps until a word here changes."""

    @property
    def sent(self) -> int:
        """A word for each rank: pieces of messages written for it."""
        return self.sleepers + _in_lines(-(-self.size // 8))

    @property
    def taken(self) -> int:
        """A word for each rank: pieces of its messages that were read."""
        return self.sent + _in_lines(self.size)

    @property
    def text(self) -> int:
        """Room for ``TEXT_BYTES``."""
        return self.taken + _in_lines(self.size)

    @property
    def num_bytes(self) -> int:
        """The whole header, in pages."""
        return -(-(self.text * 8 + TEXT_BYTES) // 4096) * 4096


def _in_lines(num_words: int) -> int:
    return -(-num_words // _LINE) * _LINE


_lock = threading.local()


def fence() -> None:
    """Order all loads and stores before it before all after it; see Note."""
    try:
        lock: threading.Lock = _lock.held
    except AttributeError:
        _lock.held = lock = threading.Lock()
        lock.acquire()
    lock.release()
    lock.acquire()


class Header:
    """The words of one rank, as this process sees them."""

    __slots__ = (
        "_acquire",
        "_lock",
        "_num_asleep",
        "_release",
        "_sleeper_words",
        "_sleepers",
        "address",
        "bytes",
        "places",
        "words",
    )

    def __init__(self, segment: Segment, places: Places) -> None:
        self.address = segment.address
        self.places = places
        self.bytes = segment.view[: places.num_bytes]
        self.words = self.bytes.cast("Q")
        self._sleepers = places.sleepers
        self._sleeper_words = tuple(
            range(places.sleepers, places.sleepers - (-places.size // 8))
        )
        fencing = threading.Lock()
        self._release, self._acquire = fencing.release, fencing.acquire
        fencing.acquire()
        self._lock = threading.Lock()
        self._num_asleep = 0

    def publish(self, place: int, value: int) -> None:
        """Store a word of this rank's own after all that was stored before; wake.

        One thread at a time.
        """
        if IS_WEAKLY_ORDERED:
            fence()
        words = self.words
        words[place] = value
        self._release()  # fence(), in less time
        self._acquire()
        for index in self._sleeper_words:
            if words[index]:
                wake_all(self.address + 8 * place)
                return

    def fall_asleep(self, rank: int) -> None:
        """Have ``publish`` wake ``rank``, this process; several threads may."""
        with self._lock:
            self._num_asleep += 1
            self.bytes[8 * self._sleepers + rank] = 1
        fence()

    def wake_up(self, rank: int) -> None:
        """Take one ``fall_asleep`` back."""
        with self._lock:
            self._num_asleep -= 1
            self.bytes[8 * self._sleepers + rank] = self._num_asleep > 0

    def ring(self) -> None:
        """Have the rank look at what it can do.

        Several may ring at once, and then one change may hide another: whoever waits
        rings again as long as it does.
        """
        bell = self.places.bell
        self.words[bell] = (self.words[bell] + 1) & 0xFFFFFFFF
        wake_all(self.address + 8 * bell)

    def write_text(self, text: str) -> None:
        """Store a sentence, cut where it does not fit."""
        data = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        start = 8 * self.places.text
        self.bytes[start : start + TEXT_BYTES] = data

    def read_text(self) -> str:
        """Return what ``write_text`` stored."""
        start = 8 * self.places.text
        data = bytes(self.bytes[start : start + TEXT_BYTES])
        return data.rstrip(b"\0").decode(errors="replace")
