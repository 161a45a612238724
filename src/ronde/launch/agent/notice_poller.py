"""The process that looks for notice of the host's end, as its agent sees it."""

import os
import select
import signal
import subprocess
import sys
from typing import IO, cast

from ronde.launch.agent.relay import OutputSender, Watched
from ronde.launch.process_tree import end_with
from ronde.launch.wire import messages

_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from ronde.launch.agent.notice_sources import main; main()"
)
_READ_BYTES = 64 << 10


class NoticePoller:
    """Passes on what ``notice_sources`` writes, until ``close``."""

    def __init__(self, sources: tuple[str, ...], sender: OutputSender) -> None:
        self._sender = sender
        self._reader = messages.MessageDecoder((messages.HostLeaving, messages.Notice))
        package_dir = __file__.rpartition("/ronde/launch/")[0]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, package_dir, *sources],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
            # The agent has one thread, so that code between fork and exec is safe.
            preexec_fn=end_with(os.getpid(), signal.SIGKILL),  # noqa: PLW1509
        )
        self._file = cast("IO[bytes]", self._process.stdout)

    def watched(self) -> Watched:
        if not self._file.closed:
            yield self._file.fileno(), select.POLLIN, self._read

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._file.close()

    def _read(self) -> None:
        if self._file.closed:  # after the poll had seen it ready
            return
        data = os.read(self._file.fileno(), _READ_BYTES)
        for message in self._reader.feed(data):
            self._sender.send(message)
        if not data:
            self._file.close()
            text = "--notice: the process that looks for it has ended"
            self._sender.send(messages.Notice(text))
