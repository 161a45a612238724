"""Carries bytes through a launcher that passes nothing but short lines.

    line_tunnel --lines--> mpirun --lines--> line_tunnel_remote --bytes--> the program

Open MPI passes whole lines only and never the end of input; it loses input that comes
faster than it is read, and output that it still has when the program ends. Hydra ends
the job when input comes faster than it is read. So bytes travel as base64 in lines of
less than 4 KiB, of which there is one at a time on its way to the far side:

- to the far side: first its own program; then data, ``E`` at the end, ``B`` when the
  exit code has arrived, so that the far side may end;
- from the far side: ``@O`` and data; ``@A`` when it is ready for more; ``@X`` and the
  exit code. Other lines are the launcher's, and go to standard error.
"""

import base64
import os
import select
import signal
import subprocess
import sys
import zlib
from pathlib import Path

from ronde.launch.process_tree import end_with

_CHUNK_BYTES = 2900
_READ_BYTES = 64 << 10
_FAILED = 70


def main() -> None:
    """Run ``argv[2:]``, a launcher that starts the far side; end with its exit code."""
    call, *words = sys.argv[1:]
    launcher = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        # Else Hydra dies of SIGPIPE before it has said what it died of.
        restore_signals=False,
        preexec_fn=end_with(os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - this process has one thread
    )
    code = LineTunnel(launcher).run(call)
    ended = launcher.wait()
    if code is None:
        code = (ended if ended >= 0 else 128 - ended) or _FAILED
    sys.exit(code)


class LineTunnel:
    """The near side: between standard input and output, and a launcher."""

    def __init__(self, launcher: "subprocess.Popen[bytes]") -> None:
        if launcher.stdin is None or launcher.stdout is None:
            raise AssertionError("the launcher was started with two pipes")
        self._to_there, self._from_there = launcher.stdin, launcher.stdout
        self._is_asked = False
        self._has_ended = False
        self._line = b""
        self._code: int | None = None

    def run(self, call: str) -> int | None:
        """Carry until the launcher's output ends."""
        self._send(_far_side() + call.encode())
        while True:
            is_open = self._is_asked and not self._has_ended
            waiting = [self._from_there.fileno(), *([0] if is_open else [])]
            ready = select.select(waiting, [], [])[0]
            if 0 in ready:
                self._take(os.read(0, _CHUNK_BYTES))
            if self._from_there.fileno() in ready:
                data = os.read(self._from_there.fileno(), _READ_BYTES)
                if not data:
                    return self._code
                *lines, self._line = (self._line + data).split(b"\n")
                for line in lines:
                    self._obey(line)

    def _take(self, data: bytes) -> None:
        self._is_asked = False
        self._has_ended = not data
        self._send(base64.b64encode(data) if data else b"E")

    def _send(self, line: bytes) -> None:
        try:
            os.write(self._to_there.fileno(), line + b"\n")
        except BrokenPipeError:
            self._has_ended = True

    def _obey(self, line: bytes) -> None:
        kind, said = line[:2], line[2:]
        if kind == b"@O":
            _write(base64.b64decode(said))
        elif kind == b"@A":
            self._is_asked = True
        elif kind == b"@X":
            self._code = int(said)
            self._has_ended = True
            self._send(b"B")
        else:
            os.write(2, line + b"\n")


def _far_side() -> bytes:
    source = Path(__file__).with_name("line_tunnel_remote.py").read_bytes()
    packed = base64.b64encode(zlib.compress(source))
    return (
        b"import base64, zlib; exec(zlib.decompress(base64.b64decode(%a))); " % packed
    )


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]
