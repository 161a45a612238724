"""What all ranks see of each other: control blocks, staging slots, allocated memory.

A segment is an anonymous file (``memfd_create``): nothing can be left in ``/dev/shm``,
whose size, 64 MiB in most containers, does not limit it either. The other ranks open it
through ``/proc/PID/fd/N``; then its descriptor is closed, and the mappings keep it.
"""

import ctypes
import functools
import hashlib
import json
import mmap
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from ctypes import c_int, c_size_t, c_ssize_t, c_void_p
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import Store

from ronde.collectives.engine import MESSAGE_BYTES
from ronde.collectives.engines.shared_memory.waiting import (
    IS_WEAKLY_ORDERED,
    PeerProcess,
    fence,
    wake_all,
)
from ronde.collectives.shapes import LayoutSummary, by_ranks
from ronde.collectives.store import get_all
from ronde.errors import CollectiveError
from ronde.memory import available_memory
from ronde.units import format_size

ExchangeBytes = Callable[[bytes], Sequence[bytes]]
"""Sends all ranks some bytes, at most ``MESSAGE_BYTES``, and returns everybody's."""
_RESERVE_BYTES = 64 << 20  # left to the rest of the machine
_MAP_FAILED = c_void_p(-1).value
_MADV_POPULATE_WRITE = 23  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_mmap: Callable[..., int] = _libc.mmap
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, c_ssize_t)
_munmap: Callable[[int, int], int] = _libc.munmap
_libc.munmap.argtypes = (c_void_p, c_size_t)


class NoSharedMemoryError(CollectiveError):
    """The ranks of a host cannot share memory, in the same words on all of them."""


class Segment:
    """One rank's memory, as mapped into this process."""

    __slots__ = ("address", "mapping", "num_bytes", "tensor", "view")

    def __init__(self, descriptor: int, num_bytes: int, *, is_populated: bool) -> None:
        self.num_bytes = num_bytes
        self.mapping = _map(descriptor, num_bytes, is_populated=is_populated)
        self.view = memoryview(self.mapping).cast("B")
        self.address = ctypes.addressof(self.mapping)
        # It outlives the call, and what that was made in.
        with torch.inference_mode(mode=False):
            self.tensor: Tensor = torch.frombuffer(self.mapping, dtype=torch.uint8)

    def populate(self) -> None:
        """Map pages now; an older kernel maps them when they are touched."""
        _libc.madvise(
            c_void_p(self.address), c_size_t(self.num_bytes), _MADV_POPULATE_WRITE
        )


def _map(
    descriptor: int, num_bytes: int, *, is_populated: bool
) -> "ctypes.Array[ctypes.c_char]":
    """Map a file until what is returned is gone; ``mmap.mmap`` keeps a descriptor."""
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if is_populated else 0)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address: int = _mmap(None, num_bytes, access, flags, descriptor, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {num_bytes} bytes: {os.strerror(code)}")
    mapping = (ctypes.c_char * num_bytes).from_address(address)
    weakref.finalize(mapping, _munmap, address, num_bytes).atexit = False
    return mapping


class Offer(NamedTuple):
    """A rank's file for a segment, and who opens it; sent to the others as JSON."""

    process: PeerProcess
    descriptor: int
    inode: int
    host: str

    @classmethod
    def decode(cls, text: bytes) -> "Offer":
        process, *file = json.loads(text)
        return cls(PeerProcess(*process), *file)


@contextmanager
def offered(
    exchange: ExchangeBytes, rank: int, size: int = 0, num_bytes: int = 0
) -> Generator[list[Offer]]:
    """Make an empty file on each rank, and return everybody's; collective.

    Where they are to be populated, ``size`` files of ``num_bytes`` must fit.

    Raises:
        NoSharedMemoryError: The memory is not there.
    """
    descriptor = -1
    try:
        with _agreed(exchange, rank) as exchanged:
            if num_bytes:
                _require_room(size, num_bytes)
            descriptor = os.memfd_create("ronde", os.MFD_CLOEXEC)
            process, inode = PeerProcess.of(os.getpid()), os.fstat(descriptor).st_ino
            host = socket.gethostname()[:64]
            offer = Offer(process, descriptor, inode, host)
            exchanged.own = json.dumps(offer).encode()
        yield [Offer.decode(text) for text in exchanged.replies]
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def share_segments(
    exchange: ExchangeBytes,
    rank: int,
    offers: Sequence[Offer],
    num_bytes: int,
    *,
    is_populated: bool,
) -> list[Segment]:
    """Make everybody's file a zeroed segment, and map it; collective.

    Raises:
        NoSharedMemoryError: Not every rank can open the others' files.
    """
    segments: list[Segment] = []
    with _agreed(exchange, rank):
        for each, offer in enumerate(offers):
            # One's own first: pages belong to the node of who touches them first.
            is_first = is_populated and each == rank
            segments.append(_open(each, offer, num_bytes, is_populated=is_first))
    for each, segment in enumerate(segments if is_populated else ()):
        if each != rank:
            segment.populate()
    return segments


@dataclass(slots=True)
class _Exchanged:
    own: bytes = b""
    replies: Sequence[bytes] = ()  # of all ranks, once all have agreed


_PROBLEM = b"!"


@contextmanager
def _agreed(exchange: ExchangeBytes, rank: int) -> Generator[_Exchanged]:
    """Refuse on every rank what fails on any; else exchange what the block gives."""
    exchanged, problem = _Exchanged(), ""
    try:
        yield exchanged
    except OSError as error:
        host = socket.gethostname()
        problem = f"shared memory cannot be used on rank {rank} ({host}): {error}"
    except MemoryError as error:
        problem = str(error)
    message = exchanged.own
    if problem:
        message = (_PROBLEM + problem.encode())[:MESSAGE_BYTES]
    exchanged.replies = exchange(message)
    for reply in exchanged.replies:
        if reply.startswith(_PROBLEM):
            raise NoSharedMemoryError(reply[1:].decode(errors="replace"))


def _require_room(size: int, num_bytes: int) -> None:
    """Raise MemoryError where they do not fit: the kernel would kill their user."""
    available = available_memory()
    needed = size * num_bytes
    if needed + _RESERVE_BYTES > available.num_bytes:
        raise MemoryError(
            f"shared memory must fit: {size} ranks * {format_size(num_bytes)} = "
            f"{format_size(needed)}, got {format_size(available.num_bytes)} available "
            f"({available.source}). {available.remedy}"
        )


def _open(rank: int, offer: Offer, num_bytes: int, *, is_populated: bool) -> Segment:
    pid = offer.process.pid
    path = f"/proc/{pid}/fd/{offer.descriptor}"
    out_of_reach = OSError(
        f"rank {rank} on {offer.host} has no process {pid} that this may look into, "
        "since it runs on another machine, in another container or as another "
        "user"
    )
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise out_of_reach from error
    try:
        if os.fstat(descriptor).st_ino != offer.inode:
            raise out_of_reach
        os.truncate(descriptor, num_bytes)  # whoever comes first
        return Segment(descriptor, num_bytes, is_populated=is_populated)
    finally:
        os.close(descriptor)


def through_store(
    store: Store, rank: int, size: int, timeout_s: float
) -> ExchangeBytes:
    """Return an exchange by way of a store, for ranks that have nothing else yet."""
    limit = timedelta(seconds=timeout_s)
    turn = 0

    def exchange(message: bytes) -> list[bytes]:
        nonlocal turn
        turn += 1
        keys = [f"{turn}/{other}" for other in range(size)]
        store.set(keys[rank], message.hex())
        texts = get_all(store, keys, limit)
        messages = [bytes.fromhex(text.decode()) for text in texts]
        if turn > 1:
            # Whoever has come to this turn has read all of the one before.
            store.delete_key(f"{turn - 1}/{rank}")
        return messages

    return exchange


_LINE = 8  # words of eight bytes in a cache line
_TEXT_BYTES = 256
# Where a control block has: how many phases this rank has completed; what others change
# to wake it; twice, used in turn, the call that it makes, where its tensor is, and a
# summary of its layout in four words; a byte for each rank that sleeps until a word
# here changes.
PROGRESS, BELL, IS_CLOSED = 0, _LINE, 2 * _LINE
_SIGNATURES, _LOCATIONS = 3 * _LINE, 3 * _LINE + 2
_LAYOUTS, _SLEEPERS = 4 * _LINE, 5 * _LINE

_SLOT_BYTES = 1 << 20  # fewer phases save more than a second-level cache does
_CROWDED_SLOT_BYTES = 4 << 20  # a phase takes long there: few of them
_PART_BYTES = 32 << 10  # of each slot for each rank, at least: smaller copies are slow
_MAX_VIEWS, _MAX_PIECES = 8192, 4096  # tensors that are kept, of 0.6 KiB each
_OFFSET_BITS = 44
Pieces = tuple[Tensor, ...]  # corresponding pieces of all ranks' tensors


def _in_lines(num_words: int) -> int:
    return -(-num_words // _LINE) * _LINE


class ControlBlock:
    """The words of one rank, as this process sees them; see Note [Memory order]."""

    # ``sent`` and ``taken`` are the first of a word for each rank: pieces of messages
    # written for it, and pieces of its that were read.

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
        num_words = _SLEEPERS + _in_lines(-(-size // 8)) + 2 * _in_lines(size)
        return -(-(num_words * 8 + _TEXT_BYTES) // 4096) * 4096

    def publish(self, place: int, value: int) -> None:
        """Store an own word after all stored before, and wake; one thread at a time."""
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
        """Have ``publish`` wake ``rank``, this process; any thread may."""
        with self._lock:
            self._num_asleep += 1
            self.bytes[8 * _SLEEPERS + rank] = 1
        fence()

    def wake_up(self, rank: int) -> None:
        with self._lock:
            self._num_asleep -= 1
            self.bytes[8 * _SLEEPERS + rank] = self._num_asleep > 0

    def ring(self) -> None:
        """Wake the rank's progress thread; of several at once one may be in vain."""
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
        A rank reads the others' slots between the first phase after it took a slot and
        the next taking. It writes its own slot again only when it has taken the other
        one and completed a phase since: by then all ranks are past their reading.
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
        self._taken = 1 - self._taken
        return self._taken

    def reset(self) -> None:
        """Begin anew, after a phase that all reading came before."""
        self._taken = 1

    def views(
        self, slot: int, dtype: torch.dtype, numel: int, offset: int = 0
    ) -> list[Tensor]:
        """Return a part of a slot of every rank, ``offset`` bytes into it."""
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
    """What all ranks allocated in one call; here it begins at address ``start``."""

    number: int
    start: int
    num_bytes: int
    tensors: list[Tensor]


class SymmetricHeap:
    """The regions that are in use."""

    # ``plans`` has for a call and the locations of all ranks' tensors the pieces of
    # them that a reduction takes one after the other. Each rank may forget any of them.

    def __init__(self) -> None:
        self.plans: dict[tuple[int, ...], list[Pieces]] = {}
        self._regions: list[Region] = []
        self._num_regions = 0
        # A finalizer may run in the middle of anything: it only leaves a note.
        self._gone: deque[int] = deque()

    def add(self, segments: Sequence[Segment], rank: int) -> Tensor:
        """Return this rank's bytes of a region, which lives as long as views of them.

        Views of ours do not count: they look through another buffer.
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

    def keep(self, key: tuple[int, ...], plan: list[Pieces]) -> None:
        """Keep a plan; where they are many, forget all others."""
        num_kept = sum(map(len, self.plans.values()))
        if (num_kept + len(plan)) * len(plan[0] if plan else ()) > _MAX_PIECES:
            self.plans.clear()
        self.plans[key] = plan

    def _forget(self) -> None:
        while self._gone:
            number = self._gone.popleft()
            self._regions = [each for each in self._regions if each.number != number]
            # A plan has locations in one region, the last word of it as good as any.
            for key in [k for k in self.plans if k[-1] >> _OFFSET_BITS == number]:
                del self.plans[key]


def is_same_region(locations: Sequence[int]) -> bool:
    numbers = {location >> _OFFSET_BITS for location in locations}
    return len(numbers) == 1 and 0 not in numbers


class Call(NamedTuple):
    """What must be equal on all ranks; the signature is the same in every process."""

    text: str
    signature: int

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(
        cls, name: str, dtype: torch.dtype | None = None, numel: int = 0, why: str = ""
    ) -> "Call":
        """Describe a call; ``why`` is what else matters: the operation, the root."""
        text = f"{name} of {numel} elements of {dtype}{why}" if dtype else name
        digest = hashlib.sha256(text.encode()).digest()
        return cls(text, int.from_bytes(digest[:8], "little"))


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
        """Publish, with the next phase, this rank's call and where its tensor is."""
        # Return the turn, for the methods below: one of two, see Note [Two slots].
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

    def synchronize(
        self, call: Call, location: int = 0
    ) -> Generator[None, None, list[int]]:
        """Complete a phase of equal calls; return where the ranks' tensors lie."""
        turn = self.announce(call.signature, location)
        yield
        if not self.is_agreed(turn, call.signature):
            raise (yield from self.mismatch(call))
        return self.locations(turn)

    def mismatch(self, call: Call) -> Generator[None, None, CollectiveError]:
        """Exchange the calls that do not fit together; return what all ranks raise."""
        self._blocks[self.rank].write_text(call.text)
        yield
        # One call has taken a slot where another did not.
        self.staging.reset()
        got = by_ranks([block.read_text() for block in self._blocks])
        return CollectiveError(
            f"calls must be equal on all ranks, got {got}. Make the same calls in the "
            "same order everywhere."
        )
