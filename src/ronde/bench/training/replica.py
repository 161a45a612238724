"""A copy of a model that trains: its interface, its clock, its batches and checksum."""

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

import ronde.torch as hvd
from ronde.addresses import read_interfaces
from ronde.bench.timing import Marks
from ronde.bench.training.catalogue import ModelFacts, Unit
from ronde.bench.training.outcome import Phase, TrainOptions, Variant


class Stopwatch:
    """Sums the times of each phase; does nothing without ``synchronize``."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._since_ns = 0
        self._total_ns = dict.fromkeys(Phase, 0)

    @property
    def is_running(self) -> bool:
        return self._synchronize is not None

    def start(self) -> None:
        if self._synchronize is not None:
            self._synchronize()
            self._since_ns = time.perf_counter_ns()

    def mark(self, phase: Phase) -> None:
        if self._synchronize is not None:
            self._synchronize()
            now_ns = time.perf_counter_ns()
            self._total_ns[phase] += now_ns - self._since_ns
            self._since_ns = now_ns

    def seconds_a_step(self, num_steps: int) -> dict[Phase, float]:
        return {phase: ns / num_steps / 1e9 for phase, ns in self._total_ns.items()}


class Replica(Protocol):
    """A model with its optimizer and data; methods that communicate are collective."""

    is_split_apart: bool  # the clock's phases cost time that a step without them lacks

    @property
    def marks(self) -> Marks | None:
        """The time stamps of steps; None if ``step`` returns before its end."""
        ...

    def step(self, clock: Stopwatch) -> None: ...

    def synchronize(self) -> None:
        """Wait for the device."""
        ...

    def digest(self) -> int:
        """Return a checksum of the bits of all weights."""
        ...


# Opened once in a process, before the framework's first operation.
ReplicaMaker = AbstractContextManager[Callable[[Variant], Replica]]

NUM_PREPARED = 2  # more would only use memory
Batch = tuple[Tensor, Tensor]  # inputs and labels, on the host


def batches(options: TrainOptions, device: torch.device, seed: int) -> Iterator[Batch]:
    """Yield batches endlessly; prepared batches for an accelerator are pinned."""
    generator = torch.Generator().manual_seed(seed)
    size, num_samples = options.batch, NUM_PREPARED * options.batch
    inputs, labels = make_samples(options.model, num_samples, generator)
    if options.is_channels_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    while options.input == "gathered":
        chosen = torch.randint(len(inputs), (size,), generator=generator)
        yield inputs[chosen], labels[chosen]
    starts = range(0, num_samples, size)
    prepared = [(inputs[s : s + size], labels[s : s + size]) for s in starts]
    if device.type == "cuda":
        prepared = [(x.pin_memory(), y.pin_memory()) for x, y in prepared]
    while True:
        yield from prepared


def make_samples(
    model: ModelFacts, num_samples: int, generator: torch.Generator | None = None
) -> Batch:
    """Make random samples on the current default device."""
    shape = (num_samples, *model.sample_shape)
    if model.unit is Unit.IMAGES:
        labels = torch.randint(model.num_classes, (num_samples,), generator=generator)
        return torch.randn(shape, generator=generator), labels
    tokens = torch.randint(model.num_classes, shape, generator=generator)
    return tokens, torch.randint(model.num_classes, shape, generator=generator)


def digest_of(weights: Iterable[Tensor]) -> int:
    """Return a checksum of the bits of 32-bit tensors."""
    bits = [each.detach().flatten().view(torch.int32) for each in weights]
    sums = torch.stack([each.sum(dtype=torch.int64) for each in bits])
    return int((sums * torch.arange(1, len(bits) + 1, device=sums.device)).sum())


def free_address() -> str:
    """Return this host's address and a port that no process listens on now."""
    is_one_host = hvd.local_size() == hvd.size()
    host = "127.0.0.1" if is_one_host else read_interfaces()[0].address
    with socket.create_server((host, 0)) as server:
        return f"{host}:{server.getsockname()[1]}"
