"""Time the start and end of ``/bin/true`` on two ranks, against torchrun and mpirun.

The launchers take turns, so that a machine that slows down slows all of them. CPU time,
that of all processes, says what a launcher does even where others use the machine.

    python benchmarks/launch_start.py --alone --peer ../old/.venv/bin/python
    python benchmarks/launch_start.py --files
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import FrameType

BIN = Path(sys.executable).parent
RONDE = "ronde run"


def commands() -> dict[str, list[str]]:
    """Return the command of every launcher that is there."""
    candidates = {
        RONDE: [str(BIN / "ronde"), "run", "-n", "2", "--", "/bin/true"],
        "mpirun": [
            str(BIN / "mpirun"),
            *("--allow-run-as-root", "--oversubscribe", "-n", "2", "/bin/true"),
        ],
        "torchrun": [
            str(BIN / "torchrun"),
            *("--nproc-per-node", "2", "--no-python", "/bin/true"),
        ],
        "python -c pass": [sys.executable, "-c", "pass"],
    }
    return {name: c for name, c in candidates.items() if Path(c[0]).exists()}


def time_start(command: list[str]) -> tuple[float, float]:
    """Run a launcher to its end; return the seconds it took and those of CPU time."""
    begun = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        errors = process.stderr.read() if process.stderr else b""
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - begun
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command, None, errors)
    return seconds, used.ru_utime + used.ru_stime


def print_files() -> None:
    """Print ronde's files that the controller enters, but for their import."""
    entered: set[str] = set()
    pid, leave = os.getpid(), os._exit

    def enter(frame: FrameType, event: str, _: object) -> None:
        calls = [frame]
        while (outer := calls[-1].f_back) is not None:
            calls.append(outer)
        files = [c.f_code for c in calls if "/ronde/" in c.f_code.co_filename]
        is_import = any(code.co_name == "<module>" for code in files)
        if event == "call" and files[:1] == [frame.f_code] and not is_import:
            entered.add(frame.f_code.co_filename.rpartition("/ronde/")[2])

    def leave_with_report(code: int) -> None:
        if os.getpid() == pid:
            sys.setprofile(None)
            print(len(entered), "files:", *sorted(entered), flush=True)
        leave(code)

    os._exit = leave_with_report  # type: ignore[assignment]  by which it ends
    sys.argv = ["ronde", "run", "-n", "2", "/bin/true"]
    sys.setprofile(enter)
    import_module("ronde.cli.entry").main()


def main() -> None:
    """Print medians and write one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--alone", action="store_true", help="time ronde run only")
    parser.add_argument("--peer", metavar="PYTHON", help="time its ronde by turns")
    parser.add_argument("--files", action="store_true", help="show the files entered")
    options = parser.parse_args()
    if options.files:
        print_files()
        return
    timed = commands()
    if options.alone:
        timed = {RONDE: timed[RONDE]}
    if options.peer:
        words = ("-m", "ronde", "run", "-n", "2", "--", "/bin/true")
        timed = {RONDE: [sys.executable, *words], "peer": [options.peer, *words]}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in timed}
    for _ in range(options.rounds + 1):
        for name, command in timed.items():
            times[name].append(time_start(command))
    medians = {name: median_of(t[1:], 0) for name, t in times.items()}
    cpu = {name: median_of(t[1:], 1) for name, t in times.items()}
    print(f"{'':16} {'s':>6} {'x':>6} {'CPU s':>6}")
    for name, median in medians.items():
        ratio = median / medians[RONDE]
        print(f"{name:16} {median:6.3f} {ratio:6.2f} {cpu[name]:6.3f}")
    result = {"benchmark": "launch_start", "median_s": medians, "median_cpu_s": cpu}
    print(json.dumps(result))


def median_of(times: list[tuple[float, float]], column: int) -> float:
    """Return the median of one of the columns."""
    return statistics.median(row[column] for row in times)


if __name__ == "__main__":
    main()
