"""Compare predicted with measured steps: lines, models and seeds of plan validate.

Each case is one ``ronde plan validate --json``, whose object is appended to a file:

    python benchmarks/plan_validate.py --json plan_validate.jsonl

Run it as root on a quiet machine. The table has the median, the 90 % quantile and the
largest of the absolute errors, and how many intervals of 80 % held, for each line and
for all; sizes for which the machine is too small are counted apart.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

LINES = ("100Mbit/s", "1Gbit/s", "unlimited", "memory")
"""Rates of the hosts' lines; ``memory`` is one host's shared memory."""
MODELS = ("resnet", "vgg")


def main() -> None:
    """Run all cases, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-n", default="1,2,4,8", help="numbers of ranks")
    parser.add_argument("--lines", nargs="+", default=LINES)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--json", type=Path, required=True, help="file to append to")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {line: [] for line in options.lines}
    for case in itertools.product(options.lines, options.models, options.seeds):
        line, model, seed = case
        print(f"# {line} {model} {seed}, load {os.getloadavg()[0]:.1f}", flush=True)
        content = run_case(options.n, line, model, seed)
        with options.json.open("a") as file:
            file.write(json.dumps({"line": line, **content}) + "\n")
        found[line] += content["predicted"]
    print(f"{'line':>10} {'steps':>6} {'median':>8} {'P90':>8} {'most':>8} {'held':>8}")
    for line, cases in found.items():
        print(row(line, cases))
    print(row("all", list(itertools.chain(*found.values()))))


def run_case(sizes: str, line: str, model: str, seed: int) -> dict[str, Any]:
    """Return the object of one command; its log goes to standard error."""
    words = ["-n", sizes, "--model", model, "--seed", str(seed), "--json"]
    words += [] if line == "memory" else ["--rate", line]
    command = [sys.executable, "-m", "ronde", "plan", "validate", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1, 2):
        raise SystemExit(done.returncode)
    return json.loads(done.stdout)


def row(name: str, cases: Sequence[dict[str, Any]]) -> str:
    """Return a line of the table."""
    valid = [case for case in cases if case["is_valid"]]
    if not valid:
        return f"{name:>10} {0:>6}   {len(cases)} too small"
    errors = np.abs([100 * case["error"] for case in valid])
    figures = [np.median(errors), np.quantile(errors, 0.9), errors.max()]
    held = sum(case["is_inside"] for case in valid)
    text = " ".join(f"{each:>6.1f} %" for each in figures)
    rest = f", {len(cases) - len(valid)} too small" if len(cases) > len(valid) else ""
    return f"{name:>10} {len(valid):>6} {text} {held:>4}/{len(valid)}{rest}"


if __name__ == "__main__":
    main()
