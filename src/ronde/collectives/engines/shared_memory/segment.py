"""Memory that several processes of one machine map.

A segment is an anonymous file (``memfd_create``): nothing can be left in ``/dev/shm``,
whose size, 64 MiB in most containers, does not limit it either. The other ranks open it
through ``/proc/PID/fd/N``; then its descriptor is closed, and the mappings keep it.
"""

import ctypes
import json
import mmap
import os
import socket
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from ctypes import c_int, c_size_t, c_ssize_t, c_void_p
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
_MAP_FAILED = c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap: Callable[..., int] = _libc.mmap
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, c_ssize_t)
_munmap: Callable[[int, int], int] = _libc.munmap
_libc.munmap.argtypes = (c_void_p, c_size_t)


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


class _Offer(NamedTuple):
    """What a rank sends the others of its segment, as JSON."""

    pid: int
    descriptor: int
    inode: int
    host: str


def share_segments(
    exchange: ExchangeBytes, rank: int, num_bytes: int, *, is_populated: bool
) -> list[Segment]:
    """Make a zeroed segment on each rank and map everybody's; collective.

    Raises:
        CollectiveError: The memory is not there, or not every rank can open the others'
            segments; in the same words on every rank.
    """
    host = socket.gethostname()[:64]
    descriptor = -1
    offers: list[_Offer] = []
    segments: list[Segment] = []
    try:
        with _agreed(exchange, rank):
            descriptor = os.memfd_create("ronde", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, num_bytes)
        with _agreed(exchange, rank):
            inode = os.fstat(descriptor).st_ino
            offer = json.dumps(_Offer(os.getpid(), descriptor, inode, host))
            offers = [_Offer(*json.loads(text)) for text in exchange(offer.encode())]
            if is_populated:
                _require_room(len(offers), num_bytes)
        with _agreed(exchange, rank):
            # One's own first: pages belong to the node of who touches them first.
            segments = [Segment(descriptor, num_bytes, is_populated=is_populated)]
        with _agreed(exchange, rank):
            own = segments.pop()
            for each, offer in enumerate(offers):
                segments.append(
                    own
                    if each == rank
                    else _open(each, offer, num_bytes, is_populated=is_populated)
                )
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return segments


@contextmanager
def _agreed(exchange: ExchangeBytes, rank: int) -> Generator[None]:
    """Refuse on every rank what fails on any."""
    problem = ""
    try:
        yield
    except OSError as error:
        host = socket.gethostname()
        problem = f"shared memory cannot be used on rank {rank} ({host}): {error}"
    except MemoryError as error:
        problem = str(error)
    for reply in exchange(problem.encode()[:MESSAGE_BYTES]):
        if reply:
            raise CollectiveError(reply.decode(errors="replace"))


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


def _open(rank: int, offer: _Offer, num_bytes: int, *, is_populated: bool) -> Segment:
    path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
    out_of_reach = OSError(
        f"rank {rank} on {offer.host} has no process {offer.pid} that this may look "
        "into, since it runs on another machine, in another container or as another "
        "user"
    )
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise out_of_reach from error
    try:
        if os.fstat(descriptor).st_ino != offer.inode:
            raise out_of_reach
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
        length = len(message).to_bytes(8, "little")
        packed = bytearray(length + message.ljust(MESSAGE_BYTES))
        own = torch.frombuffer(packed, dtype=torch.int64)
        gathered = engine.gather_numbers(own, "connecting")
        texts = [each.numpy().tobytes() for each in gathered]
        return [text[8 : 8 + int.from_bytes(text[:8], "little")] for text in texts]

    return exchange
