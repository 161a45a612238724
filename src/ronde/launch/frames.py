"""Frames: how controller and agent cut a stream of bytes into messages.

A frame is a 4-byte length (big endian, of what follows), a kind byte and a body. The
length is checked before anything of that size is allocated. A control message longer
than one frame is sent as ``PART`` frames and a last ``CONTROL`` frame.
"""

import os
import select
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from ronde.errors import LaunchError

MAX_FRAME_BYTES = 1 << 20  # longest frame, its length field not counted
MAX_CONTROL_BYTES = 16 << 20  # longest control message, all of its parts together
FIRST_CREDIT_BYTES = 16 << 10  # output that may be sent before any credit was granted

_LENGTH = Struct(">I")
_OUTPUT_HEAD = Struct(">IB")
_STORE_HEAD = Struct(">II")


class FrameKind(IntEnum):
    """What a frame's body is."""

    CONTROL = 1  # the end, mostly the whole, of a JSON message
    PART = 2  # the beginning of a JSON message that goes on in the next frame
    OUTPUT = 3  # bytes that a rank wrote
    STORE = 4  # bytes on a rank's connection to the store


class Stream(IntEnum):
    """Which of a rank's two output streams."""

    STDOUT = 1
    STDERR = 2


class Output(NamedTuple):
    """Bytes that one rank wrote to one stream, as it wrote them."""

    rank: int
    stream: Stream
    data: bytes


class Relayed(NamedTuple):
    """Bytes of one connection to the store, in either direction."""

    epoch: int  # of which generation of ranks
    connection: int  # its number, which the agent gives and never gives again
    data: bytes  # empty when the connection is closed


Frame = bytes | Output | Relayed


def encode_control(message: bytes) -> bytes:
    """Return the frames of one control message."""
    if len(message) > MAX_CONTROL_BYTES:
        raise LaunchError(
            f"control message must be at most {MAX_CONTROL_BYTES} bytes, "
            f"got {len(message)}. Make the environment or the arguments smaller."
        )
    room = MAX_FRAME_BYTES - 1
    return b"".join(
        _frame(
            FrameKind.PART if start + room < len(message) else FrameKind.CONTROL,
            message[start : start + room],
        )
        for start in range(0, max(len(message), 1), room)
    )


def encode_output(output: Output) -> bytes:
    """Return the frame of one piece of output; its data must fit one frame."""
    head = _OUTPUT_HEAD.pack(output.rank, output.stream)
    return _frame(FrameKind.OUTPUT, head + output.data)


def encode_relayed(relayed: Relayed) -> bytes:
    """Return the frame of a piece of a connection; its data must fit one frame."""
    head = _STORE_HEAD.pack(relayed.epoch, relayed.connection)
    return _frame(FrameKind.STORE, head + relayed.data)


def _frame(kind: FrameKind, body: bytes) -> bytes:
    length = len(body) + 1
    if length > MAX_FRAME_BYTES:
        raise AssertionError("a frame's body is cut before it comes here")
    return _LENGTH.pack(length) + bytes((kind,)) + body


class FrameDecoder:
    """Turn received bytes, cut anywhere, back into messages.

    Guarantees that no more than one message of ``MAX_CONTROL_BYTES`` is held.
    """

    def __init__(self) -> None:
        self._received = bytearray()
        self._parts = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return what is complete now: control messages as bytes, all else as it is."""
        self._received += data
        complete: list[Frame] = []
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            if not 1 <= length <= MAX_FRAME_BYTES:
                raise LaunchError(
                    f"frame length must be in 1..{MAX_FRAME_BYTES}, got {length}. "
                    "Something other than ronde wrote to the control channel."
                )
            end = start + _LENGTH.size + length
            if len(self._received) < end:
                break
            frame = bytes(memoryview(self._received)[start + _LENGTH.size : end])
            start = end
            message = self._open(frame[0], frame[1:])
            if message is not None:
                complete.append(message)
        del self._received[:start]
        return complete

    def _open(self, kind: int, body: bytes) -> Frame | None:
        if kind == FrameKind.OUTPUT:
            (rank, stream), data = _split(_OUTPUT_HEAD, body, "output")
            if stream not in (1, 2):
                raise LaunchError(f"output stream must be 1 or 2, got {stream}.")
            return Output(rank, Stream(stream), data)
        if kind == FrameKind.STORE:
            (epoch, connection), data = _split(_STORE_HEAD, body, "store")
            return Relayed(epoch, connection, data)
        if kind not in (FrameKind.CONTROL, FrameKind.PART):
            raise LaunchError(
                f"frame kind must be one of {[int(k) for k in FrameKind]}, got {kind}. "
                "Run the same version of ronde on every host."
            )
        if len(self._parts) + len(body) > MAX_CONTROL_BYTES:
            raise LaunchError(
                f"control message must be at most {MAX_CONTROL_BYTES} bytes, got more. "
                "Something other than ronde wrote to the control channel."
            )
        self._parts += body
        if kind == FrameKind.PART:
            return None
        message = bytes(self._parts)
        self._parts.clear()
        return message


def _split(head: Struct, body: bytes, name: str) -> tuple[tuple[int, int], bytes]:
    if len(body) < head.size:
        raise LaunchError(
            f"{name} frame must hold at least {head.size} bytes, got {len(body)}."
        )
    one, other = head.unpack_from(body)
    return (one, other), body[head.size :]


class FrameWriter:
    """Write frames to where nothing waits, keeping what is not taken yet."""

    def __init__(
        self,
        write: Callable[[memoryview], int],
        limit_bytes: int = 2 * MAX_CONTROL_BYTES,
    ) -> None:
        self._write = write
        self._limit_bytes = limit_bytes
        self._waiting: deque[memoryview] = deque()
        self.waiting_bytes = 0  # bytes that have not been taken yet

    def send(self, frames: bytes) -> None:
        """Keep the frames and write what is taken now."""
        if self.waiting_bytes + len(frames) > self._limit_bytes:
            raise LaunchError(
                f"unsent frames must stay under {self._limit_bytes} bytes, "
                f"got {self.waiting_bytes + len(frames)}. The other side is stuck."
            )
        self._waiting.append(memoryview(frames))
        self.waiting_bytes += len(frames)
        self.flush()

    def flush(self) -> None:
        """Write what is taken now, without waiting."""
        while self._waiting:
            head = self._waiting[0]
            taken = self._write(head)
            self.waiting_bytes -= taken
            if taken < len(head):
                self._waiting[0] = head[taken:]
                if not taken:
                    return
            else:
                self._waiting.popleft()


def pipe_writer(fd: int) -> Callable[[memoryview], int]:
    """Return what writes to a descriptor, which is made non-blocking here."""
    os.set_blocking(fd, False)

    def write(data: memoryview) -> int:
        try:
            return os.write(fd, data)
        except BlockingIOError:
            return 0

    return write


def wait_for(
    readable: Sequence[int], writable: Sequence[int], timeout_s: float | None
) -> list[int]:
    """Return the descriptors that are ready; poll, since epoll refuses plain files."""
    poll = select.poll()
    wanted: dict[int, int] = dict.fromkeys(readable, select.POLLIN)
    for fd in writable:
        wanted[fd] = wanted.get(fd, 0) | select.POLLOUT
    for fd, events in wanted.items():
        poll.register(fd, events)
    return [fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]
