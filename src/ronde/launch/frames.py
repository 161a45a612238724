"""Frames: how controller and agent cut a stream of bytes into messages.

A frame is a 4-byte length (big endian, of what follows), a kind byte and a body. The
length is checked before anything of that size is allocated. A control message longer
than one frame is sent as ``PART`` frames and a last ``CONTROL`` frame.
"""

import os
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from ronde.errors import LaunchError

MAX_FRAME_BYTES = 1 << 20
"""Longest frame, its length field not counted."""

MAX_CONTROL_BYTES = 16 << 20
"""Longest control message, put together from its parts."""

_LENGTH = Struct(">I")
_OUTPUT_HEAD = Struct(">IB")
_STORE_HEAD = Struct(">II")


class FrameKind(IntEnum):
    """What a frame's body is."""

    CONTROL = 1
    """The end, mostly the whole, of a JSON message."""
    PART = 2
    """The beginning of a JSON message that goes on in the next frame."""
    OUTPUT = 3
    """Bytes that a rank wrote."""
    STORE = 4
    """Bytes on a rank's connection to the store."""


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
    """Bytes of one connection to the store, in either direction.

    Attributes:
        epoch: Of which generation of ranks.
        connection: Its number, which the agent gives and never gives again.
        data: What was sent; empty when the connection is closed.
    """

    epoch: int
    connection: int
    data: bytes


def encode_control(message: bytes) -> bytes:
    """Return the frames of one control message.

    Raises:
        LaunchError: The message is longer than ``MAX_CONTROL_BYTES``.
    """
    if len(message) > MAX_CONTROL_BYTES:
        raise LaunchError(
            f"control message must be at most {MAX_CONTROL_BYTES} bytes, "
            f"got {len(message)}. Make the environment or the arguments smaller."
        )
    room = MAX_FRAME_BYTES - 1
    cuts = range(0, max(len(message), 1), room)
    return b"".join(
        _frame(
            FrameKind.PART if start + room < len(message) else FrameKind.CONTROL,
            message[start : start + room],
        )
        for start in cuts
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

    def feed(self, data: bytes) -> list[bytes | Output | Relayed]:
        """Return what is complete now: control messages as bytes, all else as it is.

        Raises:
            LaunchError: The bytes are not frames; the stream cannot be used further.
        """
        self._received += data
        complete: list[bytes | Output | Relayed] = []
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

    def _open(self, kind: int, body: bytes) -> bytes | Output | Relayed | None:
        if kind == FrameKind.OUTPUT:
            return _open_output(body)
        if kind == FrameKind.STORE:
            return _open_relayed(body)
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


def _open_output(body: bytes) -> Output:
    if len(body) < _OUTPUT_HEAD.size:
        raise LaunchError(
            f"output frame must hold at least {_OUTPUT_HEAD.size} bytes, "
            f"got {len(body)}."
        )
    rank, stream = _OUTPUT_HEAD.unpack_from(body)
    try:
        return Output(rank, Stream(stream), body[_OUTPUT_HEAD.size :])
    except ValueError:
        raise LaunchError(f"output stream must be 1 or 2, got {stream}.") from None


def _open_relayed(body: bytes) -> Relayed:
    if len(body) < _STORE_HEAD.size:
        raise LaunchError(
            f"store frame must hold at least {_STORE_HEAD.size} bytes, got {len(body)}."
        )
    epoch, connection = _STORE_HEAD.unpack_from(body)
    return Relayed(epoch, connection, body[_STORE_HEAD.size :])


class FrameWriter:
    """Write frames to where nothing waits, keeping what is not taken yet.

    Args:
        write: Takes bytes and returns how many it took, 0 when it takes none now; or
            raises BrokenPipeError.
        limit_bytes: Most that may be kept.
    """

    def __init__(
        self,
        write: Callable[[memoryview], int],
        limit_bytes: int = 2 * MAX_CONTROL_BYTES,
    ) -> None:
        self._write = write
        self._limit_bytes = limit_bytes
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes that have not been taken yet."""
        return self._waiting_bytes

    def send(self, frames: bytes) -> None:
        """Keep the frames and write what is taken now.

        Raises:
            LaunchError: More than the limit would be kept.
            BrokenPipeError: Nobody reads any more.
        """
        if self._waiting_bytes + len(frames) > self._limit_bytes:
            raise LaunchError(
                f"unsent frames must stay under {self._limit_bytes} bytes, "
                f"got {self._waiting_bytes + len(frames)}. The other side is stuck."
            )
        self._waiting.append(memoryview(frames))
        self._waiting_bytes += len(frames)
        self.flush()

    def flush(self) -> None:
        """Write what is taken now, without waiting.

        Raises:
            BrokenPipeError: Nobody reads any more.
        """
        while self._waiting:
            head = self._waiting[0]
            taken = self._write(head)
            self._waiting_bytes -= taken
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
