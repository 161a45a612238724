"""What all ranks see of each other: control blocks, staging slots, allocated memory."""

import hashlib
import threading
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ronde.collectives.engines.shared_memory.segment import Segment
from ronde.collectives.engines.shared_memory.waiting import (
    IS_WEAKLY_ORDERED,
    fence,
    wake_all,
)
from ronde.collectives.recent import Recent
from ronde.collectives.shapes import LayoutSummary, by_ranks
from ronde.errors import CollectiveError

_LINE = 8
"""Words of eight bytes in a cache line."""
_TEXT_BYTES = 256
# Where each word of a control block is.
PROGRESS = 0
"""How many phases this rank has completed."""
BELL = _LINE
"""Others change it to wake the rank's progress thread."""
IS_CLOSED = 2 * _LINE
_SIGNATURES = 3 * _LINE
"""Two words, used in turn: the call that the rank makes."""
_LOCATIONS = 3 * _LINE + 2
"""Two words, used in turn: where the rank's tensor is."""
_LAYOUTS = 4 * _LINE
"""Twice four words, used in turn: a summary of the rank's layout."""
_SLEEPERS = 5 * _LINE
"""A byte for each rank: it sleeps until a word here changes."""

_SLOT_BYTES = 256 << 10
"""Two ranks' slots and their tensors' pieces fit a core's second-level cache."""
_CROWDED_SLOT_BYTES = 4 << 20
"""Where ranks share cores a phase takes so long that there should be few."""
_PART_BYTES = 32 << 10
"""Of each slot for each rank, at least: smaller copies are slow."""
_MAX_VIEWS = 8192
_MAX_PIECES = 4096
"""Tensors that are kept: each takes 0.6 KiB, whatever it shows."""
_OFFSET_BITS = 44
Pieces = tuple[Tensor, ...]
"""Corresponding pieces of all ranks' tensors."""


def _in_lines(num_words: int) -> int:
    return -(-num_words // _LINE) * _LINE


class ControlBlock:
    """The words of one rank, as this process sees them; see Note [Memory order].

    ``sent`` and ``taken`` are the first of a word for each rank: pieces of messages
    written for it, and pieces of its messages that were read.
    """

    __slots__ = (
        "_acquire",
        "_lock",
        "_num_asleep",
        "_release",
        "_sleeper_words",
        "_text_at",
        "address",
        "bytes",
        "layouts",
        "sent",
        "taken",
        "words",
    )

    def __init__(self, segment: Segment, size: int) -> None:
        num_sleeper_words = -(-size // 8)
        self.sent = _SLEEPERS + _in_lines(num_sleeper_words)
        self.taken = self.sent + _in_lines(size)
        self._text_at = 8 * (self.taken + _in_lines(size))
        self.address = segment.address
        self.bytes = segment.view[: self.size_bytes(size)]
        self.words = self.bytes.cast("Q")
        self.layouts = self.bytes[8 * _LAYOUTS : 8 * _SLEEPERS].cast("q")
        self._sleeper_words = tuple(range(_SLEEPERS, _SLEEPERS + num_sleeper_words))
        fencing = threading.Lock()
        self._release, self._acquire = fencing.release, fencing.acquire
        fencing.acquire()
        self._lock = threading.Lock()
        self._num_asleep = 0

    @staticmethod
    def size_bytes(size: int) -> int:
        """Return how long the blocks of ``size`` ranks are, in whole pages."""
        num_words = _SLEEPERS + _in_lines(-(-size // 8)) + 2 * _in_lines(size)
        return -(-(num_words * 8 + _TEXT_BYTES) // 4096) * 4096

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
            self.bytes[8 * _SLEEPERS + rank] = 1
        fence()

    def wake_up(self, rank: int) -> None:
        """Take one ``fall_asleep`` back."""
        with self._lock:
            self._num_asleep -= 1
            self.bytes[8 * _SLEEPERS + rank] = self._num_asleep > 0

    def ring(self) -> None:
        """Wake the rank's progress thread.

        Several may ring at once, and then one change may hide another: whoever waits
        rings again as long as it does.
        """
        self.words[BELL] = (self.words[BELL] + 1) & 0xFFFFFFFF
        wake_all(self.address + 8 * BELL)

    def write_text(self, text: str) -> None:
        data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        self.bytes[self._text_at : self._text_at + _TEXT_BYTES] = data

    def read_text(self) -> str:
        data = bytes(self.bytes[self._text_at : self._text_at + _TEXT_BYTES])
        return data.rstrip(b"\0").decode(errors="replace")


def slot_bytes(size: int, *, is_crowded: bool) -> int:
    largest = _CROWDED_SLOT_BYTES if is_crowded else _SLOT_BYTES
    return max(largest, size * _PART_BYTES)


class StagingSlots:
    """Two slots on each rank, taken in turn.

    Note [Two slots]
        A rank may read the others' slots from the first phase after a slot was taken up
        to the next taking, and it writes its own slot again only when it has taken the
        other one and has completed a phase since. By then all ranks are past their
        reading. So two slots are enough, whatever follows whatever.
    """

    def __init__(
        self, segments: Sequence[Segment], start: int, slot_bytes: int
    ) -> None:
        self.slot_bytes = slot_bytes
        self._tensors = [segment.tensor for segment in segments]
        self._start = start
        self._taken = 1
        self._views: dict[tuple[object, ...], list[Tensor]] = {}

    def take(self) -> int:
        """Return the slot that this rank may write now."""
        self._taken = 1 - self._taken
        return self._taken

    def reset(self) -> None:
        """Begin anew, after a phase that all reading came before."""
        self._taken = 1

    def views(
        self, slot: int, dtype: torch.dtype, numel: int, offset: int = 0
    ) -> list[Tensor]:
        """Return a part of a slot on every rank, ``offset`` bytes into it."""
        key = (slot, dtype, numel, offset)
        views = self._views.get(key)
        if views is None:
            if len(self._views) * len(self._tensors) >= _MAX_VIEWS:
                self._views.clear()
            first = self._start + slot * self.slot_bytes + offset
            end = first + numel * dtype.itemsize
            # They outlive the call, and the inference mode that it was made in.
            with torch.inference_mode(mode=False):
                views = [tensor[first:end].view(dtype) for tensor in self._tensors]
            self._views[key] = views
        return views


class Region(NamedTuple):
    """What all ranks allocated in one call; ``number`` counts the calls."""

    number: int
    start: int
    """The address of this rank's part."""
    num_bytes: int
    tensors: list[Tensor]


class SymmetricHeap:
    """The regions that are in use.

    ``plans`` has for a call and the locations of all ranks' tensors the pieces of them
    that a reduction takes one after the other. A rank may forget any of them, whatever
    the others do: to make it again costs a hundredth of its use.
    """

    def __init__(self) -> None:
        self.plans = Recent[tuple[int, ...], list[Pieces]](_MAX_PIECES)
        self._regions: list[Region] = []
        self._num_regions = 0
        # A finalizer may run in the middle of anything: it only leaves a note.
        self._gone: deque[int] = deque()

    def add(self, segments: Sequence[Segment], rank: int) -> Tensor:
        """Take a region in and return this rank's bytes of it.

        The region is given back when nothing is left of what is returned, by whatever
        views. Views of ours do not count: they look through another buffer.
        """
        self._forget()
        self._num_regions += 1
        own, tensors = segments[rank], [segment.tensor for segment in segments]
        self._regions.append(
            Region(self._num_regions, own.address, own.num_bytes, tensors)
        )
        buffer = memoryview(own.mapping)
        weakref.finalize(buffer, self._gone.append, self._num_regions)
        with torch.inference_mode(mode=False):
            return torch.frombuffer(buffer, dtype=torch.uint8)

    def locate(self, tensor: Tensor) -> int:
        """Return a number for where a flat tensor lies; 0 outside every region."""
        if self._gone:
            self._forget()
        if self._regions:
            address = tensor.data_ptr()
            for region in self._regions:
                offset = address - region.start
                if 0 <= offset < region.num_bytes:
                    return region.number << _OFFSET_BITS | offset
        return 0

    def view(
        self, rank: int, location: int, dtype: torch.dtype, numel: int, start: int = 0
    ) -> Tensor:
        """Return a rank's tensor, ``start`` bytes after what ``locate`` found there."""
        number = location >> _OFFSET_BITS
        first = (location & ((1 << _OFFSET_BITS) - 1)) + start
        for region in self._regions:
            if region.number == number:
                with torch.inference_mode(mode=False):
                    data = region.tensors[rank][first : first + numel * dtype.itemsize]
                    return data.view(dtype)
        raise LookupError(f"region must be in use, got number {number}")

    def views(self, locations: Sequence[int], like: Tensor) -> list[Tensor]:
        """Return all ranks' tensors where they lie; ``like`` is one of them."""
        return [
            self.view(rank, location, like.dtype, like.numel())
            for rank, location in enumerate(locations)
        ]

    def _forget(self) -> None:
        while self._gone:
            number = self._gone.popleft()
            self._regions = [each for each in self._regions if each.number != number]
            # A plan has locations in one region, the last word of it as good as any.
            for key in [k for k in self.plans if k[-1] >> _OFFSET_BITS == number]:
                self.plans.remove(key)


def is_same_region(locations: Sequence[int]) -> bool:
    numbers = {location >> _OFFSET_BITS for location in locations}
    return len(numbers) == 1 and 0 not in numbers


@dataclass(frozen=True, slots=True)
class Call:
    """What must be equal on all ranks; ``signature`` is the same in every process."""

    name: str
    dtype: str = ""
    numel: int = 0
    detail: str = ""
    """What else matters: the operation, the root."""
    signature: int = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(str(self).encode()).digest()
        object.__setattr__(self, "signature", int.from_bytes(digest[:8], "little"))

    def __str__(self) -> str:
        of = f" of {self.numel} elements of {self.dtype}" if self.dtype else ""
        return f"{self.name}{of}{self.detail}"


class SharedState:
    """The memory of all ranks, and the turn-taking in it."""

    def __init__(
        self, rank: int, blocks: Sequence[ControlBlock], staging: StagingSlots
    ) -> None:
        self.rank = rank
        self.size = len(blocks)
        self.staging = staging
        self.heap = SymmetricHeap()
        self._blocks = blocks
        self._own = blocks[rank].words
        self._words = [block.words for block in blocks]
        self._layouts = [block.layouts for block in blocks]
        self._turn = 0

    def announce(
        self, signature: int, location: int = 0, layout: LayoutSummary | None = None
    ) -> int:
        """Publish, with the next phase, this rank's call and where its tensor is.

        Returns:
            The turn, for the questions after the phase. Two turns are enough for the
            reason of Note [Two slots].
        """
        turn = self._turn = 1 - self._turn
        own = self._own
        own[_SIGNATURES + turn] = signature
        own[_LOCATIONS + turn] = location
        if layout is not None:
            at = 4 * turn
            words = self._layouts[self.rank]
            words[at], words[at + 1], words[at + 2] = layout
        return turn

    def is_agreed(self, turn: int, signature: int) -> bool:
        """Say whether all ranks make the same call."""
        at = _SIGNATURES + turn
        for words in self._words:  # noqa: SIM110  all() takes longer
            if words[at] != signature:
                return False
        return True

    def locations(self, turn: int) -> list[int]:
        at = _LOCATIONS + turn
        return [words[at] for words in self._words]

    def layouts(self, turn: int) -> list[LayoutSummary]:
        at = 4 * turn
        return [
            LayoutSummary(words[at], words[at + 1], words[at + 2])
            for words in self._layouts
        ]

    def mismatch(self, call: Call) -> Generator[None, None, CollectiveError]:
        """Exchange the calls that do not fit together; return what to raise.

        It is the same on every rank.
        """
        self._blocks[self.rank].write_text(str(call))
        yield
        # One call has taken a slot where another did not.
        self.staging.reset()
        got = by_ranks([block.read_text() for block in self._blocks])
        return CollectiveError(
            f"calls must be equal on all ranks, got {got}. Make the same calls in the "
            "same order everywhere."
        )
