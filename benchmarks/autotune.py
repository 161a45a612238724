"""Tune bucket sizes, then time them and the default interleaved in one run.

Run it as ``ronde run -n 2 python benchmarks/autotune.py``. Prints what was chosen after
how many steps, and the ratio of the medians of rounds in which both take turns: above 1
the choice is faster, and 1 where the default stayed.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from training_step import MODELS, STEPS_PER_ROUND

from ronde.collectives import Communicator, ReduceOp, connect
from ronde.data_parallel import (
    BucketLimits,
    Reducer,
    ReducerGroup,
    ReducerOptions,
)
from ronde.tuning import TuningLog, TuningOptions
from ronde.world import read_rank_info


class Replica:
    """A model that trains on one rank, and its reducer; collective."""

    def __init__(
        self, name: str, communicator: Communicator, options: ReducerOptions
    ) -> None:
        build, shape = MODELS[name]
        torch.manual_seed(0)
        model = build()
        torch.manual_seed(communicator.rank)
        inputs = torch.randn(shape)
        labels = torch.randint(10, (shape[0],))
        self.reducer = Reducer(
            list(model.named_parameters()),
            ReducerGroup(communicator.duplicate()),
            options,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            self.reducer.step_done()

        self.step: Callable[[], None] = step


def tune(
    name: str, communicator: Communicator, amount: TuningOptions, log: Path | None
) -> tuple[BucketLimits, int]:
    """Train until the sizes are chosen; return them, and the number of steps."""
    file = TuningLog(log) if log is not None and communicator.rank == 0 else None
    tuning = replace(amount, log=file)
    replica = Replica(name, communicator, ReducerOptions(tuning=tuning))
    num_steps = 0
    while (limits := replica.reducer.rounds.tuned_limits) is None:
        replica.step()
        num_steps += 1
    replica.reducer.close()
    return limits, num_steps


def compare(
    name: str, communicator: Communicator, limits: BucketLimits, rounds: int
) -> dict[str, list[float]]:
    """Return seconds a step of both in every round, the slowest rank's."""
    replicas = {
        "default": Replica(name, communicator, ReducerOptions()),
        "tuned": Replica(name, communicator, ReducerOptions(limits=limits)),
    }
    order = random.Random(0)
    times: dict[str, list[float]] = {variant: [] for variant in replicas}
    for number in range(rounds + 1):
        for variant in order.sample(list(replicas), 2):
            communicator.barrier().wait()
            start = time.perf_counter()
            for _ in range(STEPS_PER_ROUND[name]):
                replicas[variant].step()
            elapsed = torch.tensor([time.perf_counter() - start])
            slowest = communicator.all_reduce(elapsed, ReduceOp.MAX).wait()
            if number:  # the first pays for first allocations
                times[variant].append(float(slowest) / STEPS_PER_ROUND[name])
    for replica in replicas.values():
        replica.reducer.close()
    return times


def main() -> None:
    """Tune and compare all models; print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps-per-sample", type=int, default=10)
    parser.add_argument("--max-samples", type=int, default=20)
    parser.add_argument("--log", type=Path, help="CSV file of the last model's samples")
    options = parser.parse_args()
    amount = TuningOptions(
        steps_per_sample=options.steps_per_sample, max_samples=options.max_samples
    )
    communicator = connect(read_rank_info())
    if communicator.rank == 0:
        print(f"{communicator.size} ranks, {torch.get_num_threads()} thread(s) each")
        print(f"{'model':10}{'steps':>7}{'first, others (MiB)':>22}"
              f"{'default ms':>12}{'tuned ms':>10}   ratio [quartiles]")  # fmt: skip
    for name in options.models:
        limits, num_steps = tune(name, communicator, amount, options.log)
        times = compare(name, communicator, limits, options.rounds)
        if communicator.rank == 0:
            pairs = zip(times["default"], times["tuned"], strict=True)
            low, middle, high = statistics.quantiles((a / b for a, b in pairs), n=4)
            sizes = f"{limits.first_bytes / 2**20:g}, {limits.other_bytes / 2**20:g}"
            default_ms, tuned_ms = (statistics.median(t) * 1e3 for t in times.values())
            print(f"{name:10}{num_steps:>7}{sizes:>22}{default_ms:>12.2f}"
                  f"{tuned_ms:>10.2f}   {middle:.3f} [{low:.3f}-{high:.3f}]",
                  flush=True)  # fmt: skip
    communicator.close()


if __name__ == "__main__":
    main()
