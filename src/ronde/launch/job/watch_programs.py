"""Programs that watch a job for the controller (``--hang-timeout``, ``--top``)."""

import os
from collections.abc import Callable
from contextlib import suppress

from ronde.launch.agent.relay import RemoteProgram
from ronde.launch.job.status import SOCKET, StatusService
from ronde.launch.signals import Watched


class WatchProgram:
    """A program that reads the job's table; it may end at any time.

    Args:
        option: The option that asks for it, for messages.
        module: Its ``main`` gets the socket of the table and ``argument``.
        on_line: Called with each line that it writes.
        on_end: Called once it has ended or is closed.
    """

    def __init__(
        self,
        option: str,
        module: str,
        on_line: Callable[[str], object],
        argument: str = "",
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.option = option
        self._module, self._argument = module, argument
        self._on_line, self._on_end = on_line, on_end
        self._program: RemoteProgram | None = None
        self._has_ended = True

    def start(self, status: StatusService | None) -> str:
        """Start the program; return why this is impossible, or ""."""
        if status is None:
            return "there is no room for a socket"
        arguments = str(status.directory / SOCKET), self._argument
        try:
            self._program = RemoteProgram(self._module, self._on_line, *arguments)
        except OSError as error:
            return str(error.strerror)
        self._has_ended = False
        return ""

    def watched(self) -> Watched:
        watched = [] if self._program is None else [*self._program.watched()]
        if not watched:
            self._end()
        return watched

    def close(self) -> None:
        if self._program is not None:
            self._program.kill()
            with suppress(ChildProcessError):  # it had ended, and was reaped
                os.waitpid(self._program.pid, 0)
        self._end()

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._on_end()
