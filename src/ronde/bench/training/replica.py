"""One copy of a model: its batches, its step, and the memory that it needs."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

import ronde.torch as hvd
from ronde.bench.training.catalogue import ModelFacts, Unit
from ronde.bench.training.models import build
from ronde.bench.training.outcome import (
    Dtype,
    InputKind,
    OptimizerKind,
    Phase,
    TrainOptions,
    WireFormat,
)
from ronde.errors import UsageError
from ronde.memory import available_memory
from ronde.units import format_size


class Stopwatch:
    """Adds up what each phase takes; without ``synchronize`` it does nothing.

    ``synchronize`` waits until the device has done all it was given.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._since_ns = 0
        self._total_ns = dict.fromkeys(Phase, 0)

    def start(self) -> None:
        if self._synchronize is not None:
            self._synchronize()
            self._since_ns = time.perf_counter_ns()

    def mark(self, phase: Phase) -> None:
        """Note that ``phase`` is over."""
        if self._synchronize is not None:
            self._synchronize()
            now_ns = time.perf_counter_ns()
            self._total_ns[phase] += now_ns - self._since_ns
            self._since_ns = now_ns

    def seconds_a_step(self, num_steps: int) -> dict[Phase, float]:
        """Return the mean of each phase over the steps that were marked."""
        return {phase: ns / num_steps / 1e9 for phase, ns in self._total_ns.items()}


NUM_PREPARED = 2
"""More would only take memory: nothing is learned from them."""

Batch = tuple[Tensor, Tensor]
"""Inputs and labels, on the host."""


def batches(options: TrainOptions, device: torch.device, seed: int) -> Iterator[Batch]:
    """Yield batches without end; for an accelerator prepared ones are pinned."""
    generator = torch.Generator().manual_seed(seed)
    size, num_samples = options.batch, NUM_PREPARED * options.batch
    inputs, labels = make_samples(options.model, num_samples, generator)
    if options.is_channels_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    while options.input is InputKind.GATHERED:
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
    """Make samples on the host, or on the device that is current as a context."""
    shape = (num_samples, *model.sample_shape)
    if model.unit is Unit.IMAGES:
        labels = torch.randint(model.num_classes, (num_samples,), generator=generator)
        return torch.randn(shape, generator=generator), labels
    tokens = torch.randint(model.num_classes, shape, generator=generator)
    return tokens, torch.randint(model.num_classes, shape, generator=generator)


AUXILIARY_WEIGHT = 0.3
"""Of each auxiliary classifier in the loss. Source: Szegedy et al. 2015, section 5."""
_COMPRESSORS = {
    WireFormat.NONE: hvd.Compression.none,
    WireFormat.FP16: hvd.Compression.fp16,
    WireFormat.BF16: hvd.Compression.bf16,
}


class Replica:
    """A model, its optimizer and its data on one rank.

    Collective to create and to step where it communicates.
    """

    def __init__(
        self, options: TrainOptions, device: torch.device, *, is_communicating: bool
    ) -> None:
        self._device = device
        self._is_mixed = options.dtype is Dtype.BFLOAT16
        self._batches = batches(options, device, seed=hvd.rank())
        torch.manual_seed(0)
        self.model = build(options.model.name).to(device)
        if options.is_channels_last:
            cast("Any", self.model).to(memory_format=torch.channels_last)
        weights = self.model.parameters()
        optimizer: Optimizer = SGD(weights, lr=1e-3, momentum=0.9)
        if options.optimizer is OptimizerKind.ADAM:
            optimizer = Adam(self.model.parameters(), lr=1e-4)
        self._optimizer = optimizer
        if is_communicating:
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
            self._optimizer = hvd.DistributedOptimizer(
                self._optimizer,
                named_parameters=self.model.named_parameters(),
                compression=_COMPRESSORS[options.compression],
            )
        torch.manual_seed(hvd.rank())  # dropout: each rank drops its own
        self._call = cast("Callable[[Tensor], Tensor]", self.model)
        if options.is_compiled:
            self._call = cast("Callable[[Tensor], Tensor]", torch.compile(self.model))

    def step(self, clock: Stopwatch) -> None:
        """Take one training step and tell ``clock`` where it is."""
        clock.start()
        inputs, labels = next(self._batches)
        clock.mark(Phase.INPUT)
        inputs = inputs.to(self._device, non_blocking=True)
        labels = labels.to(self._device, non_blocking=True)
        clock.mark(Phase.HOST_TO_DEVICE)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_mixed):
            loss = loss_of(self._call(inputs), labels)
        clock.mark(Phase.FORWARD)
        loss.backward()
        clock.mark(Phase.BACKWARD)
        self._optimizer.step()
        self._optimizer.zero_grad()
        clock.mark(Phase.UPDATE)

    @torch.no_grad()
    def digest(self) -> int:
        """Return a number that is equal where all weights are, bit for bit."""
        bits = [p.detach().flatten().view(torch.int32) for p in self.model.parameters()]
        sums = [each.sum(dtype=torch.int64) for each in bits]
        weights = torch.arange(1, len(sums) + 1, device=self._device)
        return int((torch.stack(sums) * weights).sum())


def loss_of(outputs: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Return the mean cross entropy, with that of auxiliary classifiers added."""
    if isinstance(outputs, Tensor):
        return cross_entropy(outputs.flatten(0, -2), labels.flatten())
    own, *auxiliary = (cross_entropy(each, labels) for each in outputs)
    return own + AUXILIARY_WEIGHT * sum(auxiliary, torch.zeros_like(own))


@dataclass(frozen=True, slots=True)
class Footprint:
    """The least that one rank needs."""

    fixed_bytes: int  # weights, gradients and the optimizer's state of all replicas
    sample_bytes: int  # inputs and what backward needs of forward, for one sample

    def num_bytes(self, batch: int) -> int:
        """Return the least that a batch of that many samples needs."""
        return self.fixed_bytes + batch * self.sample_bytes

    def largest_batch(self, num_bytes: int) -> int:
        """Return the samples of a batch that so much memory may hold; 0 for none."""
        return max(0, (num_bytes - self.fixed_bytes) // self.sample_bytes)


def measure_footprint(options: TrainOptions, num_replicas: int) -> Footprint:
    """Return what a rank needs at least.

    It runs the forward pass on tensors that have a shape and no data, as on a CPU, and
    adds up what backward would find saved. Workspaces, and the gradients of
    activations, come on top.
    """
    is_mixed = options.dtype is Dtype.BFLOAT16
    # Not the meta device: there attention keeps matrices that no real device keeps.
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        model = build(options.model.name)
        samples = [make_samples(options.model, n) for n in (1, 2)]
        one, two = (_saved_bytes(model, *each) for each in samples)
        data = sum(tensor.nbytes for tensor in samples[0])
    num_copies = 4 if options.optimizer is OptimizerKind.ADAM else 3
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    a_sample = two - one  # the rest is there once, such as weights cast to bfloat16
    return Footprint(
        fixed_bytes=num_replicas * num_copies * weights + one - a_sample,
        sample_bytes=a_sample + num_replicas * NUM_PREPARED * data,
    )


def _saved_bytes(model: nn.Module, inputs: Tensor, labels: Tensor) -> int:
    # Storages are kept until the sum is made, so that none takes another one's place.
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[_identity(tensor)] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss_of(model(inputs), labels)
    for each in (inputs, labels, *model.parameters(), *model.buffers()):
        storages.pop(_identity(each), None)
    return sum(storage.nbytes() for storage in storages.values())


def _identity(tensor: Tensor) -> int:
    """Return what views of one storage have in common; data has no address here."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001


def require_fit(options: TrainOptions, device: torch.device, num_replicas: int) -> None:
    """Refuse what cannot fit; collective, and every rank comes to the same end."""
    footprint = measure_footprint(options, num_replicas)
    if device.type == "cuda":
        share, remedy = torch.cuda.mem_get_info(device)[0], "Take a smaller model."
    else:
        available = available_memory()
        share, remedy = available.num_bytes // hvd.local_size(), available.remedy
    least = int(hvd.allreduce(torch.tensor(share), op=hvd.Min))
    needed = footprint.num_bytes(options.batch)
    if needed <= least:
        return
    largest = footprint.largest_batch(least)
    cure = f"Type: --batch {largest}" if largest else remedy
    raise UsageError(
        f"batch must fit the memory of a rank, which is {format_size(least)}, got "
        f"{options.batch}: {options.model.name} takes at least "
        f"{format_size(footprint.fixed_bytes)} + {options.batch} * "
        f"{format_size(footprint.sample_bytes)} = {format_size(needed)}. {cure}"
    )
