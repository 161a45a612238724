"""Time training steps with and without the search for drift, in turn.

Run it as ``ronde run -n 2 python benchmarks/drift_cost.py``. One model and optimizer
take blocks of steps, in which the search is on and off by turns: where memory happens
to lie is the same for both. A figure is the median over all steps; the ratio's interval
is that of the medians of ten parts of the run. Means are without the slowest 2 %.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel
from training_step import MODELS

import ronde.torch as hvd

STEPS_PER_BLOCK = 16


def make(name: str, how: str) -> tuple[Callable[[], None], Callable[[bool], None]]:
    """Return a step and a switch of the search."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build()
    inputs, labels = torch.randn(shape), torch.randint(10, (shape[0],))
    if how == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if how == "hvd":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    step()
    drift = dist.group.WORLD.drift
    if how == "hvd":
        drift = optimizer.reducer.rounds.checks.drift

    def turn(is_on: bool) -> None:  # noqa: FBT001
        drift._is_over = not is_on  # noqa: SLF001

    return step, turn


def main() -> None:
    """Print medians and their ratio for each model and front end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=["mnist_cnn", "mlp"]
    )
    options = parser.parse_args()
    hvd.init()
    dist.init_process_group("ronde")
    for name in options.models:
        for how in ("hvd", "ddp"):
            step, turn = make(name, how)
            times: dict[bool, list[float]] = {False: [], True: []}
            for block in range(options.blocks):
                is_on = bool(block % 2)
                turn(is_on)
                for _ in range(STEPS_PER_BLOCK):
                    begun = time.perf_counter()
                    step()
                    times[is_on].append(time.perf_counter() - begun)
            if hvd.rank() == 0:
                report(f"{name} {how}", times)
    dist.destroy_process_group()
    hvd.shutdown()


def report(name: str, times: dict[bool, list[float]]) -> None:
    """Print a line."""
    on, off = statistics.median(times[True]), statistics.median(times[False])
    means = {
        k: statistics.mean(sorted(v)[: len(v) * 98 // 100]) for k, v in times.items()
    }
    part = len(times[True]) // 10
    ratios = sorted(
        statistics.median(times[True][start : start + part])
        / statistics.median(times[False][start : start + part])
        for start in range(0, 10 * part, part)
    )
    print(
        f"{name:14} off {off * 1e3:7.3f} ms, on {on * 1e3:7.3f} ms: "
        f"{on / off:.4f} [{ratios[2]:.4f}-{ratios[7]:.4f}], means "
        f"{means[True] / means[False]:.4f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
