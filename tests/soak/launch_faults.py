"""Start jobs under ``ronde run``, break them, and count wrong ends.

For each fault of ``launch_fault_kinds``: how often exit code, first cause and the words
quoted were right, how many processes and files were left behind, and how long the end
took. A process of the job is known by its environment: by the job's ``RONDE_COOKIE``,
and by a mark of the run that launcher and agent carry too. The last line is JSON. Exits
with 1 if anything was wrong.

    python -m tests.soak.launch_faults --rounds 11 --jobs 3
"""

import argparse
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.figures import reset_signals, show
from tests.soak.launch_fault_kinds import (
    ANY,
    DEADLINE_S,
    FAULTS,
    Fault,
    Running,
    read_until,
)

from ronde.launch import own_environment
from ronde.processes import ProcessStat, read_processes, signal_process

_POLL_S = 0.002
_START_S = 0.15
_MARK_NAME = "LAUNCH_FAULTS_RUN"
_SHOWN = 300


@dataclass(slots=True)
class Tally:
    """The results of one kind of fault."""

    seconds: list[float] = field(default_factory=list[float])
    wrong: list[str] = field(default_factory=list[str])


def main() -> int:
    """Run the loop and print the table; return the exit code."""
    reset_signals()
    parser = argparse.ArgumentParser(description="Break jobs, count what is wrong.")
    parser.add_argument("--rounds", type=int, default=10, help="runs of each fault")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    parser.add_argument("--only", metavar="WORDS", help="faults with these words only")
    parser.add_argument(
        "--quick", action="store_true", help="leave out what takes long"
    )
    parser.add_argument("--kinds", type=int, metavar="N", help="draw N of the faults")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    random.seed(options.seed)
    faults = [f for f in FAULTS if (options.only or "") in f.name]
    if options.quick:
        faults = [fault for fault in faults if not fault.is_long]
    if not faults:
        parser.error(f"--only must be in one of {[f.name for f in FAULTS]}")
    if options.kinds:
        faults = random.sample(faults, min(options.kinds, len(faults)))
    tallies = run_all(faults, options.rounds, options.jobs)
    for fault in faults:
        if fault.name not in tallies:
            print(f"not possible here: {fault.name}")
    seconds = {name: tally.seconds for name, tally in tallies.items()}
    wrong = {name: tally.wrong for name, tally in tallies.items()}
    return 0 if show("launch_faults", seconds, wrong) else 1


def run_all(
    faults: Sequence[Fault], num_rounds: int, num_jobs: int
) -> dict[str, Tally]:
    """Run faults, several at a time; return the results of each, by name."""
    possible = [fault for fault in faults if fault.is_possible()]
    tallies = {fault.name: Tally() for fault in possible}
    with ThreadPoolExecutor(num_jobs) as pool:
        # Interleaved, so that a bad moment of the machine does not fall on one fault.
        runs = [
            pool.submit(run_once, fault, tallies[fault.name])
            for _ in range(num_rounds)
            for fault in possible
        ]
        for run in runs:
            run.result()
    return tallies


def run_once(fault: Fault, tally: Tally) -> None:
    """Run one job, break it, and record its end."""
    mark = f"{_MARK_NAME}={os.urandom(8).hex()}"
    with tempfile.TemporaryDirectory(prefix="fault-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        with _start(fault, folder, mark) as launcher:
            try:
                begun = time.monotonic()
                code, said, running, took_s = _break(fault, launcher, folder, mark)
                # A launcher that was killed cannot wait for the end of what it started.
                is_killed = code is not None and code < 0
                left = _leftovers(running, DEADLINE_S if is_killed else 0.0)
            except (AssertionError, TimeoutError, OSError) as error:
                code, said, took_s = None, repr(error), time.monotonic() - begun
                running, is_killed = Running(launcher, (mark,), folder), True
                launcher.kill()
                left = _leftovers(running, DEADLINE_S)
            finally:
                launcher.kill()
        for process in left:
            signal_process(process, signal.SIGKILL)
        wrong = _complain(fault, folder, code, said)
        files = [] if is_killed else [p.name for p in (folder / "tmp").glob("ronde-*")]
    tally.seconds.append(took_s)
    if left or files:
        names = [f"{each.name} (pid {each.pid}, {each.state})" for each in left]
        tally.wrong.append(f"left: {', '.join(names + files)}")
    if wrong:
        tally.wrong.append(wrong)


def _start(fault: Fault, folder: Path, mark: str) -> "subprocess.Popen[bytes]":
    """Start the job, on a terminal of its own where the fault wants one."""
    name, _, value = mark.partition("=")
    env = own_environment() | {name: value, "FOLDER": str(folder)}
    env["TMPDIR"] = str(folder / "tmp")
    options = [word.replace("@", str(folder)) for word in fault.options]
    words = [
        *(*fault.behind, sys.executable, "-m", "ronde", "run", "-n", str(fault.size)),
        *("--nested", "--error-file", str(folder / "report"), *options),
        *("--", *fault.program),
    ]
    if not fault.on_terminal:
        return subprocess.Popen(
            words,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    ours, theirs = os.openpty()
    lead = "import fcntl, os, sys; fcntl.ioctl(0, int(sys.argv[1]), 0); "
    lead += "os.execvp(sys.argv[2], sys.argv[2:])"
    launcher = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", lead, str(termios.TIOCSCTTY), *words],
        env=env,
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    os.close(theirs)
    fcntl.fcntl(ours, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    launcher.stdout = os.fdopen(ours, "rb", buffering=0)
    return launcher


def _break(
    fault: Fault, launcher: "subprocess.Popen[bytes]", folder: Path, mark: str
) -> tuple[int | None, str, Running, float]:
    """Cause the fault; return exit code, stderr, the job and the seconds."""
    running = Running(launcher, (mark,), folder)
    if fault.is_early:
        time.sleep(random.uniform(0, _START_S))
    elif fault.act is not None:
        running = _cause(fault, launcher, folder, mark)
    begun = time.monotonic()
    if fault.act is not None:
        fault.act(running)
    try:
        _, said = launcher.communicate(timeout=DEADLINE_S)
        code = launcher.returncode
        if code == -signal.SIGKILL and fault.behind:
            # What it was started with is gone; the job goes on and writes a report.
            _leftovers(running, DEADLINE_S)
    except subprocess.TimeoutExpired:
        code, said = None, b""
    return code, said.decode(errors="replace"), running, time.monotonic() - begun


def _cause(
    fault: Fault, launcher: "subprocess.Popen[bytes]", folder: Path, mark: str
) -> Running:
    """Wait until all ranks have said hello."""
    said = read_until(launcher.stdout, b"ready ", fault.size).decode()
    words = [line.partition("ready ")[2].split() for line in said.splitlines()]
    hellos = [each for each in words if each]
    ranks = {int(rank): int(pid) for _, rank, pid in hellos}
    marks = (mark, f"RONDE_COOKIE={hellos[0][0]}")
    for each in marks:
        found = len(_carriers([each]))
        if found < fault.size:
            raise AssertionError(
                f"{found} processes carry {each} of {fault.size} ranks"
            )
    agent = read_processes()[ranks[0]].parent
    keeper = read_processes()[agent].parent
    return Running(launcher, marks, folder, ranks, keeper, agent)


def _complain(fault: Fault, folder: Path, code: int | None, said: str) -> str:
    """Return the fault of an end; empty if it is right."""
    cause, epoch = _read_report(folder / "report")
    is_right = any(
        code == expected and rank in (ANY, cause) for expected, rank in fault.ends
    )
    if not is_right:
        return f"code {code}, cause {cause}: {said[-_SHOWN:]}"
    if fault.quote not in said:
        return f"{fault.quote!r} is not in {said[-_SHOWN:]}"
    if epoch not in (None, fault.epoch):
        return f"the last start was {epoch}"
    return ""


def _read_report(path: Path) -> tuple[int | str | None, int | None]:
    """Return the cause by the job's report, and which start of the ranks it was."""
    if not path.exists():
        return "unknown", None
    report = json.loads(path.read_text())
    cause = (report["verdict"] or {}).get("cause")
    return cause and cause.get("rank", "host"), report["epoch"]


def _leftovers(running: Running, patience_s: float) -> list[ProcessStat]:
    """Return the processes of a job that are left when patience is at its end."""
    ends_at = time.monotonic() + patience_s
    while True:
        left = _carriers(running.marks)
        if not left or time.monotonic() >= ends_at:
            return left
        time.sleep(_POLL_S)


def _carriers(marks: Sequence[str]) -> list[ProcessStat]:
    """Return the living processes that carry any of the marks."""
    wanted = {mark.encode() for mark in marks}
    found: list[ProcessStat] = []
    for process in read_processes().values():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        if not process.is_zombie and wanted & set(environment.split(b"\0")):
            found.append(process)
    return found


if __name__ == "__main__":
    sys.exit(main())
