"""Memory that several processes of one machine map.

A segment is an anonymous file (``memfd_create``): it has no name in ``/dev/shm``, so
nothing can be left there however the processes end, and the size of that file system,
64 MiB in most containers, does not limit it. The other ranks open it through
``/proc/PID/fd/N``; once all have mapped it, its descriptor is closed and only the
mappings keep it alive.
"""

import ctypes
import json
import mmap
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import Store

from ronde.collectives.engine import Engine
from ronde.errors import CollectiveError
from ronde.memory import available_memory
from ronde.units import format_size

ExchangeBytes = Callable[[bytes], Sequence[bytes]]
"""Sends all ranks some bytes, at most ``MESSAGE_BYTES``, and returns everybody's."""
MESSAGE_BYTES = 512
_RESERVE_BYTES = 64 << 20
"""Left to the rest of the machine."""
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_ssize_t,
)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_mmap: Callable[..., int] = _libc.mmap
_munmap: Callable[[int, int], int] = _libc.munmap


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


def _map(
    descriptor: int, num_bytes: int, *, is_populated: bool
) -> "ctypes.Array[ctypes.c_char]":
    """Map a file until nothing refers to what is returned.

    ``mmap.mmap`` would keep a descriptor of its own open all the time.
    """
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if is_populated else 0)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address: int = _mmap(None, num_bytes, access, flags, descriptor, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {num_bytes} bytes: {os.strerror(code)}")
    mapping = (ctypes.c_char * num_bytes).from_address(address)
    weakref.finalize(mapping, _munmap, address, num_bytes).atexit = False
    return mapping


class _Offer(NamedTuple):
    """What a rank sends the others of its segment, as JSON."""

    pid: int
    descriptor: int
    inode: int
    host: str


def pack(message: bytes) -> bytearray:
    """Return a message with its length, as long for every message."""
    return bytearray(len(message).to_bytes(8, "little") + message.ljust(MESSAGE_BYTES))


def unpack(packed: bytes) -> bytes:
    return packed[8 : 8 + int.from_bytes(packed[:8], "little")]


def share_segments(
    exchange: ExchangeBytes, rank: int, num_bytes: int, *, is_populated: bool
) -> list[Segment]:
    """Make a zeroed segment on each rank and map everybody's; collective.

    Raises:
        CollectiveError: The memory is not there, or not every rank can open the others'
            segments; in the same words on every rank.
    """
    sharing = _Sharing(exchange, rank, num_bytes, is_populated=is_populated)
    try:
        # After each step the ranks exchange how it went.
        for step in (sharing.create, sharing.check, sharing.map_own, sharing.map_all):
            sharing.take(step)
    finally:
        if sharing.descriptor >= 0:
            os.close(sharing.descriptor)
    return sharing.segments


class _Sharing:
    """The steps to segments that everybody has mapped."""

    def __init__(
        self, exchange: ExchangeBytes, rank: int, num_bytes: int, *, is_populated: bool
    ) -> None:
        self._is_populated = is_populated
        self.segments: list[Segment] = []
        self._exchange = exchange
        self._rank = rank
        self._num_bytes = num_bytes
        self.descriptor = -1
        self._offers: list[_Offer] = []

    def take(self, step: Callable[[], None]) -> None:
        """Take a step; refuse on every rank what failed on any."""
        try:
            step()
            problem = ""
        except OSError as error:
            host = socket.gethostname()
            problem = f"shared memory cannot be used on rank {self._rank} ({host}): "
            problem += str(error)
        except MemoryError as error:
            problem = str(error)
        for reply in self._exchange(problem.encode()[:MESSAGE_BYTES]):
            if reply:
                raise CollectiveError(reply.decode(errors="replace"))

    def create(self) -> None:
        self.descriptor = os.memfd_create("ronde", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self._num_bytes)

    def check(self) -> None:
        """Refuse what does not fit.

        The kernel would promise the memory all the same, and kill whoever touches it.
        """
        inode = os.fstat(self.descriptor).st_ino
        host = socket.gethostname()[:64]
        own = _Offer(os.getpid(), self.descriptor, inode, host)
        self._offers = [
            _Offer(*json.loads(text))
            for text in self._exchange(json.dumps(own).encode())
        ]
        available = available_memory()
        size = len(self._offers)
        needed = size * self._num_bytes
        if self._is_populated and needed + _RESERVE_BYTES > available.num_bytes:
            raise MemoryError(
                f"shared memory must fit: {size} ranks * "
                f"{format_size(self._num_bytes)} = {format_size(needed)}, got "
                f"{format_size(available.num_bytes)} available ({available.source}). "
                f"{available.remedy}"
            )

    def map_own(self) -> None:
        """Map one's own first: pages belong to the node of who touches them first."""
        self._own = self._segment(self.descriptor)

    def map_all(self) -> None:
        for rank, offer in enumerate(self._offers):
            is_own = rank == self._rank
            self.segments.append(self._own if is_own else self._open(rank, offer))

    def _open(self, rank: int, offer: _Offer) -> Segment:
        path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
        out_of_reach = OSError(
            f"rank {rank} on {offer.host} has no process {offer.pid} that this may "
            "look into, since it runs on another machine, in another container or as "
            "another user"
        )
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise out_of_reach from error
        try:
            if os.fstat(descriptor).st_ino != offer.inode:
                raise out_of_reach
            return self._segment(descriptor)
        finally:
            os.close(descriptor)

    def _segment(self, descriptor: int) -> Segment:
        return Segment(descriptor, self._num_bytes, is_populated=self._is_populated)


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
        store.wait(keys, limit)
        messages = [bytes.fromhex(text.decode()) for text in store.multi_get(keys)]
        if turn > 1:
            # Whoever has come to this turn has read all of the one before.
            store.delete_key(f"{turn - 1}/{rank}")
        return messages

    return exchange


def among(engine: Engine) -> ExchangeBytes:
    """Return an exchange by way of an engine of the same ranks."""

    def exchange(message: bytes) -> list[bytes]:
        own = torch.frombuffer(pack(message), dtype=torch.int64)
        gathered = engine.gather_numbers(own, "connecting")
        return [unpack(each.numpy().tobytes()) for each in gathered]

    return exchange
