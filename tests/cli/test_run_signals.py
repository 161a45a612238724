import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from contextlib import suppress

import pytest
from tests.cli.conftest import read_lines
from tests.limits import HANG_S, until

from ronde.launch import wait_for
from ronde.processes import descendants, read_process


def shell(code: str) -> list[str]:
    return ["--", "/bin/sh", "-c", code]


def wait_for_state(pids: list[int], states: str) -> None:
    until(lambda: all(read_process(pid).state in states for pid in pids))


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [
        (signal.SIGINT, "INT", 130),
        (signal.SIGTERM, "TERM", 143),
        (signal.SIGHUP, "HUP", 129),
    ],
)
def test_each_rank_gets_the_signal_that_ends_the_job(ronde, number, name, code):
    program = f'trap "echo got {name}; exit 0" {name}; echo ready; read x < "$GATE"'
    with GatedJob(ronde, program) as process:
        read_lines(process, b"ready", 2)
        process.send_signal(number)
        read_lines(process, b"got " + name.encode(), 2)
        assert process.wait(HANG_S) == code


def test_a_signal_while_ranks_end_prevents_their_restart(ronde, tmp_path):
    program = (
        'cd "$0"; if [ "$RANK" = 0 ]; then trap "echo ending" TERM; touch up; fi; '
        "while [ ! -e up ] || [ $RANK = 0 ]; do sleep 0.01; done; exit 3"
    )
    words = ("run", "-n", "2", "--max-restarts", "9", "--grace", f"{HANG_S}s")
    with ronde.start(*words, *shell(program), str(tmp_path)) as process:
        read_lines(process, b"ending", 1)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=HANG_S)
    assert (process.returncode, b"restart" in errors) == (143, False)


class GatedJob:
    """Two ranks with a pipe that nobody ever writes to, for them to wait on."""

    def __init__(self, ronde, program: str, **popen) -> None:
        self._read_fd, self._write_fd = os.pipe()
        gate = f"/proc/{os.getpid()}/fd/{self._read_fd}"
        self._process = ronde.start(
            *("run", "-n", "2", "-x", f"GATE={gate}", *shell(program)),
            # The kernel lets SIGTSTP stop no group whose parents are all elsewhere.
            **{"process_group": 0} | popen,
        )

    def __enter__(self) -> "subprocess.Popen[bytes]":
        return self._process

    def __exit__(self, *_error) -> None:
        self._process.kill()
        self._process.communicate(timeout=HANG_S)
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
        assert process.wait(HANG_S) == 0


def test_signals_for_the_ranks_end_no_start_and_lose_no_output(ronde):
    numbers = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}

    def send_before_ranks_run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        for number in numbers:
            os.kill(os.getpid(), number)

    program = "import os; print(os.getppid(), 'x' * 400_000, 'end', flush=True)"
    words = ("run", "-n", "1", "--no-prefix", "--", sys.executable, "-S", "-c", program)
    with ronde.start(*words, preexec_fn=send_before_ranks_run) as process:
        agent = b""
        while (letter := process.stdout.read(1)) != b" ":
            assert letter, process.stderr.read()
            agent += letter
        with suppress(ProcessLookupError):
            agent_fd = os.pidfd_open(int(agent))
            assert wait_for([agent_fd], [], HANG_S)
            os.close(agent_fd)
        # It has only to write what the pipe does not hold.
        for number in numbers:
            process.send_signal(number)
        rest, complaints = process.communicate(timeout=HANG_S)
    assert (process.returncode, complaints) == (0, b"")
    assert rest.endswith(b"x end\n")


@pytest.mark.parametrize("verb", ["run", "check"])
@pytest.mark.parametrize(
    ("name", "code"), [("INT", 130), ("TERM", 143), ("HUP", 129), ("QUIT", 131)]
)
def test_a_signal_amid_the_first_imports_has_its_exit_code(
    ronde, tmp_path, verb, name, code
):
    # It is imported in the place of Python's own.
    text = f"import os, signal; os.kill(os.getpid(), signal.SIG{name})"
    (tmp_path / "select.py").write_text(text)
    done = ronde(verb, "true", env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (code, b"")


def test_children_of_a_rank_get_the_grace_period_too(ronde):
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
        assert process.wait(HANG_S) == 143


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT])
def test_ignored_signals_stay_ignored(ronde, number):
    program = (
        'trap "exit 0" USR1; grep SigIgn /proc/$$/status; echo ready; '
        'while :; do read x < "$GATE"; done'
    )
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with GatedJob(ronde, program) as process:
            lines = read_lines(process, b"ready", 2)
            ignored = [int(line.split()[-1], 16) for line in lines if b"Sig" in line]
            assert [bits >> (number - 1) & 1 for bits in ignored] == [1, 1]
            process.send_signal(number)
            process.send_signal(signal.SIGUSR1)
            assert process.wait(HANG_S) == 0
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("how", ["blocked", "ignored"])
def test_a_parent_that_wants_no_word_of_its_children_breaks_nothing(ronde, how):
    asked = "import signal as s; print(s.pthread_sigmask(0, []), s.getsignal(17))"
    words = ["run", "-n", "2", "--no-prefix", "--", sys.executable, "-c", asked]
    signals = {signal.SIGCHLD, signal.SIGTERM}

    def spoil() -> None:
        if how == "blocked":
            signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        else:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    done = ronde(*words, preexec_fn=spoil)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"set() 0\n" * 2


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
        assert process.wait(HANG_S) == 0


def test_an_agent_that_is_told_to_end_has_its_ranks_end_in_their_grace(ronde):
    program = 'trap "echo saved; exit 0" TERM; echo ready $PPID; read x < "$GATE"'
    with GatedJob(ronde, program) as process:
        lines = read_lines(process, b"ready", 2)
        agent = int(lines[0].split()[-1])
        reaper = read_process(agent).parent
        os.kill(reaper, signal.SIGTERM)
        read_lines(process, b"saved", 2)
        assert process.wait(HANG_S) == 143


WORKER = """
import os, signal, sys, threading
ask, answer = os.pipe(), os.pipe()
shell, worker = os.getppid(), os.fork()

def end(*_):
    print("ended", flush=True)
    os._exit(0)

def save(*_):
    while os.getppid() == shell:  # until that has ended
        pass
    os.write(ask[1], b"?")
    print("saved" if os.read(answer[0], 1) else "lost", flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, save if worker else end)
os.close(answer[bool(worker)])
if worker:
    os.read(answer[0], 1)
    print("ready", flush=True)
    while True:
        signal.pause()
os.write(answer[1], b"!")
os.read(ask[0], 1)
os.write(answer[1], b"!")
signal.pause()
"""


def test_a_ranks_workers_serve_it_until_it_has_ended(ronde, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(WORKER)
    # With a shell around it that the signal ends at once.
    with GatedJob(ronde, f"{sys.executable} -S {script}; true") as process:
        read_lines(process, b"ready", 2)
        process.send_signal(signal.SIGTERM)
        lines = read_lines(process, b"ended", 2)
        assert sum(b"saved" in line for line in lines) == 2
        assert process.wait(HANG_S) == 143


def _kill_a_rank(_reaper: int, _agent: int, rank: int) -> None:
    os.kill(rank, signal.SIGKILL)


def _kill_the_agent(_reaper: int, agent: int, _rank: int) -> None:
    os.kill(agent, signal.SIGKILL)


@pytest.mark.parametrize(
    ("stopped", "then", "code"),
    [
        ("reaper", _kill_a_rank, 137),
        ("agent", _kill_a_rank, 137),
        ("output", _kill_a_rank, 137),
        ("reaper", _kill_the_agent, 70),
    ],
)
def test_a_stopped_process_of_ours_keeps_no_job_from_its_end(
    ronde, stopped, then, code
):
    program = 'setsid sleep 1000 & echo ready $PPID $$ $!; read x < "$GATE"'
    with GatedJob(ronde, program) as process:
        lines = read_lines(process, b"ready", 2)
        (agent, rank, child), (_, *others) = (
            map(int, line.split()[-3:]) for line in lines
        )
        reaper = read_process(agent).parent
        (output,) = {
            p.pid for p in descendants(process.pid) if p.parent == process.pid
        } - {reaper}
        pids = {"agent": agent, "reaper": reaper, "output": output}
        os.kill(pids[stopped], signal.SIGSTOP)
        then(pids["reaper"], agent, rank)
        assert process.wait(HANG_S) == code
        assert not any(map(read_process, [*pids.values(), rank, child, *others]))


class TerminalJob(GatedJob):
    """Two ranks whose launcher writes to a terminal of its own."""

    def __init__(self, ronde, program: str, **popen) -> None:
        self._terminal, side = pty.openpty()
        super().__init__(ronde, program, stdout=side, stderr=side, **popen)
        os.close(side)

    def hang_up(self) -> None:
        """Close the terminal once the ranks are ready."""
        shown = b""
        while shown.count(b"ready") < 2:
            shown += os.read(self._terminal, 4096)
        os.close(self._terminal)


def lead_session() -> None:
    os.setsid()
    fcntl.ioctl(1, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize("then", ['read x < "$GATE"', "while :; do echo more; done"])
def test_a_closed_terminal_ends_the_job_as_a_hangup(ronde, tmp_path, then):
    program = f'trap "sleep 0.1; echo > saved.$RANK; exit 0" HUP; echo ready; {then}'
    popen = {"cwd": tmp_path, "preexec_fn": lead_session, "process_group": None}
    # With it Python itself writes to the terminal once more at the end.
    job = TerminalJob(ronde, program, env={"PYTHONUNBUFFERED": "1"}, **popen)
    with job as process:
        job.hang_up()
        assert process.wait(HANG_S) == 129
    assert {path.name for path in tmp_path.iterdir()} == {"saved.0", "saved.1"}


@pytest.mark.parametrize(("is_ignored", "code"), [(False, 129), (True, 0)])
def test_a_closed_terminal_is_noticed_without_a_signal(
    ronde, tmp_path, is_ignored, code
):
    program = "echo ready; while [ ! -e end ]; do echo more; done"
    hangup = signal.SIG_IGN if is_ignored else signal.SIG_DFL
    before = signal.signal(signal.SIGHUP, hangup)
    try:
        env = {"PYTHONUNBUFFERED": "1"}
        job = TerminalJob(ronde, program, env=env, cwd=tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    with job as process:
        job.hang_up()
        if is_ignored:
            (tmp_path / "end").touch()
        assert process.wait(HANG_S) == code
