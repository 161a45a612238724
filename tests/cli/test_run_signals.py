import os
import select
import signal
import subprocess
import sys
import time

import pytest

from ronde.launch.lineage import read_process

_TIMEOUT_S = 60


def shell(code: str) -> list[str]:
    return ["--", "/bin/sh", "-c", code]


def wait_for_state(pids: list[int], states: str) -> None:
    """Poll the process table, which is all that a stranger sees, for the state."""
    ends_at = time.monotonic() + _TIMEOUT_S
    while not all(read_process(pid).state in states for pid in pids):
        assert time.monotonic() < ends_at


def read_lines(process: "subprocess.Popen[bytes]", words: bytes, times: int = 1):
    """Read standard output until lines with the words came so often."""
    lines = []
    while sum(words in line for line in lines) < times:
        ready, _, _ = select.select([process.stdout], [], [], _TIMEOUT_S)
        line = process.stdout.readline() if ready else b""
        assert line, lines
        lines.append(line)
    return lines


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [
        (signal.SIGINT, "INT", 130),
        (signal.SIGTERM, "TERM", 143),
        (signal.SIGHUP, "HUP", 129),
        (signal.SIGQUIT, "QUIT", 131),
    ],
)
def test_each_rank_gets_the_signal_that_ends_the_job(ronde, number, name, code):
    program = f'trap "echo got {name}; exit 0" {name}; echo ready; read x < "$GATE"'
    with GatedJob(ronde, program) as process:
        read_lines(process, b"ready", 2)
        process.send_signal(number)
        read_lines(process, b"got " + name.encode(), 2)
        assert process.wait(_TIMEOUT_S) == code


class GatedJob:
    """Two ranks with a pipe that nobody ever writes to, for them to wait on."""

    def __init__(self, ronde, program: str) -> None:
        self._read_fd, self._write_fd = os.pipe()
        gate = f"/proc/{os.getpid()}/fd/{self._read_fd}"
        self._process = ronde.start(
            *("run", "-n", "2", "-x", f"GATE={gate}", *shell(program)),
            bufsize=0,
            # The kernel lets SIGTSTP stop no group whose parents are all elsewhere.
            process_group=0,
        )

    def __enter__(self) -> "subprocess.Popen[bytes]":
        return self._process

    def __exit__(self, *_error) -> None:
        self._process.kill()
        self._process.communicate(timeout=_TIMEOUT_S)
        os.close(self._read_fd)
        os.close(self._write_fd)


def test_user_signals_go_to_the_ranks_and_end_nothing(ronde):
    program = (
        'trap "echo got USR1" USR1; trap "echo got USR2; exit 0" USR2; '
        'echo ready; while :; do read x < "$GATE"; done'
    )
    with GatedJob(ronde, program) as process:
        read_lines(process, b"ready", 2)
        process.send_signal(signal.SIGUSR1)
        read_lines(process, b"got USR1", 2)
        process.send_signal(signal.SIGUSR2)
        read_lines(process, b"got USR2", 2)
        assert process.wait(_TIMEOUT_S) == 0


def test_what_a_rank_left_in_its_group_has_the_grace_too(ronde):
    # The shell dies of the signal at once; its child still has something to say.
    child = (
        "import signal, sys\n"
        "def end(*_): print('saved', flush=True); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('ready', flush=True); signal.pause()\n"
    )
    program = f'{sys.executable} -S -c "{child}" & read x < "$GATE"'
    with GatedJob(ronde, program) as process:
        read_lines(process, b"ready", 2)
        process.send_signal(signal.SIGTERM)
        read_lines(process, b"saved", 2)
        assert process.wait(_TIMEOUT_S) == 143


def test_a_hangup_that_is_ignored_stays_so(ronde):
    program = 'trap "exit 0" USR1; echo ready; while :; do read x < "$GATE"; done'
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with GatedJob(ronde, program) as process:
            read_lines(process, b"ready", 2)
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGUSR1)
            assert process.wait(_TIMEOUT_S) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_terminals_stop_stops_the_ranks_and_the_launcher(ronde):
    program = (
        "echo ready $$; trap 'echo got USR1; exit 0' USR1; "
        'while :; do read x < "$GATE"; done'
    )
    with GatedJob(ronde, program) as process:
        lines = read_lines(process, b"ready", 2)
        ranks = [int(line.split()[-1]) for line in lines]
        process.send_signal(signal.SIGTSTP)
        stopped = os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert stopped is not None
        assert stopped.si_status == signal.SIGTSTP
        wait_for_state(ranks, "T")
        process.send_signal(signal.SIGCONT)
        wait_for_state(ranks, "SR")
        process.send_signal(signal.SIGUSR1)
        read_lines(process, b"got USR1", 2)
        assert process.wait(_TIMEOUT_S) == 0


def test_an_agent_that_is_told_to_end_has_its_ranks_end_in_their_grace(ronde):
    program = 'trap "echo saved; exit 0" TERM; echo ready $PPID; read x < "$GATE"'
    with GatedJob(ronde, program) as process:
        lines = read_lines(process, b"ready", 2)
        agent = int(lines[0].split()[-1])
        keeper = read_process(agent).parent
        os.kill(keeper, signal.SIGTERM)
        read_lines(process, b"saved", 2)
        assert process.wait(_TIMEOUT_S) == 143
