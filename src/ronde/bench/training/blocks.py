"""Blocks of training steps, timed on every rank."""

import gc
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch

import ronde.torch as hvd
from ronde.bench.training.clocks import NoClock, Stopwatch
from ronde.bench.training.devices import synchronize
from ronde.bench.training.phases import Phase, StepTimes
from ronde.bench.training.replica import Replica

_MAX_PROFILED_STEPS = 10


def time_block(
    replica: Replica, num_steps: int, device: torch.device, *, is_alone: bool = False
) -> StepTimes:
    """Time a block of steps; collective.

    One step goes before, which brings the replica's memory back into the caches.

    Args:
        replica: What steps.
        num_steps: How often.
        device: Where it trains.
        is_alone: Only rank 0 steps; the others wait, blocked and not spinning.

    Returns:
        The slowest rank's times, on every rank.
    """
    is_stepping = not is_alone or hvd.rank() == 0
    own = StepTimes(0.0, dict.fromkeys(Phase, 0.0))
    if is_stepping:
        replica.step(NoClock())
        synchronize(device)
    hvd.barrier()
    if is_stepping:
        with _no_garbage_collection():
            own = _time_steps(replica, num_steps, device)
    return _slowest(own)


def _time_steps(replica: Replica, num_steps: int, device: torch.device) -> StepTimes:
    stopwatch = Stopwatch(partial(synchronize, device))
    if device.type == "cpu":
        step_s = _elapsed_s(replica, stopwatch, num_steps, device)
        return StepTimes(step_s, stopwatch.seconds_a_step(num_steps))
    # A synchronisation a phase would keep the host from running ahead of the device,
    # so the phases are timed in steps of their own.
    step_s = _elapsed_s(replica, NoClock(), num_steps, device)
    num_profiled = min(num_steps, _MAX_PROFILED_STEPS)
    _elapsed_s(replica, stopwatch, num_profiled, device)
    return StepTimes(step_s, stopwatch.seconds_a_step(num_profiled))


def _elapsed_s(
    replica: Replica, clock: NoClock | Stopwatch, num_steps: int, device: torch.device
) -> float:
    start_ns = time.perf_counter_ns()
    for _ in range(num_steps):
        replica.step(clock)
    synchronize(device)
    return (time.perf_counter_ns() - start_ns) / num_steps / 1e9


def _slowest(own: StepTimes) -> StepTimes:
    row = torch.tensor(
        [[own.step_s, *(own.phases_s[phase] for phase in Phase)]], dtype=torch.float64
    )
    rows = cast("list[list[float]]", hvd.allgather(row).tolist())
    phases = max((each[1:] for each in rows), key=sum)
    return StepTimes(
        step_s=max(each[0] for each in rows),
        phases_s=dict(zip(Phase, phases, strict=True)),
    )


@contextmanager
def _no_garbage_collection() -> Generator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
