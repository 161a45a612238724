"""Measures training steps of one model: the library call of ``ronde bench train``."""

import gc
import math
import random
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch

import ronde.torch as hvd
from ronde.bench.timing import without_collector
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
from ronde.bench.training.replica import Replica, Stopwatch, require_fit
from ronde.errors import UsageError
from ronde.records import MachineRecord
from ronde.torch.session import current_session


def choose_device(kind: DeviceKind, local_rank: int) -> torch.device:
    """Return this rank's device: of the host's CUDA devices the one of its number."""
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind is DeviceKind.CPU or (kind is DeviceKind.AUTO and num_devices == 0):
        return torch.device("cpu")
    if num_devices == 0:
        raise UsageError(
            "device must be one that is here, got cuda. Type: --device cpu"
        )
    if local_rank >= num_devices:
        raise UsageError(
            f"ranks of a host must be at most its CUDA devices, {num_devices}, got "
            f"local rank {local_rank}. Type: -n {num_devices}, or --device cpu"
        )
    return torch.device("cuda", local_rank)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def used(device: torch.device) -> Generator[None]:
    """Make ``device`` current, and let cuDNN look for its fastest kernels."""
    if device.type != "cuda":
        yield
        return
    was_searching = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with torch.cuda.device(device):
            yield
    finally:
        torch.backends.cudnn.benchmark = was_searching


_MAX_PROFILED_STEPS = 10


def time_block(
    replica: Replica, num_steps: int, device: torch.device, *, is_alone: bool = False
) -> StepTimes:
    """Time a block of steps on all ranks, or on rank 0 alone; collective.

    One step goes before, which brings the replica's memory back into the caches.
    Returns the slowest rank's times, on every rank.
    """
    own = StepTimes(0.0, dict.fromkeys(Phase, 0.0))
    is_stepping = not is_alone or hvd.rank() == 0
    if is_stepping:
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
    # A synchronisation a phase would keep the host from running ahead of the device,
    # so the phases are timed in steps of their own.
    step_s = elapsed_s(Stopwatch(), num_steps)
    num_profiled = min(num_steps, _MAX_PROFILED_STEPS)
    elapsed_s(stopwatch, num_profiled)
    return StepTimes(step_s, stopwatch.seconds_a_step(num_profiled))


_BLOCK_S = 0.4
_MAX_STEPS = 100

OnProgress = Callable[[int, int], None]
"""Told how many blocks are done, and of how many."""


def measure(options: TrainOptions, on_progress: OnProgress) -> TrainingOutcome:
    """Train on 1 rank, on all, and on all without communication; collective.

    ``ronde.torch`` must be initialised. The three are measured in blocks of a few steps
    that take turns, in another order every round, so that a machine that slows down
    slows all of them.

    Raises:
        UsageError: There is no such device, or the model does not fit.
        CollectiveError: A rank was lost.
    """
    device = _agree_on_devices(options)
    name = MachineRecord.here().cpu
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    size = hvd.size()
    with used(device):
        require_fit(options, device, num_replicas=min(size, 2))
        replicas = _make_replicas(options, device)
        num_steps = options.steps
        if num_steps is None:
            # So many last long enough to be timed; the same on all ranks.
            step_s = time_block(replicas[Variant.ONE_RANK], 1, device).step_s
            num_steps = max(1, min(_MAX_STEPS, math.ceil(_BLOCK_S / step_s)))
        rounds = _run_rounds(replicas, num_steps, options.rounds, device, on_progress)
        is_in_step = _is_in_step(replicas)
    engine = current_session().states[0].communicator.engine if size > 1 else ""
    where = (size, torch.get_num_threads(), device.type, name, engine)
    setting = Setting(*where, torch.__version__)
    return TrainingOutcome(options, setting, num_steps, rounds, is_in_step)


def _agree_on_devices(options: TrainOptions) -> torch.device:
    """Return this rank's device; where one rank has none, all refuse together."""
    device, refusal = torch.device("cpu"), ""
    try:
        device = choose_device(options.device, hvd.local_rank())
    except UsageError as error:
        refusal = str(error)
    for said in hvd.allgather_object(refusal):
        if said:
            raise UsageError(said)
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
    on_progress: OnProgress,
) -> tuple[Round, ...]:
    order = random.Random(0)  # noqa: S311  the same on all ranks is what matters
    rounds: list[Round] = []
    num_blocks = num_rounds * len(replicas)
    for number in range(num_rounds):
        times: dict[Variant, StepTimes] = {}
        for variant in order.sample(list(replicas), len(replicas)):
            on_progress(number * len(replicas) + len(times), num_blocks)
            is_alone = variant is Variant.ONE_RANK
            times[variant] = time_block(
                replicas[variant], num_steps, device, is_alone=is_alone
            )
        rounds.append(times)
    on_progress(num_blocks, num_blocks)
    return tuple(rounds)


def _is_in_step(replicas: Mapping[Variant, Replica]) -> bool:
    """Say whether all ranks that trained together have the same weights."""
    if Variant.ALL_RANKS not in replicas:
        return True
    digest = replicas[Variant.ALL_RANKS].digest()
    return len(set(hvd.allgather_object(digest))) == 1
