"""Memory that all ranks map: control blocks, staging slots, allocated regions.

A segment is an anonymous file (``memfd_create``): none is left in ``/dev/shm``, whose
size, 64 MiB in most containers, is no limit. The other ranks open the file through
``/proc/PID/fd/N``. Then its descriptor is closed; the mappings keep the file alive.
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
"""Sends at most ``MESSAGE_BYTES`` to all ranks and returns every rank's message."""
_RESERVE_BYTES = 64 << 20  # left free for other programs
_MAP_FAILED = c_void_p(-1).value
_MADV_POPULATE_WRITE = 23  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_mmap: Callable[..., int] = _libc.mmap
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, c_ssize_t)
_munmap: Callable[[int, int], int] = _libc.munmap
_libc.munmap.argtypes = (c_void_p, c_size_t)


class NoSharedMemoryError(CollectiveError):
    """The ranks of a host cannot share memory; raised with equal text on all ranks."""


class Segment:
    """The memory of one rank, mapped into this process."""

    __slots__ = ("address", "mapping", "num_bytes", "tensor", "view")

    def __init__(self, descriptor: int, num_bytes: int, *, is_populated: bool) -> None:
        self.num_bytes = num_bytes
        self.mapping = _map(descriptor, num_bytes, is_populated=is_populated)
        self.view = memoryview(self.mapping).cast("B")
        self.address = ctypes.addressof(self.mapping)
        # The tensor outlives the inference mode of this call.
        with torch.inference_mode(mode=False):
            self.tensor: Tensor = torch.frombuffer(self.mapping, dtype=torch.uint8)

    def populate(self) -> None:
        """Map all pages now. Kernels before 5.14 map them when they are touched."""
        _libc.madvise(
            c_void_p(self.address), c_size_t(self.num_bytes), _MADV_POPULATE_WRITE
        )


def _map(
    descriptor: int, num_bytes: int, *, is_populated: bool
) -> "ctypes.Array[ctypes.c_char]":
    """Map a file for the lifetime of the returned array."""
    # ``mmap.mmap`` would keep a descriptor open.
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if is_populated else 0)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address: int = _mmap(None, num_bytes, access, flags, descriptor, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {num_bytes} bytes: {os.strerror(code)}")
    mapping = (ctypes.c_char * num_bytes).from_address(address)
    weakref.finalize(mapping, _munmap, address, num_bytes).atexit = False
    return mapping


class SegmentFile(NamedTuple):
    """The identity of a rank's segment file, which is sent to all ranks as JSON."""

    process: PeerProcess
    descriptor: int
    inode: int
    host: str

    @classmethod
    def decode(cls, text: bytes) -> "SegmentFile":
        process, *file = json.loads(text)
        return cls(PeerProcess(*process), *file)


@contextmanager
def segment_files(
    exchange: ExchangeBytes, rank: int, size: int = 0, num_bytes: int = 0
) -> Generator[list[SegmentFile]]:
    """Create an empty file on each rank and yield all ranks' files; collective.

    If ``num_bytes`` is given, ``size`` files of that length must fit into memory.

    Raises:
        NoSharedMemoryError: The memory is too small.
    """
    descriptor = -1

    def create() -> bytes:
        nonlocal descriptor
        if num_bytes:
            _require_room(size, num_bytes)
        descriptor = os.memfd_create("ronde", os.MFD_CLOEXEC)
        process, inode = PeerProcess.of(os.getpid()), os.fstat(descriptor).st_ino
        file = SegmentFile(process, descriptor, inode, socket.gethostname()[:64])
        return json.dumps(file).encode()

    try:
        texts = _exchange_or_fail(exchange, rank, create)
        yield [SegmentFile.decode(text) for text in texts]
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def share_segments(
    exchange: ExchangeBytes,
    rank: int,
    files: Sequence[SegmentFile],
    num_bytes: int,
    *,
    is_populated: bool,
) -> list[Segment]:
    """Map every rank's file as a zeroed segment; collective.

    Raises:
        NoSharedMemoryError: A rank cannot open another rank's file.
    """
    segments: list[Segment] = []

    def open_all() -> bytes:
        for each, file in enumerate(files):
            # A page is allocated on the NUMA node that touches it first.
            is_first = is_populated and each == rank
            segments.append(_open(each, file, num_bytes, is_populated=is_first))
        return b""

    _exchange_or_fail(exchange, rank, open_all)
    for each, segment in enumerate(segments if is_populated else ()):
        if each != rank:
            segment.populate()
    return segments


_PROBLEM = b"!"


def _exchange_or_fail(
    exchange: ExchangeBytes, rank: int, make: Callable[[], bytes]
) -> Sequence[bytes]:
    """Return every rank's ``make()`` result; if one fails, all ranks raise."""
    message, problem = b"", ""
    try:
        message = make()
    except OSError as error:
        host = socket.gethostname()
        problem = f"shared memory cannot be used on rank {rank} ({host}): {error}"
    except MemoryError as error:
        problem = str(error)
    if problem:
        message = (_PROBLEM + problem.encode())[:MESSAGE_BYTES]
    replies = exchange(message)
    for reply in replies:
        if reply.startswith(_PROBLEM):
            raise NoSharedMemoryError(reply[1:].decode(errors="replace"))
    return replies


def _require_room(size: int, num_bytes: int) -> None:
    """Raise MemoryError if the ranks' segments exceed the available memory."""
    available = available_memory()
    needed = size * num_bytes
    if needed + _RESERVE_BYTES > available.num_bytes:
        raise MemoryError(
            f"not enough shared memory: {size} ranks * {format_size(num_bytes)} = "
            f"{format_size(needed)} needed, {format_size(available.num_bytes)} "
            f"available ({available.source}). {available.remedy}"
        )


def _open(
    rank: int, file: SegmentFile, num_bytes: int, *, is_populated: bool
) -> Segment:
    pid = file.process.pid
    path = f"/proc/{pid}/fd/{file.descriptor}"
    out_of_reach = OSError(
        f"process {pid} of rank {rank} on {file.host} is out of reach: it runs on "
        "another machine, in another container or as another user"
    )
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise out_of_reach from error
    try:
        if os.fstat(descriptor).st_ino != file.inode:
            raise out_of_reach
        os.truncate(descriptor, num_bytes)  # on all ranks; only the first counts
        return Segment(descriptor, num_bytes, is_populated=is_populated)
    finally:
        os.close(descriptor)


def through_store(
    store: Store, rank: int, size: int, timeout_s: float
) -> ExchangeBytes:
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
            # All ranks have read the previous turn, as they are in this one.
            store.delete_key(f"{turn - 1}/{rank}")
        return messages

    return exchange


_LINE = 8  # words of eight bytes in a cache line
_TEXT_BYTES = 256
# Indices of words in a control block: the number of phases that this rank completed; a
# word that others change to wake the rank; the signature of its call, the location of
# its tensor and the summary of its layout (four words), each twice and used in turn; a
# byte for each rank that sleeps until a word here changes.
PROGRESS, BELL, IS_CLOSED = 0, _LINE, 2 * _LINE
_SIGNATURES, _LOCATIONS = 3 * _LINE, 3 * _LINE + 2
_LAYOUTS, _SLEEPERS = 4 * _LINE, 5 * _LINE

_SLOT_BYTES = 1 << 20  # larger than an L2 cache, as fewer phases save more
_CROWDED_SLOT_BYTES = 4 << 20  # phases are slow with more ranks than cores
_PART_BYTES = 32 << 10  # minimum for each rank, as smaller copies are slow
_MAX_VIEWS, _MAX_PIECES = 8192, 4096  # cached tensors, of 0.6 KiB each
_OFFSET_BITS = 44
Pieces = tuple[Tensor, ...]  # corresponding pieces of all ranks' tensors


def _in_lines(num_words: int) -> int:
    return -(-num_words // _LINE) * _LINE


class ControlBlock:
    """The words of one rank in shared memory; see Note [Memory order]."""

    # ``sent`` and ``taken`` are first indices of words that count message pieces, one
    # word per rank: pieces written for that rank, and pieces read from that rank.

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

    def publish(self, index: int, value: int) -> None:
        """Store a word of this rank and wake ranks asleep on it; not thread-safe."""
        if IS_WEAKLY_ORDERED:
            fence()
        words = self.words
        words[index] = value
        self._release()  # as fence(), but faster
        self._acquire()
        for sleepers in self._sleeper_words:
            if words[sleepers]:
                wake_all(self.address + 8 * index)
                return

    def fall_asleep(self, rank: int) -> None:
        """Register ``rank`` as asleep, so that ``publish`` wakes it; thread-safe."""
        with self._lock:
            self._num_asleep += 1
            self.bytes[8 * _SLEEPERS + rank] = 1
        fence()

    def wake_up(self, rank: int) -> None:
        with self._lock:
            self._num_asleep -= 1
            self.bytes[8 * _SLEEPERS + rank] = self._num_asleep > 0

    def ring(self) -> None:
        """Wake the rank's progress thread; one of two concurrent rings may be lost."""
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
    """Two slots for data in each rank's segment, used in turn.

    Note [Two slots]
        A rank reads the others' slots between the first phase after its ``take()`` and
        its next ``take()``. It writes to a slot again only after it has taken the other
        slot and completed a phase. By then all ranks have read the slot.
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
        """Start again with the first slot; all ranks must have read both slots."""
        self._taken = 1

    def views(
        self, slot: int, dtype: torch.dtype, numel: int, offset: int = 0
    ) -> list[Tensor]:
        key = (slot, dtype, numel, offset)
        views = self._views.get(key)
        if views is None:
            if len(self._views) * len(self._tensors) >= _MAX_VIEWS:
                self._views.clear()
            first = self._start + slot * self.slot_bytes + offset
            end = first + numel * dtype.itemsize
            # The views outlive the inference mode of this call.
            with torch.inference_mode(mode=False):
                views = [tensor[first:end].view(dtype) for tensor in self._tensors]
            self._views[key] = views
        return views


class Region(NamedTuple):
    """The memory of one collective allocation; ``start`` is this rank's address."""

    number: int
    start: int
    num_bytes: int
    tensors: list[Tensor]


class SymmetricHeap:
    """The regions of memory that are allocated and in use."""

    # ``plans`` caches the pieces that a reduction combines one after the other, by call
    # and locations of all ranks' tensors. Each rank may drop any plan.

    def __init__(self) -> None:
        self.plans: dict[tuple[int, ...], list[Pieces]] = {}
        self._regions: list[Region] = []
        self._num_regions = 0
        # A finalizer may run at any point in a thread, so it only appends here.
        self._gone: deque[int] = deque()

    def add(self, segments: Sequence[Segment], rank: int) -> Tensor:
        """Add a region; return this rank's bytes, views of which keep it alive."""
        # Views made here use another buffer and do not keep the region alive.
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
        """Return the location of a flat tensor as a number; 0 outside all regions."""
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
        """Return a rank's tensor at ``start`` bytes after a location."""
        number = location >> _OFFSET_BITS
        first = (location & ((1 << _OFFSET_BITS) - 1)) + start
        for region in self._regions:
            if region.number == number:
                with torch.inference_mode(mode=False):
                    data = region.tensors[rank][first : first + numel * dtype.itemsize]
                    return data.view(dtype)
        raise LookupError(f"shared memory region {number} is not in use")

    def views(self, locations: Sequence[int], like: Tensor) -> list[Tensor]:
        return [
            self.view(rank, location, like.dtype, like.numel())
            for rank, location in enumerate(locations)
        ]

    def cache(self, key: tuple[int, ...], plan: list[Pieces]) -> None:
        """Cache a plan; first drop all cached plans if there are too many."""
        num_kept = sum(map(len, self.plans.values()))
        if (num_kept + len(plan)) * len(plan[0] if plan else ()) > _MAX_PIECES:
            self.plans.clear()
        self.plans[key] = plan

    def _forget(self) -> None:
        while self._gone:
            number = self._gone.popleft()
            self._regions = [each for each in self._regions if each.number != number]
            # All locations of a plan are in one region.
            for key in [k for k in self.plans if k[-1] >> _OFFSET_BITS == number]:
                del self.plans[key]


def is_same_region(locations: Sequence[int]) -> bool:
    numbers = {location >> _OFFSET_BITS for location in locations}
    return len(numbers) == 1 and 0 not in numbers


class Call(NamedTuple):
    """The properties of a call that must be equal on all ranks, as text and digest."""

    text: str
    signature: int  # a digest of the text

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(
        cls,
        name: str,
        dtype: torch.dtype | None = None,
        numel: int = 0,
        details: str = "",
    ) -> "Call":
        text = f"{name} of {numel} elements of {dtype}{details}" if dtype else name
        digest = hashlib.sha256(text.encode()).digest()
        return cls(text, int.from_bytes(digest[:8], "little"))


class SharedState:
    """The shared memory of all ranks, in which they publish their calls."""

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
        """Write this rank's call, which the next phase publishes; return its turn."""
        # The turn, an argument of the methods below, is 0 or 1: see Note [Two slots].
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
        """Complete a phase; return all tensors' locations, or raise if calls differ."""
        turn = self.announce(call.signature, location)
        yield
        if not self.is_agreed(turn, call.signature):
            raise (yield from self.mismatch(call))
        return self.locations(turn)

    def mismatch(self, call: Call) -> Generator[None, None, CollectiveError]:
        """Exchange texts of differing calls; return an error, equal on all ranks."""
        self._blocks[self.rank].write_text(call.text)
        yield
        # Only some of the calls have taken a slot.
        self.staging.reset()
        got = by_ranks([block.read_text() for block in self._blocks])
        return CollectiveError(
            f"calls must be equal on all ranks, got {got}. Make the same calls in the "
            "same order on all ranks."
        )
