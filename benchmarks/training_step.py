"""Time a training step: ronde, DDP and no communication, interleaved in one run.

Run it as ``ronde run -n 2 python benchmarks/training_step.py``. Every round times a
few steps of each variant, in an order that changes from round to round, so that a
machine that slows down slows all of them. Figures are medians over rounds, ratios are
medians of the rounds' ratios. Everything is built anew several times: where its
memory happens to lie makes one copy of the same code some percent faster than another.
"none" is the ceiling: the same ranks, not reducing. A single rank has no peer to reduce
with, and ronde leaves the process group out; "ronde_group" has it take part all the
same, as DDP's does. "ronde_copied" has every gradient copied into its bucket.
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
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel

import ronde.torch as hvd
from ronde.collectives import Communicator
from ronde.collectives.engines.torch_distributed import TorchDistributedEngine
from ronde.data_parallel import Reducer, ReducerGroup, ReducerOptions
from ronde.records import Record, append_record

VARIANTS = ("none", "ronde", "ddp", "ddp_tuned")
OF_ONE_RANK = "ronde_group"
WITHOUT_FUSION = "ronde_copied"
STEPS_PER_ROUND = {"mnist_cnn": 20, "mlp": 5, "cnn": 3}
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
    if variant in ("ronde", WITHOUT_FUSION):
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            gradient_accumulation_fusion=variant == "ronde",
        )
    elif variant == OF_ONE_RANK:
        engine = TorchDistributedEngine(
            HashStore(), 0, 1, timeout_s=60.0, is_one_host=True
        )
        group = Communicator(engine)
        named = list(model.named_parameters())
        reducer = Reducer(named, ReducerGroup(group), ReducerOptions())
        optimizer.register_step_post_hook(lambda *_: reducer.step_done())

    def step() -> None:
        optimizer.zero_grad()
        loss: Tensor = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()

    return step


def time_rounds(
    name: str, options: argparse.Namespace, device: torch.device
) -> dict[str, list[float]]:
    """Return seconds a step of every variant in every round, the slowest rank's."""
    num_steps = options.steps or STEPS_PER_ROUND[name]
    order = random.Random(0)
    times: dict[str, list[float]] = {variant: [] for variant in options.variants}
    for _ in range(options.builds):
        steps = {v: make_step(name, v, device) for v in options.variants}
        for step in steps.values():
            for _ in range(3):
                step()
        for _ in range(options.rounds):
            for variant in order.sample(options.variants, len(options.variants)):
                hvd.barrier()
                start = time.perf_counter()
                for _ in range(num_steps):
                    steps[variant]()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                elapsed = torch.tensor([time.perf_counter() - start])
                slowest = hvd.allreduce(elapsed, op=hvd.Max)
                times[variant].append(float(slowest) / num_steps)
    return times


def ratio_to(ronde: list[float], other: list[float]) -> list[float]:
    """Return the quartiles of the rounds' ratios; above 1 ronde is faster."""
    pairs = zip(other, ronde, strict=True)
    return statistics.quantiles((a / b for a, b in pairs), n=4)


def main() -> None:
    """Run all models and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--builds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5, help="rounds a build")
    parser.add_argument("--steps", type=int, default=0, help="steps a round")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    choices = (*VARIANTS, OF_ONE_RANK, WITHOUT_FUSION)
    parser.add_argument("--variants", nargs="+", choices=choices, default=VARIANTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="append a record to this file")
    options = parser.parse_args()
    hvd.init()
    if OF_ONE_RANK in options.variants and hvd.size() > 1:
        parser.error(f"--variants {OF_ONE_RANK} is for 1 rank, got {hvd.size()}")
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
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, {torch.get_num_threads()} thread(s) each")
        print("ms a step, and its ratio to ronde's: median [quartiles] of the rounds")
        print(f"{'model':10}" + "".join(f"{v:>29}" for v in options.variants))
    for name in options.models:
        times = time_rounds(name, options, device)
        if hvd.rank() == 0:
            report(name, times, options.json)


def report(name: str, times: dict[str, list[float]], path: Path | None) -> None:
    """Print a line and write a record."""
    medians = {v: statistics.median(t) * 1e3 for v, t in times.items()}
    ratios = {v: ratio_to(times["ronde"], t) for v, t in times.items()}
    cells = [
        f"{medians[v]:7.1f}  {r[1]:.3f} [{r[0]:.3f}-{r[2]:.3f}]"
        for v, r in ratios.items()
    ]
    print(f"{name:10}" + "".join(f"{cell:>29}" for cell in cells), flush=True)
    if path is not None:
        values = {
            "model": name,
            "num_ranks": hvd.size(),
            "median_step_ms": medians,
            "ratio_to_ronde_quartiles": ratios,
            "step_s": times,
        }
        append_record(path, Record(kind="training_step", values=values))


if __name__ == "__main__":
    main()
