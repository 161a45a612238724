"""Train on Fashion-MNIST with every compression: test accuracy and bytes a step.

Run it as ``ronde run -n 2 python benchmarks/convergence.py``. The same model, seed and
order of images for all; what differs is what travels. "bytes a step" is what the
all-reduces of a step are given on one rank. Nothing is written unless ``--json`` says
where. On Debian ``apt-get install dataset-fashion-mnist`` puts the images in place.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ronde.collectives import Communicator, connect
from ronde.data_parallel import Compression, Reducer, ReducerGroup, ReducerOptions
from ronde.records import Record, append_record
from ronde.world import read_rank_info

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from fashion_mnist import make_model, read_fashion
from training import Images

DATA = Path("/usr/share/datasets/fashion-mnist")
COMPRESSIONS = {
    "none": Compression.none,
    "fp16": Compression.fp16,
    "bf16": Compression.bf16,
}


@dataclass
class Course:
    """The losses and accuracies of one training.

    Attributes:
        losses: Mean training loss of each epoch, on rank 0's images.
        accuracies: Share of the test images that were recognised after each epoch.
        step_bytes: What the all-reduces of one step are given.
        step_s: Median duration of a step.
    """

    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    step_bytes: int = 0
    step_s: float = 0.0


class Counter:
    """Counts the bytes that a communicator's all-reduces are given."""

    def __init__(self, communicator: Communicator) -> None:
        self.num_bytes = 0
        self._all_reduce = communicator.all_reduce
        communicator.all_reduce = self._counted

    def _counted(self, tensor: Tensor, *args: object, **options: object) -> object:
        self.num_bytes += tensor.numel() * tensor.element_size()
        return self._all_reduce(tensor, *args, **options)


class Training:
    """One rank's part of one training.

    Collective to create and to use.

    Args:
        communicator: All ranks.
        compression: What travels.
        lr: Highest learning rate, for all ranks together.
        num_steps: Of all epochs.
        seed: Of the first weights.
    """

    def __init__(
        self,
        communicator: Communicator,
        compression: object,
        *,
        lr: float,
        num_steps: int,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        self.model = make_model()
        self._optimizer = torch.optim.SGD(
            self.model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4
        )
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer, lr, total_steps=num_steps
        )
        twin = communicator.duplicate()
        self.counter = Counter(twin)
        named = list(self.model.named_parameters())
        options = ReducerOptions(compressor=compression)
        self._reducer = Reducer(named, ReducerGroup(twin), options)

    def step(self, inputs: Tensor, labels: Tensor) -> float:
        """Take one step and return this rank's loss."""
        self._optimizer.zero_grad()
        loss = cross_entropy(self.model(inputs), labels)
        loss.backward()
        self._optimizer.step()
        self._reducer.step_done()
        self._schedule.step()
        return loss.item()

    def close(self) -> None:
        """Give the communicator back."""
        self._reducer.close()


def batches(
    num_images: int, communicator: Communicator, batch: int, seed: int
) -> list[Tensor]:
    """Return the indices of this rank's images in every step of an epoch."""
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(seed))
    step_size = batch * communicator.size
    starts = range(0, num_images - step_size + 1, step_size)
    return [order[s : s + step_size][communicator.rank :: communicator.size]
            for s in starts]  # fmt: skip


@torch.inference_mode()
def accuracy(model: nn.Module, images: Images, communicator: Communicator) -> float:
    """Return the share of the test images that are recognised; collective."""
    mine = slice(communicator.rank, None, communicator.size)
    inputs, labels = images.test[mine], images.test_labels[mine]
    model.eval()
    pairs = zip(inputs.split(500), labels.split(500), strict=True)
    num_correct = sum((model(x).argmax(1) == y).sum() for x, y in pairs)
    model.train()
    total = communicator.all_reduce(torch.as_tensor(num_correct).clone()).wait()
    return int(total) / len(images.test)


def train(
    communicator: Communicator,
    images: Images,
    compression: object,
    options: argparse.Namespace,
    report: Callable[[Course], None] = lambda _: None,
) -> Course:
    """Train once; collective.

    Args:
        communicator: All ranks.
        images: All of them, equal on every rank.
        compression: What travels.
        options: ``epochs``, ``batch``, ``lr`` and ``seed``.
        report: Is called after every epoch.
    """
    num_images = len(images.train)
    num_steps = num_images // (options.batch * communicator.size)
    training = Training(
        communicator,
        compression,
        lr=options.lr,
        num_steps=options.epochs * num_steps,
        seed=options.seed,
    )
    course, times = Course(), []
    for epoch in range(options.epochs):
        losses = []
        seed = 1000 * options.seed + epoch
        for mine in batches(num_images, communicator, options.batch, seed):
            inputs, labels = images.train[mine], images.train_labels[mine]
            start, before = time.perf_counter(), training.counter.num_bytes
            losses.append(training.step(inputs, labels))
            times.append(time.perf_counter() - start)
            course.step_bytes = training.counter.num_bytes - before
        course.losses.append(statistics.fmean(losses))
        course.accuracies.append(accuracy(training.model, images, communicator))
        course.step_s = statistics.median(times)
        report(course)
    training.close()
    return course


def main() -> None:
    """Train with each and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="images a rank and step")
    parser.add_argument("--lr", type=float, default=0.1, help="highest, of all ranks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--compressions", nargs="+", choices=COMPRESSIONS,
                        default=list(COMPRESSIONS))  # fmt: skip
    parser.add_argument("--json", type=Path, help="append a record to this file")
    options = parser.parse_args()
    images = read_fashion(options.data)
    communicator = connect(read_rank_info())
    is_root = communicator.rank == 0
    if is_root:
        print(f"{communicator.size} ranks, seed {options.seed}, {options.epochs} "
              f"epochs of {len(images.train)} images, {options.batch} a rank and step, "
              f"learning rate up to {options.lr}")  # fmt: skip
        print(f"{'':12}{'bytes a step':>14}{'ms a step':>11}{'loss':>9}"
              "  test accuracy of each epoch")  # fmt: skip
    for name in options.compressions:
        course = train(communicator, images, COMPRESSIONS[name], options)
        if is_root:
            tell(name, course)
        if is_root and options.json is not None:
            values = {
                "compression": name,
                "num_ranks": communicator.size,
                "epochs": options.epochs,
                "batch": options.batch,
                "lr": options.lr,
                "seed": options.seed,
                "bytes_per_step": course.step_bytes,
                "step_ms": course.step_s * 1e3,
                "losses": course.losses,
                "test_accuracies": course.accuracies,
            }
            append_record(options.json, Record(kind="convergence", values=values))
    communicator.close()


def tell(name: str, course: Course) -> None:
    """Print one line of the table."""
    accuracies = " ".join(f"{share:7.2%}" for share in course.accuracies)
    print(f"{name:12}{course.step_bytes:>14,}{course.step_s * 1e3:>11.2f}"
          f"{course.losses[-1]:>9.4f}  {accuracies}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
