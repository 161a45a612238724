"""A program on an agent's host that its controller exchanges lines with.

What the program needs of the network goes over the agent's own connection, so it works
wherever ranks can be started.
"""

import os
import selectors
import subprocess
import sys
from typing import IO

from ronde.launch.agent.relay import OutputSender
from ronde.launch.messages import ProgramLine

# With site-packages, which the agent does without: torch's version is asked for.
_PROGRAM = (
    "import sys; from importlib import import_module; "
    "sys.path.append(sys.argv[1]); import_module(sys.argv[2]).main()"
)
_READ_BYTES = 64 << 10
MAX_LINE_BYTES = 16 << 20  # of what either side says at once


class RemoteProgram:
    """Runs one program; a part of the agent's loop.

    The program is a module's ``main``. It reads lines on its standard input and writes
    lines on its standard output; its standard error is the agent's. It is to end when
    its input does.
    """

    def __init__(
        self, module: str, selector: selectors.BaseSelector, sender: OutputSender
    ) -> None:
        self._selector = selector
        self._sender = sender
        self._unread = b""
        self._unwritten = b""
        package_dir = __file__.rpartition("/ronde/launch/")[0]
        # Its group is its own, so that nothing typed at a terminal reaches it.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, package_dir, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._input = _pipe_of(self._process.stdin)
        self._output = _pipe_of(self._process.stdout)
        selector.register(self._output, selectors.EVENT_READ, self._read)

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, line: str) -> None:
        self._unwritten += line.encode() + b"\n"
        self._write(self._input)

    def close(self) -> None:
        """Read what the program, which has ended, has still said."""
        while self._output in self._selector.get_map():
            if not self._read(self._output):
                # Something that it has started holds its output.
                self._selector.unregister(self._output)
        self._unwritten = b""
        if self._input in self._selector.get_map():
            self._selector.unregister(self._input)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        # The agent has reaped it, and nobody is to wait for it again.
        self._process.returncode = 0

    def _read(self, fd: int) -> bool:
        """Pass on what there is; False when there is nothing now."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="backslashreplace")
            self._sender.send(ProgramLine(text))
        # More would fill the memory of both hosts.
        if not data or len(self._unread) > MAX_LINE_BYTES:
            self._selector.unregister(fd)
        return True

    def _write(self, fd: int) -> None:
        try:
            written = os.write(fd, self._unwritten)
        except BlockingIOError:
            written = 0
        except BrokenPipeError:
            # Why it ended is told when it is reaped.
            self._unwritten = b""
            written = 0
        self._unwritten = self._unwritten[written:]
        is_watched = fd in self._selector.get_map()
        if self._unwritten and not is_watched:
            self._selector.register(fd, selectors.EVENT_WRITE, self._write)
        elif not self._unwritten and is_watched:
            self._selector.unregister(fd)


def _pipe_of(stream: IO[bytes] | None) -> int:
    if stream is None:
        raise AssertionError("it was started with pipes")
    os.set_blocking(stream.fileno(), False)
    return stream.fileno()
