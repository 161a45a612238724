"""Measurement of training steps, for ``ronde bench train``."""

import gc
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import pairwise, starmap
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

import ronde.torch as hvd
from ronde.bench.ranks import cuda_device
from ronde.bench.timing import Marks, without_collector
from ronde.bench.training.compiled import (
    jax_replicas,
    keras_replicas,
    tensorflow_replicas,
)
from ronde.bench.training.models import build
from ronde.bench.training.outcome import (
    ALONE,
    COMMUNICATING,
    Block,
    DeviceKind,
    Framework,
    Phase,
    Round,
    Setting,
    StepTimes,
    TrainingOutcome,
    TrainOptions,
    Variant,
)
from ronde.bench.training.replica import (
    NUM_PREPARED,
    Replica,
    ReplicaMaker,
    Stopwatch,
    make_samples,
)
from ronde.bench.training.torch_replicas import (
    TorchReplica,
    has_data_parallel,
    loss_of,
    measure_arrivals,
    torch_replicas,
)
from ronde.errors import UsageError
from ronde.memory import available_memory
from ronde.records import MachineRecord
from ronde.session.session import current_session
from ronde.units import format_size

_MAKERS: Mapping[Framework, Callable[[TrainOptions, torch.device], ReplicaMaker]] = {
    "torch": torch_replicas,
    "tensorflow": tensorflow_replicas,
    "keras": keras_replicas,
    "jax": jax_replicas,
}


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


_MAX_PROFILED_STEPS = 10


def time_block(
    replica: Replica,
    num_steps: int,
    *,
    is_alone: bool = False,
    is_split: bool = True,
) -> StepTimes:
    """Time a block of steps and return the slowest rank's times; collective.

    Without ``is_split`` all phases are 0 if they would take steps of their own.
    """
    own = StepTimes(0.0, dict.fromkeys(Phase, 0.0))
    is_stepping = not is_alone or hvd.rank() == 0
    if is_stepping:
        # Bring the replica's memory back into the caches.
        replica.step(Stopwatch())
        replica.synchronize()
    hvd.barrier()
    if is_stepping:
        gc.collect()
        with without_collector():
            own = _time_steps(replica, num_steps, is_split=is_split)
    num_single = num_steps if replica.marks else 0
    single = own.steps_s[0] if own.steps_s else (0.0,) * num_single
    figures = [own.step_s, *(own.phases_s[phase] for phase in Phase), *single]
    row = torch.tensor([figures], dtype=torch.float64)
    rows = cast("list[list[float]]", hvd.allgather(row).tolist())
    end = 1 + len(Phase)
    phases = max((each[1:end] for each in rows), key=sum)
    step_s = max(each[0] for each in rows)
    stepping = rows[: 1 if is_alone else None] if num_single else []
    steps_s = tuple(tuple(each[end:]) for each in stepping)
    return StepTimes(step_s, dict(zip(Phase, phases, strict=True)), steps_s)


def _time_steps(replica: Replica, num_steps: int, *, is_split: bool) -> StepTimes:
    mark, between = replica.marks or Marks()

    def time_steps(clock: Stopwatch, num_steps: int) -> tuple[float, Block]:
        start_ns, stamps = time.perf_counter_ns(), [mark()]
        for _ in range(num_steps):
            replica.step(clock)
            stamps.append(mark())
        replica.synchronize()
        step_s = (time.perf_counter_ns() - start_ns) / num_steps / 1e9
        steps_s = tuple(starmap(between, pairwise(stamps)))
        return step_s, (steps_s,) if replica.marks else ()

    stopwatch = Stopwatch(replica.synchronize)
    if not replica.is_split_apart:
        step_s, steps_s = time_steps(stopwatch, num_steps)
        return StepTimes(step_s, stopwatch.seconds_a_step(num_steps), steps_s)
    # Synchronising after each phase keeps the host from running ahead of the device,
    # so the phases are timed in additional steps.
    step_s, steps_s = time_steps(Stopwatch(), num_steps)
    num_profiled = min(num_steps, _MAX_PROFILED_STEPS) if is_split else 0
    if num_profiled:
        time_steps(stopwatch, num_profiled)
    return StepTimes(step_s, stopwatch.seconds_a_step(max(1, num_profiled)), steps_s)


_BLOCK_S = 0.4
_MAX_STEPS = 100
_MAX_ARRIVAL_STEPS = 5

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
    variants = _variants_of(options, device)
    require_fit(options, device, num_replicas=max(1, len(variants) - 1))
    with _MAKERS[options.framework](options, device) as make:
        setting = _setting(options, device)
        replicas = _make_replicas(options, variants, make)
        num_steps = options.steps
        if num_steps is None:
            # Enough steps to be timed; the same number on all ranks.
            step_s = time_block(replicas[Variant.ONE_RANK], 1).step_s
            num_steps = max(1, min(_MAX_STEPS, math.ceil(_BLOCK_S / step_s)))
        rounds = _run_rounds(replicas, num_steps, options, on_progress)
        is_equal = is_in_step(replicas)
        alone, whole = replicas[Variant.ONE_RANK], replicas.get(Variant.ALL_RANKS)
        num_arrivals = min(num_steps, _MAX_ARRIVAL_STEPS)
        is_watched = isinstance(alone, TorchReplica)
        gradients = measure_arrivals(alone, num_arrivals) if is_watched else ()
        buckets = whole.buckets() if isinstance(whole, TorchReplica) else None
    found = (num_steps, rounds, is_equal, gradients, buckets)
    return TrainingOutcome(options, setting, *found)


def _setting(options: TrainOptions, device: torch.device) -> Setting:
    device_name = MachineRecord.here().cpu
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    framework: Any = import_module(options.framework)
    backend = options.framework
    if backend == "keras":
        backend = str(framework.backend.backend())
    session = current_session()
    communicator, hosts = session.states[0].communicator, Counter(session.hosts)
    num_bytes = options.model.num_parameters * torch.float32.itemsize
    engine = communicator.reducing_engine(num_bytes, device)
    name = engine.name if communicator.size > 1 else ""
    if name == "gloo" and device.type == "cuda":
        name = "nccl"  # the same engine, which chooses by the tensor's device
    return Setting(
        *(communicator.size, torch.get_num_threads(), device.type, device_name),
        *(name, torch.__version__, str(framework.__version__), backend),
        algorithm=engine.algorithm,
        collective_backend=engine.sender or name,
        hosts=tuple(hosts.values()),
    )


def _agree_on_devices(options: TrainOptions) -> torch.device:
    """Return this rank's device; raise on all ranks if one has none; collective."""
    device, refusal = torch.device("cpu"), ""
    kind = options.device if options.framework == "torch" else "cpu"
    try:
        device = choose_device(kind, hvd.local_rank())
    except UsageError as error:
        refusal = str(error)
    for each in hvd.allgather_object(refusal):
        if each:
            raise UsageError(each)
    return device


def _variants_of(options: TrainOptions, device: torch.device) -> list[Variant]:
    variants = [Variant.ONE_RANK]
    if hvd.size() > 1:
        variants += [Variant.NO_COMMUNICATION, Variant.ALL_RANKS]
        if options.reduce == "parameter_server":
            variants.append(Variant.PARAMETER_SERVER)
        if options.is_peered:
            variants += [Variant.BARE] if options.framework == "keras" else []
            variants.append(Variant.PEER)
            variants += [Variant.DATA_PARALLEL] if has_data_parallel(device) else []
    return variants


def _make_replicas(
    options: TrainOptions,
    variants: Sequence[Variant],
    make: Callable[[Variant], Replica],
) -> Mapping[Variant, Replica]:
    alone = make(Variant.ONE_RANK)
    shared = (Variant.ONE_RANK, Variant.NO_COMMUNICATION)
    replicas = {each: alone if each in shared else make(each) for each in variants}
    for variant in [each for each in variants if each is not Variant.NO_COMMUNICATION]:
        if hvd.rank() == 0 or variant is not Variant.DATA_PARALLEL:
            for _ in range(options.warmup):
                replicas[variant].step(Stopwatch())
    alone.step(Stopwatch(alone.synchronize))  # compiles the parts of a step
    return replicas


def _run_rounds(
    replicas: Mapping[Variant, Replica],
    num_steps: int,
    options: TrainOptions,
    on_progress: OnProgress | None,
) -> tuple[Round, ...]:
    order = random.Random(0)  # noqa: S311  must be the same on all ranks
    rounds: list[Round] = []
    num_blocks = options.rounds * len(replicas)
    is_compiled = options.framework != "torch"
    for number in range(options.rounds):
        times: dict[Variant, StepTimes] = {}
        for variant in order.sample(list(replicas), len(replicas)):
            if on_progress is not None:
                on_progress(number * len(replicas) + len(times), num_blocks)
            times[variant] = time_block(
                replicas[variant],
                num_steps,
                is_alone=variant in ALONE,
                is_split=not (is_compiled and variant in COMMUNICATING),
            )
        rounds.append(split_by_differences(times) if is_compiled else times)
    if on_progress is not None:
        on_progress(num_blocks, num_blocks)
    return tuple(rounds)


def split_by_differences(times: Round) -> Round:
    """Return a round of compiled steps with phases that exclude each other.

    The given phases of a step without communication are the times of growing parts. A
    step with communication has the same phases, and what it takes longer is added to
    its backward, as all of torch's communication is in there.
    """
    split: dict[Variant, StepTimes] = {}
    for variant, block in times.items():
        if variant not in COMMUNICATING:
            step_s, parts = block.step_s, block.phases_s
            phases = dict(parts)
            phases[Phase.BACKWARD] -= parts[Phase.FORWARD]
            phases[Phase.UPDATE] -= parts[Phase.BACKWARD]
            split[variant] = StepTimes(step_s, phases, block.steps_s)
    for variant in [each for each in times if each in COMMUNICATING]:
        without, block = split[Variant.NO_COMMUNICATION], times[variant]
        phases = dict(without.phases_s)
        phases[Phase.BACKWARD] += block.step_s - without.step_s
        split[variant] = StepTimes(block.step_s, phases, block.steps_s)
    return split


def is_in_step(replicas: Mapping[Variant, Replica]) -> bool:
    """Return True if every communicating replica is equal on all ranks; collective."""
    digests = [replicas[each].digest() for each in COMMUNICATING if each in replicas]
    return len(set(hvd.allgather_object(str(digests)))) == 1
