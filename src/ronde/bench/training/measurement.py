"""Measures training steps of one model: the library call of ``ronde bench train``."""

import math
import random
from collections.abc import Callable, Mapping

import torch

import ronde.torch as hvd
from ronde.bench.training.blocks import time_block
from ronde.bench.training.clocks import NoClock
from ronde.bench.training.devices import choose_device, device_name, used
from ronde.bench.training.footprint import require_fit
from ronde.bench.training.options import TrainOptions
from ronde.bench.training.outcome import Outcome, Setting
from ronde.bench.training.phases import Round, StepTimes, Variant
from ronde.bench.training.replica import Replica
from ronde.errors import UsageError
from ronde.torch.session import current_session

_BLOCK_S = 0.4
_MAX_STEPS = 100

OnProgress = Callable[[int, int], None]
"""Told how many blocks are done, and of how many."""


def measure(options: TrainOptions, on_progress: OnProgress) -> Outcome:
    """Train on 1 rank, on all, and on all without communication; collective.

    ``ronde.torch`` must be initialised. The three are measured in blocks of a few steps
    that take turns, in another order every round, so that a machine that slows down
    slows all of them.

    Args:
        options: What to measure.
        on_progress: Called on every rank before each block.

    Returns:
        All rounds, the same on every rank.

    Raises:
        UsageError: There is no such device, or the model does not fit.
        CollectiveError: A rank was lost.
    """
    device = _agree_on_devices(options)
    num_replicas = 1 if hvd.size() == 1 else 2
    with used(device):
        require_fit(options, device, num_replicas)
        replicas = _make_replicas(options, device)
        num_steps = options.steps or _calibrate(replicas, device)
        rounds = _run_rounds(replicas, num_steps, options.rounds, device, on_progress)
        is_in_step = _is_in_step(replicas)
    return Outcome(options, _setting(device), num_steps, rounds, is_in_step)


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
            replica.step(NoClock())
    return replicas


def _calibrate(replicas: Mapping[Variant, Replica], device: torch.device) -> int:
    """Return how many steps last long enough to be timed; the same on all ranks."""
    step_s = time_block(replicas[Variant.ONE_RANK], 1, device).step_s
    return max(1, min(_MAX_STEPS, math.ceil(_BLOCK_S / step_s)))


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


def _setting(device: torch.device) -> Setting:
    is_shared = hvd.size() > 1
    return Setting(
        num_ranks=hvd.size(),
        num_threads=torch.get_num_threads(),
        device=device.type,
        device_name=device_name(device),
        engine=current_session().communicator.engine if is_shared else "",
        torch=torch.__version__,
    )
