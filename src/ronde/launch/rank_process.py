"""One rank as its agent sees it: a process and two pipes."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ronde.launch.frames import Stream
from ronde.launch.limits import (
    LEAST_OPEN_FILES,
    raise_open_files_limit,
    require_open_files,
)
from ronde.launch.lineage import die_with_parent, read_process
from ronde.store.protocol import max_connections

_READ_BYTES = 64 << 10
_TRACEBACK = b"Traceback (most recent call last):"
_FDS_PER_RANK = 3
_OTHER_FDS = 40
_LIMIT_BEFORE = resource.getrlimit(resource.RLIMIT_NOFILE)


@dataclass(slots=True)
class OutputPipe:
    """The agent's end of one of a rank's output streams.

    Attributes:
        rank: Whose.
        stream: Which.
        fd: Non-blocking, open for reading.
        is_open: False once all writers are gone and all is read.
        traceback_s: When the last Python traceback was read from stderr, on the
            monotonic clock; 0 for never.
    """

    rank: int
    stream: Stream
    fd: int
    is_open: bool = True
    traceback_s: float = 0.0
    _before: bytes = b""

    def read(self) -> bytes | None:
        """Return what is there, None when nothing is now; closes at the end."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return None
        if not data:
            self.close()
            return None
        if self.stream is Stream.STDERR:
            text = self._before + data
            if _TRACEBACK in text:
                self.traceback_s = time.monotonic()
            self._before = text[1 - len(_TRACEBACK) :]
        return data

    def close(self) -> None:
        """Close the pipe; may be called again."""
        if self.is_open:
            self.is_open = False
            os.close(self.fd)


@dataclass(slots=True)
class RankProcess:
    """A rank that was started; ``is_running`` until it was reaped.

    Attributes:
        began_s: When it was seen to end by itself, on the monotonic clock; 0 for not
            before it was reaped.
    """

    rank: int
    process: "subprocess.Popen[bytes]"
    pipes: tuple[OutputPipe, OutputPipe]
    is_running: bool = field(default=True)
    began_s: float = 0.0

    @property
    def pid(self) -> int:
        """The rank's process, which is also the number of its process group."""
        return self.process.pid

    def noticed(self, at_s: float, pid: int) -> None:
        """Take note that a process of the rank said that it exits.

        Where that is gone and the rank is not, a wrapper goes on with something else.
        """
        process = read_process(pid)
        is_there = pid == self.pid or (process is not None and not process.is_zombie)
        if not self.began_s and (is_there or not self.is_running):
            self.began_s = at_s

    def reaped(self, status: int) -> int:
        """Take note of the end; return the exit code, or minus the signal."""
        self.is_running = False
        # Popen must know: only the agent's own waitpid saw it.
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return self.process.returncode


def start_rank(
    rank: int,
    command: Sequence[str],
    env: dict[str, str],
    *,
    inherited_fds: Sequence[int],
) -> RankProcess:
    """Start one rank in a session of its own, which dies with this process.

    Must be called from a process with one thread.

    Args:
        rank: Its number.
        command: Path and arguments.
        env: Its whole environment.
        inherited_fds: Descriptors it gets besides the first three.

    Raises:
        OSError: It could not be started; nothing is left open.
    """
    pipes: list[OutputPipe] = []
    write_fds: list[int] = []
    try:
        for stream in Stream:
            read_fd, write_fd = os.pipe()
            write_fds.append(write_fd)
            os.set_blocking(read_fd, False)
            pipes.append(OutputPipe(rank, stream, read_fd))
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=write_fds[0],
            stderr=write_fds[1],
            start_new_session=True,
            pass_fds=inherited_fds,
            # The agent has one thread, so that code between fork and exec is safe.
            preexec_fn=_before_exec(os.getpid()),  # noqa: PLW1509
        )
    except OSError:
        for pipe in pipes:
            pipe.close()
        raise
    finally:
        for fd in write_fds:
            os.close(fd)
    return RankProcess(rank, process, (pipes[0], pipes[1]))


def allow_ranks(num_ranks: int) -> None:
    """Let this process have the pipes of so many ranks.

    The ranks themselves get the limit that was there before.

    Raises:
        UsageError: It may not have so many open files.
    """
    least = num_ranks * _FDS_PER_RANK + LEAST_OPEN_FILES
    require_open_files(least, _LIMIT_BEFORE[1], f"for {num_ranks} ranks on a host")
    raise_open_files_limit(least + max_connections(num_ranks) + _OTHER_FDS)


def _before_exec(agent_pid: int) -> Callable[[], None]:
    def before_exec() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, _LIMIT_BEFORE)
        if not die_with_parent(agent_pid, signal.SIGKILL):
            os._exit(1)

    return before_exec
