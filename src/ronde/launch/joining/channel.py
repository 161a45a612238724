"""An agent's bytes over TLS, with an end of their own and a last word.

What goes through are records: a kind, a length, a body. TLS alone would do for the
bytes, but not for their end: the head has to close the agent's input and to tell the
job's exit code after that.
"""

import select
import socket
import ssl
import time
from enum import IntEnum
from struct import Struct

from ronde.errors import LaunchError

_HEAD = Struct(">BH")
_TLS_RECORD_BYTES = 16 << 10
_MAX_BODY_BYTES = _TLS_RECORD_BYTES - _HEAD.size
_READ_BYTES = 256 << 10
_LAST_WORD_S = 0.5

_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    # Later than the head and the agent give each other up.
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class _Kind(IntEnum):
    DATA = 0
    END = 1
    """There is no more data in this direction; the result is still to come."""
    RESULT = 2
    """The last word: an exit code."""


class Channel:
    """One proven connection, from either side; nothing is ever waited for.

    Args:
        sock: Non-blocking; what comes after the proofs has not been read.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.result: int | None = None
        """The other side's last word, once it has come."""
        self.is_ended = False
        """Whether the other side sends no more data."""
        self._sock = sock
        self._received = bytearray()
        self._is_broken = False
        self._record = b""
        for level, option, value in _KEEPALIVE:
            sock.setsockopt(level, option, value)

    def require_answers(self, limit_s: float) -> None:
        """Count the other side as gone when it takes nothing for so long.

        Without this only a side that is silent while nothing is on its way to it is
        found out. It does not suit a side that may stand still for good reason: for the
        kernel a receiver that takes nothing is no better than none.
        """
        if self.fd >= 0:
            level, option = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
            self._sock.setsockopt(level, option, int(limit_s * 1000))

    @property
    def fd(self) -> int:
        """Readable when ``read`` has something; -1 when it was closed."""
        return self._sock.fileno()

    def read(self) -> bytes | None:
        """Return all data that is there, empty at the end, None when there is none now.

        The end is the other side's result or the end of the connection.
        """
        if self.result is not None or self._is_broken:
            return b""
        try:
            self._pull()
            data = self._unpack()
        except (OSError, LaunchError):
            # Broken, or no records: either way there is nobody to talk to any more.
            self._is_broken = True
            data = b""
        if data or self.result is not None or self._is_broken:
            return data
        return None

    def _pull(self) -> None:
        pulled = 0
        while pulled < _READ_BYTES:
            try:
                # Room for a whole TLS record: so nothing decrypted ever stays behind,
                # of which no poll would tell.
                data = self._sock.recv(_TLS_RECORD_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if not data:
                self._is_broken = True
                return
            self._received += data
            pulled += len(data)

    def _unpack(self) -> bytes:
        data: list[bytes] = []
        start = 0
        while len(self._received) - start >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._received, start)
            begin = start + _HEAD.size
            if len(self._received) < begin + length:
                break
            start = begin + length
            body = bytes(memoryview(self._received)[begin:start])
            if kind == _Kind.DATA:
                data.append(body)
            elif kind == _Kind.END:
                self.is_ended = True
            elif kind == _Kind.RESULT and length == 1:
                self.is_ended = True
                self.result = body[0]
            else:
                raise LaunchError(f"record must be one of ours, got kind {kind}.")
        del self._received[:start]
        return b"".join(data)

    def write(self, data: memoryview) -> int:
        """Return how many bytes were taken, 0 when none are taken now.

        After a 0 the next call must begin with the same bytes: TLS may have encrypted
        them already.

        Raises:
            BrokenPipeError: Nobody reads any more.
        """
        piece = data[:_MAX_BODY_BYTES]
        if not self._record:
            self._record = _HEAD.pack(_Kind.DATA, len(piece)) + piece
        taken = len(self._record) - _HEAD.size
        return taken if self._send_record() else 0

    def _send_record(self) -> bool:
        """Send the record in hand; False when it is not taken now.

        Raises:
            BrokenPipeError: Nobody reads any more.
        """
        try:
            # Not longer than one TLS record: taken whole or not at all.
            self._sock.send(self._record)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError as error:
            raise BrokenPipeError(str(error)) from None
        self._record = b""
        return True

    def end(self) -> None:
        """Say that there is no more data; a result may follow."""
        self._say(_HEAD.pack(_Kind.END, 0))

    def tell_result(self, code: int) -> None:
        """Say the last word; nothing may be written after it."""
        self._say(_HEAD.pack(_Kind.RESULT, 1) + bytes((code & 0xFF,)))

    def _say(self, record: bytes) -> None:
        """Send a record after the one that is in hand; who is gone does not get it."""
        ends_at = time.monotonic() + _LAST_WORD_S
        waiting = [record]
        poll = select.poll()
        if self.fd < 0:
            return
        poll.register(self.fd, select.POLLOUT)
        try:
            while self._record or waiting:
                self._record = self._record or waiting.pop()
                if not self._send_record():
                    left_s = ends_at - time.monotonic()
                    if left_s <= 0 or not poll.poll(left_s * 1000):
                        return
        except BrokenPipeError:
            return

    def close(self) -> None:
        """End the connection at once."""
        self._is_broken = True
        self._sock.close()
