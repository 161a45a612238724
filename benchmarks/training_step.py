"""Time a training step: ronde, DDP and no communication, interleaved in one run.

Run it as ``ronde run -n 2 python benchmarks/training_step.py``. Every round times a
few steps of each variant, in an order that changes from round to round, so that a
machine that slows down slows all of them. Figures are medians over rounds, ratios are
medians of the rounds' ratios. "none" is the ceiling: the same ranks, not reducing.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ronde.torch as hvd
from ronde.records import Record, append_record

VARIANTS = ("none", "ronde", "ddp", "ddp_tuned")
CPU = torch.device("cpu")


class MnistNet(nn.Sequential):
    """The network of Horovod's MNIST example: 0.02 M parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10),
        )  # fmt: skip


class Mlp(nn.Sequential):
    """Three wide layers: 15.8 M parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(784, 4096), nn.ReLU(),
            nn.Linear(4096, 3072), nn.ReLU(), nn.Linear(3072, 10),
        )  # fmt: skip


class Cnn(nn.Sequential):
    """Seven convolutions on 32 x 32 pixels: 8.6 M parameters."""

    def __init__(self) -> None:
        widths = [3, 64, 128, 256, 512, 512, 512, 512]
        layers: list[nn.Module] = []
        for number, (before, after) in enumerate(pairwise(widths)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
            if number in (1, 3, 5):
                layers.append(nn.MaxPool2d(2))
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
        super().__init__(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mnist_cnn": (MnistNet, (100, 1, 28, 28)),
    "mlp": (Mlp, (32, 784)),
    "cnn": (Cnn, (8, 3, 32, 32)),
}


def make_step(
    name: str, variant: str, device: torch.device = CPU
) -> Callable[[], None]:
    """Build model, data and optimizer of one variant and return its step."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build().to(device)
    torch.manual_seed(hvd.rank())
    inputs = torch.randn(shape).to(device)
    labels = torch.randint(10, (shape[0],)).to(device)
    if variant == "ddp":
        model = DistributedDataParallel(model)
    elif variant == "ddp_tuned":
        model = DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if variant == "ronde":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss: Tensor = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()

    return step


def time_rounds(
    name: str, num_rounds: int, steps_per_round: int, device: torch.device
) -> dict[str, list[float]]:
    """Return seconds a step of every variant in every round, the slowest rank's."""
    steps = {variant: make_step(name, variant, device) for variant in VARIANTS}
    for step in steps.values():
        for _ in range(3):
            step()
    order = random.Random(0)
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(num_rounds):
        for variant in order.sample(VARIANTS, len(VARIANTS)):
            hvd.barrier()
            start = time.perf_counter()
            for _ in range(steps_per_round):
                steps[variant]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elapsed = torch.tensor([time.perf_counter() - start])
            slowest = hvd.allreduce(elapsed, op=hvd.Max)
            times[variant].append(float(slowest) / steps_per_round)
    return times


def ratio(over: list[float], under: list[float]) -> float:
    """Return the median of the rounds' ratios."""
    pairs = zip(over, under, strict=True)
    return statistics.median(a / b for a, b in pairs)


def main() -> None:
    """Run all models and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=0, help="steps a round")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="append a record to this file")
    options = parser.parse_args()
    hvd.init()
    device = CPU
    if options.device == "cuda":
        device = torch.device("cuda", hvd.local_rank())
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as own_folder:
        folder = hvd.broadcast_object(own_folder)
        torch.distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{folder}/store",
            rank=hvd.rank(),
            world_size=hvd.size(),
        )
        measure(options, device)
        torch.distributed.destroy_process_group()
        hvd.barrier()
    hvd.shutdown()


def measure(options: argparse.Namespace, device: torch.device) -> None:
    """Time every model that was asked for and report on rank 0."""
    default_steps = {"mnist_cnn": 20, "mlp": 5, "cnn": 3}
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, {torch.get_num_threads()} thread(s) each")
        print(f"{'model':10} {'none':>9} {'ronde':>9} {'DDP':>9} {'DDP tuned':>9}"
              f" {'DDP/ronde':>10} {'tuned/ronde':>11} {'none/ronde':>10}")  # fmt: skip
    for name in options.models:
        steps = options.steps or default_steps[name]
        times = time_rounds(name, options.rounds, steps, device)
        if hvd.rank() == 0:
            report(name, times, options.json)


def report(name: str, times: dict[str, list[float]], path: Path | None) -> None:
    """Print a line and write a record."""
    medians = {v: statistics.median(times[v]) * 1e3 for v in VARIANTS}
    ratios = {v: ratio(times[v], times["ronde"]) for v in VARIANTS}
    cells = "".join(f" {medians[v]:6.1f} ms" for v in VARIANTS)
    print(f"{name:10}{cells} {ratios['ddp']:10.3f} {ratios['ddp_tuned']:11.3f}"
          f" {ratios['none']:10.3f}", flush=True)  # fmt: skip
    if path is not None:
        values = {
            "model": name,
            "num_ranks": hvd.size(),
            "num_rounds": len(times["ronde"]),
            "median_step_ms": medians,
            "median_ratio_to_ronde": ratios,
            "step_s": times,
        }
        append_record(path, Record(kind="training_step", values=values))


if __name__ == "__main__":
    main()
