"""A rank of ``cluster_faults.py``: reports that it is ready, and breaks.

    python -I -S cluster_rank.py HABIT DEED VICTIM

``HABIT`` is how all ranks are: ``plain``, ``stubborn`` (deaf to SIGTERM), ``parent`` of
processes in sessions of their own, ``noisy`` (writes all the time), ``dependent``
(fails when the victim begins to end). On SIGUSR1 the rank ``VICTIM`` does its ``DEED``.
"""

import atexit
import os
import signal
import sys
import time

_LINE = b"x" * 4095 + b"\n"


class PeerLostError(Exception):
    """As ronde's: another rank is gone."""


def main() -> None:
    """Wait for SIGUSR1, and then for the end."""
    habit, deed, victim = sys.argv[1:]
    is_victim = os.environ["RANK"] == victim  # noqa: TID251  a rank of its own
    if habit == "stubborn" and not is_victim:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if habit == "parent":
        have_children()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    os.write(1, b"ready\n")
    if habit == "noisy":
        while not signal.sigtimedwait({signal.SIGUSR1}, 0.001):
            os.write(1, _LINE)
    else:
        signal.sigwait({signal.SIGUSR1})
    if is_victim:
        do(deed)
    elif habit == "dependent":
        time.sleep(0.1)
        raise PeerLostError(f"rank {victim} is gone. See its output.")
    while deed != "write":
        signal.pause()


def have_children() -> None:
    """Leave a child in its own session, and a daemon without a parent."""
    for is_daemon in (False, True):
        if os.fork() == 0:
            os.setsid()
            if not is_daemon or os.fork() == 0:
                os.execv("/bin/sleep", ["sleep", "600"])  # noqa: S606
            os._exit(0)
    os.waitid(os.P_ALL, 0, os.WEXITED)


def do(deed: str) -> None:
    """Break, as the word says."""
    match deed:
        case "exit":
            sys.exit(3)
        case "raise":
            raise ValueError("the data is no data")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raise slowly":
            atexit.register(time.sleep, 0.5)
            raise ValueError("the data is no data")
        case "write":
            for _ in range(512):
                os.write(1, _LINE)


main()
