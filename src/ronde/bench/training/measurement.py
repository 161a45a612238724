"""Measurement of training steps, for ``ronde bench train``."""

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

import ronde.torch as hvd
from ronde.bench.ranks import cuda_device
from ronde.bench.timing import without_collector
from ronde.bench.training.catalogue import ModelFacts, Unit
from ronde.bench.training.models import build
from ronde.bench.training.outcome import (
    DeviceKind,
    Phase,
    Round,
    Setting,
    StepTimes,
    TrainingOutcome,
    TrainOptions,
    Variant,
)
from ronde.errors import UsageError
from ronde.memory import available_memory
from ronde.records import MachineRecord
from ronde.session.session import current_session
from ronde.units import format_size


class Stopwatch:
    """Sums the times of each phase; does nothing without ``synchronize``."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._since_ns = 0
        self._total_ns = dict.fromkeys(Phase, 0)

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


class Replica:
    """A model with its optimizer and data; methods that communicate are collective."""

    def __init__(
        self, options: TrainOptions, device: torch.device, *, is_communicating: bool
    ) -> None:
        self._device = device
        self._is_mixed = options.dtype == "bfloat16"
        self._batches = batches(options, device, seed=hvd.rank())
        torch.manual_seed(0)
        self.model = build(options.model.name).to(device)
        if options.is_channels_last:
            cast("Any", self.model).to(memory_format=torch.channels_last)
        weights = self.model.parameters()
        optimizer: Optimizer = SGD(weights, lr=1e-3, momentum=0.9)
        if options.optimizer == "adam":
            optimizer = Adam(self.model.parameters(), lr=1e-4)
        self._optimizer = optimizer
        if is_communicating:
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
            self._optimizer = hvd.DistributedOptimizer(
                self._optimizer,
                named_parameters=self.model.named_parameters(),
                compression=getattr(hvd.Compression, options.compression),
            )
        torch.manual_seed(hvd.rank())  # so that dropout differs between ranks

    def step(self, clock: Stopwatch) -> None:
        clock.start()
        inputs, labels = next(self._batches)
        clock.mark(Phase.INPUT)
        inputs = inputs.to(self._device, non_blocking=True)
        labels = labels.to(self._device, non_blocking=True)
        clock.mark(Phase.HOST_TO_DEVICE)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_mixed):
            loss = loss_of(self.model(inputs), labels)
        clock.mark(Phase.FORWARD)
        loss.backward()
        clock.mark(Phase.BACKWARD)
        self._optimizer.step()
        self._optimizer.zero_grad()
        clock.mark(Phase.UPDATE)

    @torch.no_grad()
    def digest(self) -> int:
        """Return a checksum of the bits of all weights."""
        bits = [p.detach().flatten().view(torch.int32) for p in self.model.parameters()]
        sums = [each.sum(dtype=torch.int64) for each in bits]
        weights = torch.arange(1, len(sums) + 1, device=self._device)
        return int((torch.stack(sums) * weights).sum())


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


class Footprint(NamedTuple):
    """The memory that a rank needs at least, apart from temporary buffers."""

    fixed_bytes: int  # weights, gradients and optimizer state of all replicas
    sample_bytes: int  # inputs and saved activations of one sample


def measure_footprint(options: TrainOptions, num_replicas: int) -> Footprint:
    """Compute a rank's minimum memory with a forward pass on fake tensors.

    Workspaces and the gradients of activations are not included.
    """
    is_mixed = options.dtype == "bfloat16"
    # Not on the meta device, where attention saves matrices that real devices do not.
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        model = build(options.model.name)
        samples = [make_samples(options.model, n) for n in (1, 2)]
        one, two = (_saved_bytes(model, *each) for each in samples)
        data = sum(tensor.nbytes for tensor in samples[0])
    num_copies = 4 if options.optimizer == "adam" else 3
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    a_sample = two - one  # the rest exists once, such as bfloat16 weights
    return Footprint(
        fixed_bytes=num_replicas * num_copies * weights + one - a_sample,
        sample_bytes=a_sample + num_replicas * NUM_PREPARED * data,
    )


def _saved_bytes(model: nn.Module, inputs: Tensor, labels: Tensor) -> int:
    # Storages are kept until the sum is computed, so that no id is reused.
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
    """Return an id of a tensor's storage; fake tensors have no data pointer."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001


def require_fit(options: TrainOptions, device: torch.device, num_replicas: int) -> None:
    """Raise a UsageError on all ranks if the model does not fit; collective."""
    fixed_bytes, sample_bytes = measure_footprint(options, num_replicas)
    if device.type == "cuda":
        share, remedy = torch.cuda.mem_get_info(device)[0], "Take a smaller model."
    else:
        available = available_memory()
        share, remedy = available.num_bytes // hvd.local_size(), available.remedy
    least = int(hvd.allreduce(torch.tensor(share), op=hvd.Min))
    needed = fixed_bytes + options.batch * sample_bytes
    if needed <= least:
        return
    if largest := max(0, (least - fixed_bytes) // sample_bytes):
        remedy = f"Type: --batch {largest}"
    raise UsageError(
        f"batch {options.batch} does not fit into a rank's memory of "
        f"{format_size(least)}: {options.model.name} needs at least "
        f"{format_size(fixed_bytes)} + {options.batch} * {format_size(sample_bytes)} = "
        f"{format_size(needed)}. {remedy}"
    )


def choose_device(kind: DeviceKind, local_rank: int) -> torch.device:
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return cuda_device(local_rank, local_rank, "start fewer ranks with -n")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_MAX_PROFILED_STEPS = 10


def time_block(
    replica: Replica, num_steps: int, device: torch.device, *, is_alone: bool = False
) -> StepTimes:
    """Time a block of steps and return the slowest rank's times; collective."""
    own = StepTimes(0.0, dict.fromkeys(Phase, 0.0))
    is_stepping = not is_alone or hvd.rank() == 0
    if is_stepping:
        # Bring the replica's memory back into the caches.
        replica.step(Stopwatch())
        synchronize(device)
    hvd.barrier()
    if is_stepping:
        gc.collect()
        with without_collector():
            own = _time_steps(replica, num_steps, device)
    figures = [own.step_s, *(own.phases_s[phase] for phase in Phase)]
    row = torch.tensor([figures], dtype=torch.float64)
    rows = cast("list[list[float]]", hvd.allgather(row).tolist())
    phases = max((each[1:] for each in rows), key=sum)
    step_s = max(each[0] for each in rows)
    return StepTimes(step_s, dict(zip(Phase, phases, strict=True)))


def _time_steps(replica: Replica, num_steps: int, device: torch.device) -> StepTimes:
    def elapsed_s(clock: Stopwatch, num_steps: int) -> float:
        start_ns = time.perf_counter_ns()
        for _ in range(num_steps):
            replica.step(clock)
        synchronize(device)
        return (time.perf_counter_ns() - start_ns) / num_steps / 1e9

    stopwatch = Stopwatch(partial(synchronize, device))
    if device.type == "cpu":
        step_s = elapsed_s(stopwatch, num_steps)
        return StepTimes(step_s, stopwatch.seconds_a_step(num_steps))
    # Synchronising after each phase keeps the host from running ahead of the device,
    # so the phases are timed in additional steps.
    step_s = elapsed_s(Stopwatch(), num_steps)
    num_profiled = min(num_steps, _MAX_PROFILED_STEPS)
    elapsed_s(stopwatch, num_profiled)
    return StepTimes(step_s, stopwatch.seconds_a_step(num_profiled))


_BLOCK_S = 0.4
_MAX_STEPS = 100

OnProgress = Callable[[int, int], None]  # numbers of finished and of all blocks


def measure(
    options: TrainOptions, on_progress: OnProgress | None = None
) -> TrainingOutcome:
    """Measure steps on 1 rank, on all, and on all without communication; collective.

    The three variants alternate in blocks of a few steps, in a new order every round,
    so that a machine that slows down affects all of them.

    Raises:
        UsageError: The device is missing, or the model does not fit.
        CollectiveError: A rank was lost.
    """
    device = _agree_on_devices(options)
    name = MachineRecord.here().cpu
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    size = hvd.size()
    with ExitStack() as settings:
        if device.type == "cuda":
            settings.enter_context(torch.cuda.device(device))
            flags = torch.backends.cudnn.flags(enabled=True, benchmark=True)
            settings.enter_context(flags)
        require_fit(options, device, num_replicas=min(size, 2))
        replicas = _make_replicas(options, device)
        num_steps = options.steps
        if num_steps is None:
            # Enough steps to be timed; the same number on all ranks.
            step_s = time_block(replicas[Variant.ONE_RANK], 1, device).step_s
            num_steps = max(1, min(_MAX_STEPS, math.ceil(_BLOCK_S / step_s)))
        rounds = _run_rounds(replicas, num_steps, options.rounds, device, on_progress)
        is_equal = is_in_step(replicas)
    engine = current_session().states[0].communicator.engine if size > 1 else ""
    where = (size, torch.get_num_threads(), device.type, name, engine)
    setting = Setting(*where, torch.__version__)
    return TrainingOutcome(options, setting, num_steps, rounds, is_equal)


def _agree_on_devices(options: TrainOptions) -> torch.device:
    """Return this rank's device; raise on all ranks if one has none; collective."""
    device, refusal = torch.device("cpu"), ""
    try:
        device = choose_device(options.device, hvd.local_rank())
    except UsageError as error:
        refusal = str(error)
    for each in hvd.allgather_object(refusal):
        if each:
            raise UsageError(each)
    return device


def _make_replicas(
    options: TrainOptions, device: torch.device
) -> Mapping[Variant, Replica]:
    alone = Replica(options, device, is_communicating=False)
    replicas = {Variant.ONE_RANK: alone}
    if hvd.size() > 1:
        together = Replica(options, device, is_communicating=True)
        replicas |= {Variant.ALL_RANKS: together, Variant.NO_COMMUNICATION: alone}
    for replica in dict.fromkeys(replicas.values()):
        for _ in range(options.warmup):
            replica.step(Stopwatch())
    return replicas


def _run_rounds(
    replicas: Mapping[Variant, Replica],
    num_steps: int,
    num_rounds: int,
    device: torch.device,
    on_progress: OnProgress | None,
) -> tuple[Round, ...]:
    order = random.Random(0)  # noqa: S311  must be the same on all ranks
    rounds: list[Round] = []
    num_blocks = num_rounds * len(replicas)
    for number in range(num_rounds):
        times: dict[Variant, StepTimes] = {}
        for variant in order.sample(list(replicas), len(replicas)):
            if on_progress is not None:
                on_progress(number * len(replicas) + len(times), num_blocks)
            is_alone = variant is Variant.ONE_RANK
            times[variant] = time_block(
                replicas[variant], num_steps, device, is_alone=is_alone
            )
        rounds.append(times)
    if on_progress is not None:
        on_progress(num_blocks, num_blocks)
    return tuple(rounds)


def is_in_step(replicas: Mapping[Variant, Replica]) -> bool:
    if Variant.ALL_RANKS not in replicas:
        return True
    digest = replicas[Variant.ALL_RANKS].digest()
    return len(set(hvd.allgather_object(digest))) == 1
