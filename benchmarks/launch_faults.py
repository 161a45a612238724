"""Start jobs under ``ronde run``, break them, and count what is wrong afterwards.

For each fault: how often the exit code was right, how many processes were left behind,
and how long the end took. A process of the job is known by its environment: by the
job's ``RONDE_COOKIE``, and by a mark of the run that launcher and agent carry too. The
last line is JSON. Exits with 1 if anything was wrong.

    python benchmarks/launch_faults.py --rounds 40
"""

import argparse
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ronde.launch.lineage import read_processes

_SIZE = 2
_DEADLINE_S = 30.0
_POLL_S = 0.002
_START_S = 0.15
_MARK_NAME = "LAUNCH_FAULTS_RUN"

_HELLO = 'echo "ready $RONDE_COOKIE"; '
_SLEEP = "sleep 600"
_ONE = '[ "$RANK" = 1 ] || exec ' + _SLEEP + "; "

_GREETING = """
import os
print("ready", os.environ["RONDE_COOKIE"], flush=True)
"""

_DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "600"])
    os._exit(0)
os.wait()
"""

# Every process lives a moment, forks the next one into a session of its own and ends:
# whoever only looks at the process table and then kills always comes too late.
_COMET = """
import time
if os.fork() == 0:
    while True:
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(0.002)
time.sleep(600)
"""


def _python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def _shell(code: str) -> list[str]:
    return ["/bin/sh", "-c", code]


@dataclass(frozen=True, slots=True)
class Running:
    """A job that has said hello.

    Attributes:
        launcher: The ``ronde run`` process.
        marks: Entries of the environment by which its processes are known: one that
            launcher, agent and ranks carry, and the ranks' ``RONDE_COOKIE``.
        keeper: Process number of the agent's keeper.
        agent: Process number of the agent.
    """

    launcher: "subprocess.Popen[bytes]"
    marks: tuple[str, ...]
    keeper: int
    agent: int


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to end a job.

    Attributes:
        name: What happens.
        program: What each rank runs.
        exit_codes: What the launcher may end with.
        act: What is done to the job once all ranks have said hello.
        options: More words for ``ronde run``.
        is_early: It is done at any moment of the start instead.
    """

    name: str
    program: Sequence[str]
    exit_codes: tuple[int, ...]
    act: Callable[[Running], None] | None = None
    options: Sequence[str] = ()
    is_early: bool = False


@dataclass(slots=True)
class Tally:
    """What one fault came to."""

    runs: int = 0
    right: int = 0
    leftovers: int = 0
    seconds: list[float] = field(default_factory=list)
    wrong_codes: list[int | None] = field(default_factory=list)


def _sends(number: int) -> Callable[[Running], None]:
    return lambda running: running.launcher.send_signal(number)


def _interrupts_twice(running: Running) -> None:
    running.launcher.send_signal(signal.SIGINT)
    # The launcher answers the first one in words.
    _read_until(running.launcher.stderr, b"Ctrl-C kills")
    running.launcher.send_signal(signal.SIGINT)


_WITH_SESSION = _HELLO + "setsid sleep 600 & " + _SLEEP

FAULTS = (
    Fault("rank exits 3", _shell(_HELLO + _ONE + "exit 3"), (3,)),
    Fault(
        "rank raises",
        _shell(_HELLO + _ONE + f"exec {sys.executable} -I -S -c 'raise ValueError'"),
        (1,),
    ),
    Fault("rank segfaults", _shell(_HELLO + _ONE + "kill -SEGV $$"), (139,)),
    Fault(
        "rank ignores SIGTERM",
        _shell(
            'trap "" TERM; ' + _HELLO + '[ "$RANK" = 1 ] && exit 3; '
            "while :; do sleep 600; done"
        ),
        (3,),
        options=("--grace", "200ms"),
    ),
    Fault(
        "rank is stopped, another exits 3",
        _shell(_HELLO + '[ "$RANK" = 1 ] && exit 3; kill -STOP $$'),
        (3,),
    ),
    Fault("child in its own session", _shell("setsid sleep 600 & " + _HELLO), (0,)),
    Fault("daemonised child", _python(_GREETING + _DAEMON), (0,)),
    Fault(
        "child that forks away, SIGTERM",
        _python(_GREETING + _COMET),
        (143,),
        _sends(signal.SIGTERM),
    ),
    Fault("Ctrl-C", _shell(_WITH_SESSION), (130,), _sends(signal.SIGINT)),
    Fault(
        "Ctrl-C twice",
        _shell('trap "" INT TERM; ' + _HELLO + "while :; do sleep 600; done"),
        (130,),
        _interrupts_twice,
    ),
    Fault("SIGTERM", _shell(_WITH_SESSION), (143,), _sends(signal.SIGTERM)),
    Fault("launcher SIGKILLed", _shell(_WITH_SESSION), (-9,), _sends(signal.SIGKILL)),
    Fault(
        "agent SIGKILLed",
        _shell(_WITH_SESSION),
        (70,),
        lambda running: os.kill(running.agent, signal.SIGKILL),
    ),
    Fault(
        "keeper SIGKILLed",
        _shell(_WITH_SESSION),
        (70,),
        lambda running: os.kill(running.keeper, signal.SIGKILL),
    ),
    Fault(
        "launcher SIGKILLed while starting",
        _shell(_WITH_SESSION),
        (-9,),
        _sends(signal.SIGKILL),
        is_early=True,
    ),
    Fault(
        "SIGTERM while starting",
        _shell(_WITH_SESSION),
        # The latter before Python has come to the launcher's own first line.
        (143, -signal.SIGTERM),
        _sends(signal.SIGTERM),
        is_early=True,
    ),
)


def main() -> int:
    """Run the loop and print the table; return the exit code."""
    parser = argparse.ArgumentParser(description="Break jobs, count what is wrong.")
    parser.add_argument("--rounds", type=int, default=10, help="runs of each fault")
    parser.add_argument("--only", metavar="NAME", help="this fault only")
    options = parser.parse_args()
    faults = [f for f in FAULTS if options.only in (None, f.name)]
    if not faults:
        parser.error(f"--only must be one of {[f.name for f in FAULTS]}")
    tallies = {fault.name: Tally() for fault in faults}
    # Interleaved, so that a bad moment of the machine does not fall on one fault.
    for _ in range(options.rounds):
        for fault in faults:
            run_once(fault, tallies[fault.name])
    print_table(tallies)
    return 0 if all(is_clean(tally) for tally in tallies.values()) else 1


def run_once(fault: Fault, tally: Tally) -> None:
    """Run one job, break it, and note how it ended."""
    mark = f"{_MARK_NAME}={os.urandom(8).hex()}"
    with subprocess.Popen(
        [
            *("/usr/bin/env", mark),
            *(sys.executable, "-m", "ronde", "run", "-n", str(_SIZE), "--nested"),
            *fault.options,
            "--",
            *fault.program,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as launcher:
        try:
            if fault.is_early:
                time.sleep(random.uniform(0, _START_S))
                running = Running(launcher, (mark,), 0, 0)
            else:
                running = _meet(launcher, mark)
            begun = time.monotonic()
            if fault.act is not None:
                if not fault.is_early:
                    _check_detection(running)
                fault.act(running)
            code = _wait(launcher)
            # A launcher that was killed cannot wait for the end of what it started.
            patience_s = _DEADLINE_S if code is not None and code < 0 else 0.0
            left = _leftovers(running, patience_s)
            tally.seconds.append(time.monotonic() - begun)
        finally:
            launcher.kill()
    tally.runs += 1
    tally.leftovers += len(left)
    if code in fault.exit_codes:
        tally.right += 1
    else:
        tally.wrong_codes.append(code)
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def _meet(launcher: "subprocess.Popen[bytes]", mark: str) -> Running:
    """Wait until all ranks have said hello."""
    said = _read_until(launcher.stdout, b"ready ", _SIZE)
    cookie = "RONDE_COOKIE=" + said.rpartition(b"ready ")[2].split()[0].decode()
    keeper, agent = _launcher_processes(launcher.pid)
    return Running(launcher, (mark, cookie), keeper, agent)


def _read_until(stream: "IO[bytes] | None", words: bytes, times: int = 1) -> bytes:
    """Read a pipe until the words have come so often, or raise."""
    if stream is None:
        raise AssertionError("the launcher was started with pipes")
    fd = stream.fileno()
    ends_at = time.monotonic() + _DEADLINE_S
    said = b""
    while said.count(words) < times or not said.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0, ends_at - time.monotonic()))
        data = os.read(fd, 65536) if ready else b""
        if not data:
            raise TimeoutError(f"waited for {times} * {words!r}, got {said!r}")
        said += data
    return said


def _launcher_processes(launcher: int) -> tuple[int, int]:
    """Return the keeper and the agent of a launcher; (0, 0) when they are gone."""
    table = read_processes().values()
    for keeper in table:
        if keeper.parent == launcher:
            agents = [p.pid for p in table if p.parent == keeper.pid]
            return (keeper.pid, agents[0]) if agents else (keeper.pid, 0)
    return (0, 0)


def _wait(launcher: "subprocess.Popen[bytes]") -> int | None:
    try:
        launcher.communicate(timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        return None
    return launcher.returncode


def _leftovers(running: Running, patience_s: float) -> list[int]:
    """Return the processes of a job that are left when patience is at its end."""
    ends_at = time.monotonic() + patience_s
    while True:
        left = _carriers(running.marks)
        if not left or time.monotonic() >= ends_at:
            return left
        time.sleep(_POLL_S)


def _carriers(marks: Sequence[str]) -> list[int]:
    """Return the living processes that carry any of the marks."""
    wanted = {mark.encode() for mark in marks}
    found: list[int] = []
    for process in read_processes().values():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        if not process.is_zombie and wanted & set(environment.split(b"\0")):
            found.append(process.pid)
    return found


def _check_detection(running: Running) -> None:
    """Raise unless the ranks, which are alive now, are found by each mark."""
    for mark in running.marks:
        found = len(_carriers([mark]))
        if found < _SIZE:
            raise AssertionError(f"{found} processes carry {mark} of {_SIZE} ranks")


def is_clean(tally: Tally) -> bool:
    """Whether all ended with the right code and nothing was left."""
    return tally.right == tally.runs and tally.leftovers == 0


def print_table(tallies: dict[str, Tally]) -> None:
    """Print a line for each fault and all of it again as JSON."""
    print(
        f"{'fault':36} {'runs':>5} {'right':>6} {'left':>5} {'p50 s':>7} {'p95 s':>7}"
    )
    rows = []
    for name, tally in tallies.items():
        p50 = statistics.median(tally.seconds)
        p95 = sorted(tally.seconds)[int(0.95 * (len(tally.seconds) - 1))]
        print(
            f"{name:36} {tally.runs:5} {tally.right:6} {tally.leftovers:5} "
            f"{p50:7.3f} {p95:7.3f}"
        )
        rows.append(
            {
                "fault": name,
                "runs": tally.runs,
                "right": tally.right,
                "leftovers": tally.leftovers,
                "wrong_codes": tally.wrong_codes,
                "p50_s": round(p50, 4),
                "p95_s": round(p95, 4),
            }
        )
    total = sum(tally.runs for tally in tallies.values())
    is_ok = all(is_clean(tally) for tally in tallies.values())
    print(f"{total} runs, {'nothing' if is_ok else 'something'} wrong")
    print(json.dumps({"benchmark": "launch_faults", "is_ok": is_ok, "faults": rows}))


if __name__ == "__main__":
    sys.exit(main())
