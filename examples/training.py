"""The training loop that the examples share: a model on images that fit in memory."""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from checkpoint import Training
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import ronde.torch as hvd
from ronde.errors import UsageError
from ronde.records import Record, append_record

USAGE_EXIT_CODE = 64


@dataclass(frozen=True, slots=True)
class Images:
    """Labelled images, for training and for the test.

    Attributes:
        train: float32 of shape (n, 1, height, width).
        train_labels: int64 of shape (n,).
        test: As ``train``.
        test_labels: As ``train_labels``.
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor

    def to(self, device: torch.device) -> "Images":
        """Return the same images on ``device``."""
        return Images(
            self.train.to(device),
            self.train_labels.to(device),
            self.test.to(device),
            self.test_labels.to(device),
        )


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says.

    Attributes:
        epochs: Passes over the training images.
        batch_size: Images in a step of one rank.
        lr: Highest learning rate of a single rank; it is multiplied by the ranks.
        seed: Of the first weights and of the order of images.
        is_communicating: False lets each rank train alone.
        json: File to append a record to, or None.
        checkpoint: File to go on from where it is there, and to write, or None.
        checkpoint_every: Steps between two times it is written; None for an epoch.
    """

    epochs: int
    batch_size: int
    lr: float
    seed: int
    is_communicating: bool
    json: Path | None
    checkpoint: Path | None
    checkpoint_every: int | None

    def settings(self) -> dict[str, Any]:
        """Return what the course of a training depends on."""
        return {
            "ranks": hvd.size(),
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "lr": self.lr,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank saw of a training; ``gather`` makes it that of all ranks.

    Attributes:
        loss: Mean of the last epoch.
        images_per_s: Median over the epochs, the first left out where it can be.
        num_correct: Test images of this rank's share that were recognised.
        num_tested: Test images of this rank's share.
    """

    loss: float
    images_per_s: float
    num_correct: int
    num_tested: int

    def gather(self) -> "Outcome":
        """Return the mean loss and the sums of all ranks. Collective."""
        numbers = (self.loss, self.images_per_s, self.num_correct, self.num_tested)
        total = hvd.allreduce(
            torch.tensor(numbers, dtype=torch.float64), name="outcome", op=hvd.Sum
        )
        loss, images_per_s, num_correct, num_tested = total.tolist()
        return Outcome(
            loss / hvd.size(), images_per_s, round(num_correct), round(num_tested)
        )

    @property
    def accuracy(self) -> float:
        """Share of the test images that were recognised, 0 to 1."""
        return self.num_correct / self.num_tested


class Parser(argparse.ArgumentParser):
    """The options of every example; what is wrong with them exits with 64."""

    def __init__(
        self, description: str, *, epochs: int, batch_size: int, lr: float
    ) -> None:
        super().__init__(description=description, allow_abbrev=False)
        self.add_argument("--epochs", type=_at_least_1, default=epochs)
        self.add_argument(
            "--batch-size",
            type=_at_least_1,
            default=batch_size,
            help="images in a step of one rank",
        )
        self.add_argument(
            "--lr", type=_above_0, default=lr, help="of a single rank; times the ranks"
        )
        self.add_argument("--seed", type=int, default=1)
        self.add_argument(
            "--no-communication",
            action="store_true",
            help="let each rank train alone: the ceiling of what N ranks can do",
        )
        self.add_argument("--json", type=Path, help="append a record to this file")
        self.add_argument(
            "--checkpoint",
            type=Path,
            help="file of rank 0 to go on from, where it is there, and to write",
        )
        self.add_argument(
            "--checkpoint-every",
            type=_at_least_1,
            metavar="STEPS",
            help="between two times it is written (default: an epoch)",
        )

    def error(self, message: str) -> NoReturn:
        """Say in one sentence what is wrong, and exit."""
        self.exit(USAGE_EXIT_CODE, f"{self.prog}: {message}\n")


def options_of(arguments: argparse.Namespace) -> Options:
    """Take the shared options from what a ``Parser`` has read.

    Raises:
        UsageError: Two of them do not go together.
    """
    if arguments.checkpoint is not None and arguments.no_communication:
        raise UsageError(
            "--checkpoint must be of ranks that have one model, got "
            "--no-communication. Leave one of the two out."
        )
    return Options(
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        lr=arguments.lr,
        seed=arguments.seed,
        is_communicating=not arguments.no_communication,
        json=arguments.json,
        checkpoint=arguments.checkpoint,
        checkpoint_every=arguments.checkpoint_every,
    )


def run(main: Callable[[], None]) -> NoReturn:
    """Run an example; a mistake of its user is one sentence and exit code 64."""
    try:
        main()
    except UsageError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(USAGE_EXIT_CODE)
    sys.exit(0)


def train_and_report(
    name: str, make_model: Callable[[], nn.Module], images: Images, options: Options
) -> None:
    """Train on all ranks, test, and report on rank 0. Collective.

    Args:
        name: Of the example.
        make_model: Makes the model; the random seed is set when it is called.
        images: All of them, equal on every rank; each rank takes its share.
        options: From the command line.

    Raises:
        UsageError: There are not enough images for one step of every rank.
    """
    hvd.init()
    device = _device()
    torch.manual_seed(options.seed)
    outcome = train(make_model().to(device), images.to(device), options).gather()
    if hvd.rank() == 0:
        _report(name, outcome, options)
    hvd.shutdown()


def train(model: nn.Module, images: Images, options: Options) -> Outcome:
    """Train ``model`` and test it on this rank's share of the images. Collective.

    Raises:
        UsageError: There are not enough images for one step of every rank, or the
            checkpoint is of another training.
    """
    num_steps = _count_steps(images, options)
    training = _make_training(model, options, options.epochs * num_steps)
    rates: list[float] = []
    while training.step < options.epochs * num_steps:
        rates.append(_train_epoch(training, images, options))
    num_correct, num_tested = _test(model, images)
    # The first epoch also pays for first allocations and the like; none is left to
    # train where the checkpoint is of the end.
    images_per_s = statistics.median(rates[1:] or rates or [0.0])
    loss = training.loss_sum / num_steps
    return Outcome(loss, images_per_s, num_correct, num_tested)


def _count_steps(images: Images, options: Options) -> int:
    """Return how many steps an epoch has."""
    step_size = options.batch_size * hvd.size()
    num_steps = len(images.train) // step_size
    if num_steps == 0:
        raise UsageError(
            f"--batch-size times ranks must be at most the images: "
            f"{options.batch_size} * {hvd.size()} = {step_size}, got "
            f"{len(images.train)} images. Give a smaller --batch-size."
        )
    return num_steps


def _make_training(model: nn.Module, options: Options, num_steps: int) -> Training:
    """Make what trains the model, equal on all ranks; go on from a checkpoint."""
    # A step of more images may go further.
    lr = options.lr * (hvd.size() if options.is_communicating else 1)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4
    )
    # Rises to the full rate and falls again: large steps need the slow start.
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=num_steps)
    training = Training(model, optimizer, schedule)
    if not options.is_communicating:
        return training
    if options.checkpoint is None:
        training.share()
    else:
        training.resume(options.checkpoint, options.settings())
    training.optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters()
    )
    return training


def _train_epoch(training: Training, images: Images, options: Options) -> float:
    """Take the steps that are left of an epoch; return this rank's images a second."""
    num_steps = _count_steps(images, options)
    epoch, first = divmod(training.step, num_steps)
    if first == 0:
        training.loss_sum = 0.0
    training.model.train()
    started = time.perf_counter()
    images_per_s = 0.0
    with _progress(f"epoch {epoch + 1}/{options.epochs}", first, num_steps) as progress:
        for inputs, labels in _batches(images, options, epoch, first):
            _take_step(training, inputs, labels)
            num_done = training.step - epoch * num_steps
            num_images = (num_done - first) * options.batch_size
            images_per_s = num_images / (time.perf_counter() - started)
            progress.set_postfix_str(
                f"loss {training.loss_sum / num_done:.3f}, "
                f"{images_per_s * hvd.size():.0f} images/s",
                refresh=False,
            )
            progress.update()
            every = options.checkpoint_every or num_steps
            if options.checkpoint is not None and training.step % every == 0:
                training.save(options.checkpoint, options.settings())
    return images_per_s


def _take_step(training: Training, inputs: Tensor, labels: Tensor) -> None:
    training.optimizer.zero_grad()
    loss = cross_entropy(training.model(inputs), labels)
    loss.backward()
    training.optimizer.step()
    training.schedule.step()
    training.step += 1
    training.loss_sum += loss.item()


def _batches(
    images: Images, options: Options, epoch: int, first: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's batches from one on; all ranks have as many, no image twice.

    What they are depends on the seed, the epoch and the rank alone: after a restart
    the rest of an epoch is what it would have been.
    """
    order = torch.Generator().manual_seed(options.seed * 1_000_003 + epoch)
    shuffled = torch.randperm(len(images.train), generator=order)
    step_size = options.batch_size * hvd.size()
    last = len(shuffled) - step_size
    for start in range(first * step_size, last + 1, step_size):
        mine = shuffled[start + hvd.rank() : start + step_size : hvd.size()]
        mine = mine.to(images.train.device)
        yield images.train[mine], images.train_labels[mine]


@torch.inference_mode()
def _test(model: nn.Module, images: Images) -> tuple[int, int]:
    """Count the recognised images and all in this rank's share of the test."""
    model.eval()
    inputs = images.test[hvd.rank() :: hvd.size()]
    labels = images.test_labels[hvd.rank() :: hvd.size()]
    pairs = zip(inputs.split(500), labels.split(500), strict=True)
    num_correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs)
    return num_correct, len(labels)


def _progress(description: str, first: int, num_steps: int) -> "tqdm[None]":
    """Make the bar that rank 0 shows on standard error."""
    is_terminal = sys.stderr.isatty()
    return tqdm(
        desc=description,
        initial=first,
        total=num_steps,
        disable=hvd.rank() != 0,
        unit="step",
        # In a pipe or a file a line a second is enough.
        mininterval=0.1 if is_terminal else 1.0,
        dynamic_ncols=is_terminal,
    )


def _device() -> torch.device:
    if torch.cuda.device_count() > hvd.local_rank():
        return torch.device("cuda", hvd.local_rank())
    return torch.device("cpu")


def _report(name: str, outcome: Outcome, options: Options) -> None:
    print(
        f"{name}: {hvd.size()} rank{'s' if hvd.size() > 1 else ''}"
        f"{'' if options.is_communicating else ', each alone'}, "
        f"{outcome.images_per_s:.0f} images/s, loss {outcome.loss:.4f}, "
        f"test accuracy {outcome.accuracy:.2%} of {outcome.num_tested} images"
    )
    if options.json is not None:
        values = {
            "example": name,
            "size": hvd.size(),
            "is_communicating": options.is_communicating,
            "epochs": options.epochs,
            "batch_size": options.batch_size,
            "lr": options.lr,
            "seed": options.seed,
            "num_threads": torch.get_num_threads(),
            "loss": outcome.loss,
            "images_per_s": outcome.images_per_s,
            "test_accuracy": outcome.accuracy,
            "num_tested": outcome.num_tested,
        }
        append_record(options.json, Record("training", values))


def _at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def _above_0(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return number
