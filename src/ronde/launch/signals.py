"""The user's signals as bytes in a pipe, and waits for file descriptors."""

import os
import select
import signal
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

from ronde.launch.limits import EXIT_UNWRITTEN

OUTPUT_FULL = signal.SIGXFSZ  # represents a full disk under standard output
TIMED_OUT = signal.SIGALRM  # the time limit of --timeout is over
STOPPING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, TIMED_OUT})
ASKING = signal.SIGQUIT  # shows the stacks of all ranks
# Passed on to the ranks; ignored before they run.
FORWARDED = frozenset({signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT})
SUSPENDING = signal.SIGTSTP  # stops the ranks and then the controller
_CAUGHT = STOPPING | FORWARDED | {ASKING, SUSPENDING}
_OF_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, SUSPENDING})
_ENDED = select.POLLERR | select.POLLHUP | select.POLLNVAL

Watched = Iterable[tuple[int, int, Callable[[], object]]]
"""Descriptors, their events for ``select.poll``, and functions to call on these."""


class InterruptedStartError(Exception):
    """The user ended the job before its ranks ran."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def interruption_code(number: int) -> int:
    if number == OUTPUT_FULL:
        return EXIT_UNWRITTEN
    return 124 if number == TIMED_OUT else 128 + number


def interrupter(number: int) -> str:
    """Name the cause of an interruption: ``SIGINT``, ``timeout``, ``full disk``."""
    if number == OUTPUT_FULL:
        return "full disk"
    return "timeout" if number == TIMED_OUT else signal.Signals(number).name


def is_kept_ignored(number: int) -> bool:
    return number in _OF_TERMINAL and signal.getsignal(number) is signal.SIG_IGN


def signal_pipe() -> tuple[int, int]:
    return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)


def notice_signals(numbers: Iterable[int]) -> dict[int, Any]:
    """Give signals empty handlers, so that they wake the pipe; return the old ones."""
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
    # A parent may have left these ignored or blocked.
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
    """Stop this process as SIGTSTP does; return when it is continued."""
    before = signal.signal(SUSPENDING, signal.SIG_DFL)
    os.kill(os.getpid(), SUSPENDING)
    signal.signal(SUSPENDING, before)


def wait_for(
    readable: Sequence[int], writable: Sequence[int], timeout_s: float
) -> list[int]:
    """Wait with ``poll``, as epoll refuses plain files; return ready descriptors."""
    poll = select.poll()
    for fd in readable:
        poll.register(fd, select.POLLIN)
    for fd in writable:
        poll.register(fd, select.POLLOUT | (select.POLLIN if fd in readable else 0))
    return [fd for fd, _ in poll.poll(_limit_ms(timeout_s))]


def serve_ready(watched: Watched, timeout_s: float) -> None:
    """Wait until descriptors are ready, and call their functions.

    A descriptor may appear twice, for reading and for writing.
    """
    poll, masks, waiting = select.poll(), dict[int, int](), list(watched)
    for fd, events, _ in waiting:
        masks[fd] = masks.get(fd, 0) | events
        poll.register(fd, masks[fd])
    ready = dict(poll.poll(_limit_ms(timeout_s)))
    for fd, events, serve in waiting:
        if ready.get(fd, 0) & (events | _ENDED):
            serve()


def _limit_ms(timeout_s: float) -> float | None:
    return None if timeout_s == inf else max(0.0, timeout_s) * 1000
