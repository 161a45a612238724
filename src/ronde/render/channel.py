"""A descriptor of the user's, written to without ever waiting for it."""

import os
import select
import stat
import weakref
from collections import deque
from contextlib import suppress

# What poll calls ready takes so many bytes at once (PIPE_BUF). Non-blocking mode is
# no way: it would hold for everybody who shares the descriptor, the user's shell too.
_PIECE_BYTES = 4096
_PIPE_PIECE_BYTES = 64 << 10
_FILE_PIECE_BYTES = 1 << 20
_MAX_PIECES = 64


class Channel:
    """Bytes waiting for one descriptor.

    Args:
        fd: Inherited, in whatever mode it is; left open.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._write_fd = -1
        self._waiting: deque[memoryview] = deque()
        self.waiting_bytes = 0
        self.is_broken = False
        self._is_pipe = False
        self._piece_bytes = _PIECE_BYTES
        self._ready = select.poll()
        self._ready.register(fd, select.POLLOUT)
        try:
            mode = os.fstat(fd).st_mode
        except OSError:
            self.is_broken = True
            return
        self._is_pipe = stat.S_ISFIFO(mode)
        if stat.S_ISREG(mode):
            self._piece_bytes = _FILE_PIECE_BYTES

    def _open(self) -> None:
        """Open a pipe once more, if that is allowed, in a mode of our own.

        Sixteen times as much goes into one write then, and the reader is woken as much
        less often. Not before the first write, which another process may do.
        """
        self._write_fd = self.fd
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        with suppress(OSError):
            if self._is_pipe:
                self._write_fd = os.open(f"/proc/self/fd/{self.fd}", flags)
                weakref.finalize(self, os.close, self._write_fd)
                self._piece_bytes = _PIPE_PIECE_BYTES

    def put(self, data: bytes) -> None:
        """Keep bytes to be written; a broken channel forgets them."""
        if data and not self.is_broken:
            self._waiting.append(memoryview(data))
            self.waiting_bytes += len(data)

    def discard(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        self.waiting_bytes = 0

    def write(self) -> None:
        """Write while the descriptor is ready; it must be so when this is called.

        Raises:
            BrokenPipeError: It takes nothing any more, now or ever.
        """
        if self._write_fd < 0:
            self._open()
        for _ in range(_MAX_PIECES):
            piece = self._take_piece()
            if not piece:
                return
            try:
                taken = os.write(self._write_fd, piece)
            except BlockingIOError:
                taken = 0
            except OSError as error:
                self.is_broken = True
                self.discard()
                # With its number: EIO says that a terminal was closed.
                raise BrokenPipeError(error.errno, error.strerror) from error
            self.waiting_bytes -= taken
            if taken < len(piece):
                self._waiting.appendleft(memoryview(piece)[taken:])
                return
            if not self._ready.poll(0):
                return

    def _take_piece(self) -> bytes | memoryview:
        """Take from the queue what goes into one write."""
        taken: list[memoryview] = []
        room = self._piece_bytes
        while self._waiting and room:
            head = self._waiting.popleft()
            if len(head) > room:
                self._waiting.appendleft(head[room:])
                head = head[:room]
            taken.append(head)
            room -= len(head)
        return taken[0] if len(taken) == 1 else b"".join(taken)
