"""The process that watches a job for hangs (``--hang-timeout``)."""

import json
import os
from collections.abc import Callable
from contextlib import suppress

from ronde.launch.agent.relay import RemoteProgram
from ronde.launch.job.status import SOCKET, StatusService
from ronde.launch.signals import Watched

_MODULE = "ronde.monitor.hang_watch"


class HangWatch:
    """Reports the first collective that waits for longer than a limit."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._program: RemoteProgram | None = None

    def start(
        self, status: StatusService | None, on_hang: Callable[[str], None]
    ) -> str:
        """Call ``on_hang`` with the verdict; return why this is impossible, or ""."""
        if status is None:
            return "there is no room for a socket"
        arguments = str(status.directory / SOCKET), str(self._limit_s)
        try:
            self._program = RemoteProgram(
                _MODULE, lambda line: on_hang(json.loads(line)), *arguments
            )
        except OSError as error:
            return str(error.strerror)
        return ""

    def watched(self) -> Watched:
        return iter(()) if self._program is None else self._program.watched()

    def close(self) -> None:
        if self._program is not None:
            self._program.kill()
            with suppress(ChildProcessError):  # it had ended, and was reaped
                os.waitpid(self._program.pid, 0)
