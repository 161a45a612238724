"""One rank as its agent sees it: a process, two pipes and perhaps two files."""

import os
import resource
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ronde.launch.frames import Stream
from ronde.launch.lineage import die_with_parent

_READ_BYTES = 64 << 10
_FDS_PER_RANK = 4
_OTHER_FDS = 64
_LIMIT_BEFORE = resource.getrlimit(resource.RLIMIT_NOFILE)


@dataclass(slots=True)
class OutputPipe:
    """The agent's end of one of a rank's output streams.

    Attributes:
        rank: Whose.
        stream: Which.
        fd: Non-blocking, open for reading.
        log_fd: File that gets the same bytes, or None.
        is_open: False once all writers are gone and all is read.
    """

    rank: int
    stream: Stream
    fd: int
    log_fd: int | None
    is_open: bool = True

    def read(self) -> bytes | None:
        """Return what is there, None when nothing is now; closes at the end."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return None
        if not data:
            self.close()
            return None
        return data

    def log(self, data: bytes) -> None:
        """Append to the file, if there is one.

        Raises:
            OSError: The file does not take it; it gets nothing more then.
        """
        rest = memoryview(data)
        while rest and self.log_fd is not None:
            try:
                rest = rest[os.write(self.log_fd, rest) :]
            except OSError:
                self._close_log()
                raise

    def close(self) -> None:
        """Close pipe and file; may be called again."""
        if self.is_open:
            self.is_open = False
            os.close(self.fd)
            self._close_log()

    def _close_log(self) -> None:
        if self.log_fd is not None:
            os.close(self.log_fd)
            self.log_fd = None


@dataclass(slots=True)
class RankProcess:
    """A rank that was started; ``is_running`` until it was reaped."""

    rank: int
    process: "subprocess.Popen[bytes]"
    pipes: tuple[OutputPipe, OutputPipe]
    is_running: bool = field(default=True)

    @property
    def pid(self) -> int:
        """The rank's process, which is also the number of its process group."""
        return self.process.pid

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
    inherited_fds: tuple[int, ...],
    log_dir: str,
) -> RankProcess:
    """Start one rank in a session of its own, which dies with this process.

    Must be called from a process with one thread.

    Args:
        rank: Its number.
        command: Path and arguments.
        env: Its whole environment.
        inherited_fds: Descriptors it gets besides the first three.
        log_dir: Directory that exists, for new files ``stdout.log`` and
            ``stderr.log``; empty for none.

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
            pipes.append(OutputPipe(rank, stream, read_fd, None))
            if log_dir:
                pipes[-1].log_fd = _create_log(f"{log_dir}/{stream.name.lower()}.log")
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


def _create_log(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)


def raise_open_files_limit(num_ranks: int) -> None:
    """Let this process have the pipes and files of so many ranks.

    The ranks themselves get the limit that was there before.
    """
    soft, hard = _LIMIT_BEFORE
    wanted = num_ranks * _FDS_PER_RANK + _OTHER_FDS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        highest = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))


def _before_exec(agent_pid: int) -> Callable[[], None]:
    def before_exec() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, _LIMIT_BEFORE)
        if not die_with_parent(agent_pid, signal.SIGKILL):
            os._exit(1)

    return before_exec
