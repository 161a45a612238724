"""The far side of a line tunnel, as text that it gets over standard input.

It stands alone, for ronde may not be there. The lines are described in ``line_tunnel``.
"""

import base64
import os
import select
import subprocess
from contextlib import suppress

_CHUNK_BYTES = 2900
_LINE_BYTES = 4096
_NOT_FOUND = 127


def tunnel_remote(words: "list[str]") -> None:
    """Run a program; carry its input and output in lines; say its exit code."""
    try:
        program = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        os.write(2, "{}: {}\n".format(words[0], error.strerror).encode())  # noqa: UP032
        _part(_NOT_FOUND)
        return
    _say(b"@A")
    _RemoteTunnel(program).run()
    code = program.wait()
    _part(code if code >= 0 else 128 - code)


def _part(code: int) -> None:
    _say(b"@X%d" % code)
    # What is still in the launcher when this process ends would be lost.
    said, data = b"", b"?"
    while data and not said.endswith(b"B\n"):
        data = os.read(0, _LINE_BYTES)
        said += data


class _RemoteTunnel:
    """Carries bytes between lines and one program, and waits for neither."""

    def __init__(self, program: "subprocess.Popen[bytes]") -> None:
        if program.stdin is None or program.stdout is None:
            raise AssertionError("the program was started with two pipes")
        self._input, self._output = program.stdin, program.stdout
        os.set_blocking(self._input.fileno(), False)
        self._line = b""
        self._pending = b""
        self._is_ending = False
        self._sources = [0, self._output.fileno()]

    def run(self) -> None:
        while self._output.fileno() in self._sources:
            sinks = [self._input] if self._pending else []
            ready, writable, _ = select.select(self._sources, sinks, [])
            if writable:
                self._give()
            for fd in ready:
                data = os.read(fd, _LINE_BYTES if fd == 0 else _CHUNK_BYTES)
                if fd == 0:
                    self._take(data)
                elif data:
                    _say(b"@O" + base64.b64encode(data))
                if not data:
                    self._sources.remove(fd)
            if self._is_ending and not self._pending:
                self._input.close()

    def _take(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line == b"E":
                self._is_ending = True
            else:
                self._pending += base64.b64decode(line)
        self._is_ending = self._is_ending or not data

    def _give(self) -> None:
        try:
            num_bytes = os.write(self._input.fileno(), self._pending)
        except BrokenPipeError:
            num_bytes = len(self._pending)
        self._pending = self._pending[num_bytes:]
        if not self._pending:
            _say(b"@A")


def _say(line: bytes) -> None:
    # Where nobody listens, the end of its input has told the program, or will.
    with suppress(OSError):
        os.write(1, line + b"\n")
