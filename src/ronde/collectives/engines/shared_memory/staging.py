"""Where tensors lie that all ranks can read: slots for copies, and allocated memory."""

import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ronde.collectives.engines.shared_memory.segment import Segment
from ronde.collectives.recent import Recent

_SLOT_BYTES = 256 << 10
"""Two ranks' slots and their tensors' pieces fit a core's second-level cache."""
_CROWDED_SLOT_BYTES = 4 << 20
"""Where ranks share cores a meeting takes so long that there should be few."""
_PART_BYTES = 32 << 10
"""Of each slot for each rank, at least: smaller copies are slow ones."""
_MAX_VIEWS = 8192
_MAX_PIECES = 4096
"""Tensors that are kept: each takes 0.6 KiB, whatever it shows."""
_OFFSET_BITS = 44
Pieces = tuple[Tensor, ...]
"""Corresponding pieces of all ranks' tensors."""


def slot_bytes(size: int, *, is_crowded: bool) -> int:
    """Return how large the slots of ``size`` ranks should be."""
    largest = _CROWDED_SLOT_BYTES if is_crowded else _SLOT_BYTES
    return max(largest, size * _PART_BYTES)


class StagingSlots:
    """Two slots on each rank, taken in turn.

    Note [Two slots]
        A rank may read the others' slots from the first meeting after a slot was taken
        up to the next taking, and it writes its own slot again only when it has taken
        the other one and has been at a meeting since. At that meeting all ranks have
        come past their reading. So two slots are enough, whatever follows whatever.
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
        """Begin anew, after a meeting that all reading came before."""
        self._taken = 1

    def views(
        self, slot: int, dtype: torch.dtype, numel: int, offset: int = 0
    ) -> list[Tensor]:
        """Return a part of a slot on every rank.

        Args:
            slot: From ``take()``.
            dtype: Of the views.
            numel: Elements of each.
            offset: Bytes into the slot, a multiple of the element's.
        """
        key = (slot, dtype, numel, offset)
        views = self._views.get(key)
        if views is None:
            if len(self._views) * len(self._tensors) >= _MAX_VIEWS:
                self._views.clear()
            first = self._start + slot * self.slot_bytes + offset
            num_bytes = numel * dtype.itemsize
            # They outlive the call, and what that was made in.
            with torch.inference_mode(mode=False):
                views = self._views[key] = [
                    tensor[first : first + num_bytes].view(dtype)
                    for tensor in self._tensors
                ]
        return views


class Region:
    """What all ranks allocated in one call.

    Attributes:
        number: Counts the calls, equal on all ranks.
        start: Where this rank's part begins in this process.
        num_bytes: Size of each rank's part.
    """

    def __init__(self, number: int, segments: Sequence[Segment], rank: int) -> None:
        self.number = number
        self.start = segments[rank].address
        self.num_bytes = segments[rank].num_bytes
        self._tensors = [segment.tensor for segment in segments]

    def view(self, rank: int, offset: int, dtype: torch.dtype, numel: int) -> Tensor:
        """Return a part of what a rank allocated.

        Args:
            rank: The rank.
            offset: Bytes from the start, a multiple of the dtype's.
            dtype: Of the view.
            numel: Its number of elements.
        """
        end = offset + numel * dtype.itemsize
        with torch.inference_mode(mode=False):
            return self._tensors[rank][offset:end].view(dtype)


class SymmetricHeap:
    """The regions that are in use.

    Attributes:
        plans: For a call and the locations of all ranks' tensors, the pieces of them
            that a reduction takes one after the other. A rank may forget any of them,
            whatever the others do: to make it again costs a hundredth of its use.
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
        self._regions.append(Region(self._num_regions, segments, rank))
        buffer = memoryview(segments[rank].mapping)
        weakref.finalize(buffer, self._gone.append, self._num_regions)
        with torch.inference_mode(mode=False):
            return torch.frombuffer(buffer, dtype=torch.uint8)

    def locate(self, tensor: Tensor) -> int:
        """Return a number for where a flat tensor lies; 0 outside every region."""
        if self._gone:
            self._forget()
        address = tensor.data_ptr()
        for region in self._regions:
            offset = address - region.start
            if 0 <= offset < region.num_bytes:
                return region.number << _OFFSET_BITS | offset
        return 0

    def region(self, location: int) -> Region:
        """Return the region that ``locate`` found, on whatever rank."""
        number = location >> _OFFSET_BITS
        for region in self._regions:
            if region.number == number:
                return region
        raise LookupError(f"region must be in use, got number {number}")

    def _forget(self) -> None:
        while self._gone:
            number = self._gone.popleft()
            self._regions = [each for each in self._regions if each.number != number]
            # A plan has locations in one region, the last word of it as good as any.
            for key in [k for k in self.plans if k[-1] >> _OFFSET_BITS == number]:
                self.plans.remove(key)


def offset_of(location: int) -> int:
    """Return the bytes into its region of what ``SymmetricHeap.locate`` found."""
    return location & ((1 << _OFFSET_BITS) - 1)


def is_same_region(locations: Sequence[int]) -> bool:
    """Say whether all ranks' tensors lie in one region."""
    numbers = {location >> _OFFSET_BITS for location in locations}
    return len(numbers) == 1 and 0 not in numbers
