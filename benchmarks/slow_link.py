"""Measure all_reduce over a slow line: Gloo, the ring by schedule, and two levels.

Makes two network namespaces joined by a line of 1 Gbit/s, starts ranks in them and
measures, interleaved, first one rank on each side, then two. Run it as root:

    python benchmarks/slow_link.py --json slow_link.jsonl

``%line`` compares the bus bandwidth with the most that the line lets through: a node
must send (N-1)/N of the vector twice, so busbw is at most line * N/(N-1) * (n-1)/n for
n ranks on N nodes. Headers and acknowledgements take 4 to 6 % of the line.
"""

import argparse
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from two_namespaces import LineError, Side, ended, joined_namespaces

from ronde.collectives import Communicator, ReduceOp, connect
from ronde.launch.environments import own_environment
from ronde.records import Record, append_record
from ronde.world import read_rank_info

ENGINES = {
    1: {"gloo": ("gloo", ""), "ring": ("scheduled", "ring")},
    2: {
        "gloo": ("gloo", ""),
        "hierarchical": ("hierarchical", ""),
        "ring": ("scheduled", "ring"),
    },
}
"""For each number of ranks on a side: the engine and algorithm of each peer."""
SIZES = tuple(64 * 1024 * 4**i for i in range(5))
NUM_SIDES = 2
_ROUND_S = 0.15
_MAX_CALLS = 50
_GBIT_BYTES = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a measurement.

    Attributes:
        rate_gbit: What the line lets through each way.
        sizes: Bytes of the tensor.
        rounds: How often each is measured.
        per_side: Ranks on a side.
    """

    rate_gbit: float
    sizes: Sequence[int]
    rounds: int
    per_side: int

    @property
    def bound_gb_per_s(self) -> float:
        """The most that busbw can be."""
        size = NUM_SIDES * self.per_side
        line = self.rate_gbit * _GBIT_BYTES / 1e9
        return line * NUM_SIDES / (NUM_SIDES - 1) * (size - 1) / size

    def __str__(self) -> str:
        return (
            f"{NUM_SIDES} sides x {self.per_side} ranks: line {self.rate_gbit:g} "
            f"Gbit/s, busbw at most {self.bound_gb_per_s:.4f} GB/s; medians of "
            f"{self.rounds} rounds"
        )


def main() -> int:
    """Make the line, measure, print and record."""
    options = parse(sys.argv[1:])
    if options.rank:
        measure_as_rank(Plan(1.0, options.sizes, options.rounds, options.per_side[0]))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        try:
            with joined_namespaces(f"{options.rate:g}gbit") as sides:
                for per_side in options.per_side:
                    plan = Plan(options.rate, options.sizes, options.rounds, per_side)
                    print(plan, flush=True)
                    report(plan, run_ranks(plan, sides), options.json)
        except LineError as error:
            print(f"slow_link: {error}", file=sys.stderr)
            return 1
        return 0
    return 130


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=float, default=1.0, help="Gbit/s of the line")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--per-side", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--json", type=Path, help="file to append a record to")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def run_ranks(plan: Plan, sides: tuple[Side, Side]) -> dict[str, dict[str, Any]]:
    """Start ranks on both sides; return rank 0's figures, by size and engine."""
    command = [sys.executable, str(Path(__file__).resolve()), "--rank"]
    command += ["--rounds", str(plan.rounds), "--per-side", str(plan.per_side)]
    command += ["--sizes", *map(str, plan.sizes)]
    port = _free_port()
    processes: list[subprocess.Popen[str]] = []
    with ended(processes):
        for index, side in enumerate(sides):
            for place in range(plan.per_side):
                rank = index * plan.per_side + place
                environment = _environment(rank, place, plan, sides[0], port)
                processes.append(side.start(command, environment))
        text, _ = processes[0].communicate()
        codes = [process.wait() for process in processes]
    if any(codes) or not text:
        raise LineError(f"every rank must end with 0, got {codes}; see above.")
    return json.loads(text)


def _environment(
    rank: int, place: int, plan: Plan, first: Side, port: int
) -> dict[str, str]:
    kept = ("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV")
    own = own_environment()
    return {name: own[name] for name in kept if name in own} | {
        "RANK": str(rank),
        "WORLD_SIZE": str(NUM_SIDES * plan.per_side),
        "LOCAL_RANK": str(place),
        "LOCAL_WORLD_SIZE": str(plan.per_side),
        "MASTER_ADDR": first.address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        # The other side's address has no name, which torch would remark on.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def _free_port() -> int:
    """Return a port that is free here; the namespaces have all of theirs free."""
    with socket.socket() as bound:
        bound.bind(("", 0))
        return bound.getsockname()[1]


def measure_as_rank(plan: Plan) -> None:
    """Measure all engines and sizes; rank 0 prints the results as JSON."""
    torch.set_num_threads(1)
    claim = read_rank_info()
    names = ENGINES[plan.per_side]
    communicators = {
        name: connect(claim, engine=engine, algorithm=algorithm, timeout_s=60.0)
        for name, (engine, algorithm) in names.items()
    }
    clock = communicators["gloo"].duplicate()
    found = {size: _measure_size(communicators, clock, size, plan.rounds)
             for size in plan.sizes}  # fmt: skip
    if claim.rank == 0:
        print(json.dumps(found))
    clock.barrier().wait()
    for communicator in (*communicators.values(), clock):
        communicator.close()


def _measure_size(
    communicators: Mapping[str, Communicator],
    clock: Communicator,
    num_bytes: int,
    rounds: int,
) -> dict[str, list[float]]:
    """Return the slowest rank's seconds a call, for each engine and round."""

    def slowest(seconds: float) -> float:
        slowest = torch.tensor([seconds], dtype=torch.float64)
        return float(clock.all_reduce(slowest, ReduceOp.MAX).wait().item())

    def time_calls(name: str, count: int) -> float:
        clock.barrier().wait()
        start = time.perf_counter()
        for _ in range(count):
            communicators[name].all_reduce(tensors[name]).wait()
        return slowest((time.perf_counter() - start) / count)

    tensors, counts = {}, {}
    for name, communicator in communicators.items():
        tensor = communicator.allocate(num_bytes // 4, torch.float32)
        tensors[name] = tensor.fill_(communicator.rank + 1)
        time_calls(name, 1)
        total = communicator.size * (communicator.size + 1) / 2
        if not bool((tensor == total).all()):
            raise SystemExit(f"{name} must sum {num_bytes} bytes to {total}")
        tensor.zero_()
        counts[name] = min(_MAX_CALLS, 1 + int(_ROUND_S / time_calls(name, 1)))
    times: dict[str, list[float]] = {name: [] for name in communicators}
    for index in range(rounds):
        order = sorted(times)
        random.Random(index).shuffle(order)
        for name in order:
            times[name].append(time_calls(name, counts[name]))
    return times


def report(plan: Plan, found: Mapping[str, Any], path: Path | None) -> None:
    """Print medians, their shares of the line's rate, and ratios to Gloo."""
    size = NUM_SIDES * plan.per_side
    rows: list[dict[str, Any]] = []
    for num_bytes, times in found.items():
        cells = [f"{int(num_bytes):>9}"]
        for name, seconds in times.items():
            busbw = 2 * (size - 1) / size * int(num_bytes) / 1e9
            busbw /= statistics.median(seconds)
            ratio = statistics.median(
                gloo / own for gloo, own in zip(times["gloo"], seconds, strict=True)
            )
            share = busbw / plan.bound_gb_per_s
            rows.append(
                {
                    "size_bytes": int(num_bytes),
                    "engine": name,
                    "busbw_gb_per_s": busbw,
                    "share_of_line": share,
                    "ratio_to_gloo": ratio,
                    "seconds": seconds,
                }
            )
            cell = f"{name} {busbw:.4f} GB/s {100 * share:5.1f} %line"
            cells.append(cell if name == "gloo" else f"{cell} {ratio:.2f} x gloo")
        print("  |  ".join(cells), flush=True)
    if path is not None:
        values = {
            "rate_gbit_per_s": plan.rate_gbit,
            "ranks_per_side": plan.per_side,
            "bound_gb_per_s": plan.bound_gb_per_s,
            "rows": rows,
        }
        append_record(path, Record("slow_link", values))


if __name__ == "__main__":
    sys.exit(main())
