"""The signals a user sends to a running job, as bytes in a pipe; waiting for pipes."""

import os
import select
import signal
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

from ronde.launch.limits import EXIT_UNWRITTEN

OUTPUT_FULL = signal.SIGXFSZ  # stands for standard output that takes no more
TIMED_OUT = signal.SIGALRM  # comes when the time that the user gave the job is over
# Each of these ends the job.
STOPPING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, TIMED_OUT})
ASKING = signal.SIGQUIT  # asks where the job is, and ends nothing
# Each of these goes to the ranks and does nothing else, before they run nothing at all.
FORWARDED = frozenset({signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT})
SUSPENDING = signal.SIGTSTP  # stops the ranks and then this process
_CAUGHT = STOPPING | FORWARDED | {ASKING, SUSPENDING}
_OF_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, SUSPENDING})


class InterruptedStartError(Exception):
    """The user ended the job before its ranks ran."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def interruption_code(number: int) -> int:
    """Return the exit code of a job that a signal has ended; 124 as timeout(1) has."""
    if number == OUTPUT_FULL:
        return EXIT_UNWRITTEN
    return 124 if number == TIMED_OUT else 128 + number


def interrupter(number: int) -> str:
    """Name what has ended a job: ``SIGINT``, ``timeout``, or ``full disk``."""
    if number == OUTPUT_FULL:
        return "full disk"
    return "timeout" if number == TIMED_OUT else signal.Signals(number).name


def is_kept_ignored(number: int) -> bool:
    return number in _OF_TERMINAL and signal.getsignal(number) is signal.SIG_IGN


def signal_pipe() -> tuple[int, int]:
    """Return two ends of a pipe, for ``set_wakeup_fd``; neither end ever waits."""
    return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)


def notice_signals(numbers: Iterable[int]) -> dict[int, Any]:
    """Have signals do no more than be written to the pipe; return what they did."""
    return {
        number: signal.signal(number, lambda _number, _frame: None)
        for number in numbers
        if not is_kept_ignored(number)
    }


@contextmanager
def caught_signals() -> Generator[int]:
    read_fd, write_fd = signal_pipe()
    fd_before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    before = notice_signals(_CAUGHT)
    # With these of a parent's no job can be run.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        yield read_fd
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(fd_before)
        os.close(read_fd)
        os.close(write_fd)


def read_signals(fd: int) -> list[int]:
    try:
        return list(os.read(fd, 4096))
    except BlockingIOError:
        return []


def raise_if_stopped(fd: int) -> None:
    for number in read_signals(fd):
        if number in STOPPING:
            raise InterruptedStartError(number)


def suspend_self() -> None:
    """Stop this process as SIGTSTP would, and return when it is continued."""
    before = signal.signal(SUSPENDING, signal.SIG_DFL)
    os.kill(os.getpid(), SUSPENDING)
    signal.signal(SUSPENDING, before)


def wait_for(
    readable: Sequence[int], writable: Sequence[int], timeout_s: float
) -> list[int]:
    """Return the descriptors that are ready; poll, since epoll refuses plain files.

    An infinite time is no limit, one that is over no wait.
    """
    poll = select.poll()
    for fd in readable:
        poll.register(fd, select.POLLIN)
    for fd in writable:
        poll.register(fd, select.POLLOUT | (select.POLLIN if fd in readable else 0))
    limit_ms = None if timeout_s == inf else max(0.0, timeout_s) * 1000
    return [fd for fd, _ in poll.poll(limit_ms)]
