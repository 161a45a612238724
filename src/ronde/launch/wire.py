"""What carries the frames between controller and agent, as the controller sees it."""

import fcntl
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

_READ_BYTES = 256 << 10
_PIPE_BYTES = 256 << 10


class Wire(Protocol):
    """Two directions of bytes, neither of which is ever waited for.

    The controller polls ``read_fd`` for reading and, while it has something to write,
    ``write_fd`` for writing.
    """

    @property
    def read_fd(self) -> int:
        """Descriptor that is readable when ``read`` has something, or the end."""
        ...

    @property
    def write_fd(self) -> int:
        """Descriptor that is writable when ``write`` takes something."""
        ...

    @property
    def error_fd(self) -> int:
        """Descriptor of the other side's complaints; -1 where there is none."""
        ...

    def read(self) -> bytes | None:
        """Return what has come, empty at the end, None when nothing is there now."""
        ...

    def write(self, data: memoryview) -> int:
        """Return how many bytes were taken, 0 when none are taken now.

        Raises:
            BrokenPipeError: Nobody reads any more.
        """
        ...

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end of what carries the bytes.

        Returns:
            Its exit code, minus the number of a signal; 0 where there is no process;
            None when it has not ended in time.
        """
        ...

    def close(self) -> None:
        """Close both directions: the agent then ends everything and itself."""
        ...

    def kill(self) -> None:
        """End what carries the bytes at once; the agent may live on."""
        ...


class ProcessWire:
    """The three pipes of a process: the agent itself, or the ssh that leads to it.

    Args:
        process: Started with three pipes, unbuffered.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
        if stdin is None or stdout is None or stderr is None:
            raise AssertionError("the process was started with three pipes")
        self._process = process
        self._files = (stdin, stdout, stderr)
        for file in self._files:
            os.set_blocking(file.fileno(), False)
        # Fewer and longer reads of what the ranks write. Users may be over their limit.
        with suppress(OSError):
            fcntl.fcntl(stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def read_fd(self) -> int:
        """See ``Wire``."""
        return self._files[1].fileno()

    @property
    def write_fd(self) -> int:
        """See ``Wire``."""
        return self._files[0].fileno()

    @property
    def error_fd(self) -> int:
        """See ``Wire``."""
        return self._files[2].fileno()

    def read(self) -> bytes | None:
        """See ``Wire``."""
        try:
            return os.read(self.read_fd, _READ_BYTES)
        except BlockingIOError:
            return None

    def write(self, data: memoryview) -> int:
        """See ``Wire``."""
        try:
            return os.write(self.write_fd, data)
        except BlockingIOError:
            return 0

    def wait(self, timeout_s: float) -> int | None:
        """See ``Wire``."""
        if self._process.poll() is None:
            try:
                process_fd = os.pidfd_open(self._process.pid)
            except OSError:  # not every kernel and container has them
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout_s)
                return self._process.returncode
            poll = select.poll()
            poll.register(process_fd, select.POLLIN)
            poll.poll(timeout_s * 1000)
            os.close(process_fd)
        return self._process.poll()

    def close(self) -> None:
        """See ``Wire``."""
        for file in self._files:
            file.close()
        # Somebody may have stopped it, and it has to see this end.
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """See ``Wire``."""
        self._process.kill()


def wait_for(
    readable: Sequence[int], writable: Sequence[int], timeout_s: float | None
) -> list[int]:
    """Return the descriptors that are ready; poll, since epoll refuses plain files."""
    poll = select.poll()
    wanted: dict[int, int] = dict.fromkeys(readable, select.POLLIN)
    for fd in writable:
        wanted[fd] = wanted.get(fd, 0) | select.POLLOUT
    for fd, events in wanted.items():
        poll.register(fd, events)
    return [fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]
