"""Time the start and end of ``/bin/true`` on two ranks, against torchrun and mpirun.

The launchers take turns, so that a machine that slows down slows all of them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent


def commands() -> dict[str, list[str]]:
    """Return the command of every launcher that is there."""
    candidates = {
        "ronde run": [str(BIN / "ronde"), "run", "-n", "2", "--", "/bin/true"],
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


def main() -> None:
    """Print medians and write one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in commands()}
    for _ in range(options.rounds + 1):
        for name, command in commands().items():
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(t[1:]) for name, t in times.items()}
    for name, median in medians.items():
        print(f"{name:16} {median:6.3f} s  {median / medians['ronde run']:6.2f} x")
    print(json.dumps({"benchmark": "launch_start", "median_s": medians}))


if __name__ == "__main__":
    main()
