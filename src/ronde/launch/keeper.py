"""The keeper: the agent's parent, which sweeps what an agent that died left behind."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ronde.launch.limits import EXIT_NO_FORK, explain_shortage
from ronde.launch.lineage import adopt_orphans, die_with_parent, sweep
from ronde.launch.mpi_world import remove_directory
from ronde.launch.signals import reset_signals
from ronde.store.local_socket import remove


def run_kept(work: Callable[[], int], directory: Path) -> NoReturn:
    """Fork; run ``work`` in the child; outlive it and sweep what it leaves.

    Both processes adopt orphans, so any one of the two may be killed: the child gets
    SIGTERM when this process ends, and this process kills every descendant when the
    child has ended. A child that is stopped is continued at once, and so is this
    process when the child ends. Must be called from a process with one thread and no
    children.

    Both end here, past the interpreter's own end, which adds nothing and takes time:
    the child with what ``work`` returns, and this process with the child's exit code,
    128 plus the signal that ended it, or EXIT_NO_FORK.

    Args:
        work: Returns the child's exit code.
        directory: Where the child keeps sockets; removed at the end, if it is there.
    """
    reset_signals()
    parent = os.getpid()
    adopt_orphans()
    try:
        child = os.fork()
    except OSError as error:
        print(explain_shortage(error) or str(error), file=sys.stderr)  # noqa: T201
        sys.exit(EXIT_NO_FORK)
    if child == 0:
        code = 1
        try:
            adopt_orphans()
            if die_with_parent(parent, signal.SIGTERM):
                code = work()
        except BaseException as error:  # noqa: BLE001 - the process's outermost line
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            # Somebody may have stopped it, and it has to see this end.
            if os.getppid() == parent:
                os.kill(parent, signal.SIGCONT)
            os._exit(code)
    for fd in (0, 1):
        os.close(fd)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _passing_on(child))
    status = _wait(child)
    sweep(on_reaped=lambda _pid, _status: None)
    remove_directory(child)
    remove(directory)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _passing_on(child: int) -> Callable[[int, FrameType | None], None]:
    """Return what tells the child that this host wants its ranks to end."""
    return lambda _number, _frame: os.kill(child, signal.SIGTERM)


def _wait(child: int) -> int:
    """Return the child's wait status, reaping the orphans that end before it."""
    look = os.WEXITED | os.WSTOPPED | os.WNOWAIT
    while True:
        news = os.waitid(os.P_ALL, 0, look)
        if news is None:
            continue
        if news.si_code == os.CLD_STOPPED:
            os.waitid(os.P_PID, news.si_pid, os.WSTOPPED | os.WNOHANG)
            if news.si_pid == child:
                os.kill(child, signal.SIGCONT)
        elif news.si_pid == child:
            # Its number is its own until it is reaped.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return os.waitpid(child, 0)[1]
        else:
            os.waitpid(news.si_pid, 0)
