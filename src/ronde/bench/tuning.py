"""Measures which engine is fastest for what: the table that ``auto`` goes by."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ronde.collectives import Communicator, ReduceOp
from ronde.collectives.choice import (
    CLASS_SAMPLES_BYTES,
    COLLECTIVES,
    SIZED,
    Choice,
    EngineTable,
)
from ronde.errors import UsageError
from ronde.units import format_size

_ELEMENT_BYTES = 4
_MOST_GATHERED_BYTES = 4 << 20
Call = Callable[[], object]
Times = dict[tuple[str, int], dict[str, float]]  # by collective and bytes; candidate


class Effort(NamedTuple):
    """How long a candidate is measured."""

    rounds: int = 5  # how often; the median counts
    seconds: float = 0.02  # how long each time, at least one call
    sizes_bytes: tuple[int, ...] = CLASS_SAMPLES_BYTES  # one size for each size class
    clock: Callable[[], float] = time.perf_counter


def tune(
    communicators: Mapping[str, Communicator],
    effort: Effort | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> EngineTable:
    """Time the candidates, interleaved, on all ranks; collective."""
    if not communicators:
        raise UsageError("communicators must be at least one, got none.")
    effort = effort or Effort()
    benches = {
        label: _Bench(communicator, max(effort.sizes_bytes))
        for label, communicator in communicators.items()
    }
    works = [(name, size) for name in COLLECTIVES for size in _sizes(name, effort)]
    times: Times = {}
    for index, (name, size) in enumerate(works):
        times[name, size] = _time(benches, name, size, effort)
        if on_progress is not None:
            on_progress(index + 1, len(works))
    return _table(times, effort)


def _sizes(name: str, effort: Effort) -> tuple[int, ...]:
    if name in SIZED:
        return effort.sizes_bytes
    # Of what all ranks gather, each rank holds all.
    return tuple(s for s in effort.sizes_bytes if s <= _MOST_GATHERED_BYTES)


class _Bench:
    """One candidate and buffers that it has allocated."""

    def __init__(self, communicator: Communicator, max_bytes: int) -> None:
        self.communicator = communicator
        self._size = communicator.size
        gathered = min(max_bytes, _MOST_GATHERED_BYTES) * self._size
        self._given = self._allocate(max_bytes)
        self._out = self._allocate(max(max_bytes, gathered))

    def call(self, name: str, num_bytes: int) -> Call:
        comm, size = self.communicator, self._size
        numel = max(num_bytes // _ELEMENT_BYTES // size, 1) * size
        given = self._given[:numel]
        out = self._out[:numel]
        everyones, share = self._out[: numel * size], self._out[: numel // size]
        calls: dict[str, Call] = {
            "all_reduce": lambda: comm.all_reduce(given).wait(),
            "reduce_scatter": lambda: comm.reduce_scatter(given, out=share).wait(),
            "broadcast": lambda: comm.broadcast(given, 0).wait(),
            "all_gather": lambda: comm.all_gather(given, out=everyones).wait(),
            "all_to_all": lambda: comm.all_to_all(given, out=out).wait(),
        }
        return calls[name]

    def _allocate(self, num_bytes: int) -> Tensor:
        # A rank's rows are equally many: one more element for each may be needed.
        numel = num_bytes // _ELEMENT_BYTES + self._size
        return self.communicator.allocate(numel, torch.float32)


def _time(
    benches: Mapping[str, _Bench], name: str, num_bytes: int, effort: Effort
) -> dict[str, float]:
    calls = {label: bench.call(name, num_bytes) for label, bench in benches.items()}
    meeting, clock = next(iter(benches.values())).communicator, effort.clock

    def seconds(call: Call, count: int) -> float:
        meeting.barrier().wait()
        start = clock()
        for _ in range(count):
            call()
        return (clock() - start) / count

    def slowest(own: Sequence[float]) -> list[float]:
        """Return the slowest rank's, on all ranks: what is derived from it is equal."""
        tensor = torch.tensor(own, dtype=torch.float64)
        meeting.all_reduce(tensor, ReduceOp.MAX).wait()
        return [max(float(value), 1e-9) for value in tensor]

    for call in calls.values():
        call()
    once = slowest([seconds(call, 1) for call in calls.values()])
    counts = [max(1, min(1000, int(effort.seconds / s))) for s in once]
    rounds = [
        [seconds(*each) for each in zip(calls.values(), counts, strict=True)]
        for _ in range(effort.rounds)
    ]
    medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
    return dict(zip(calls, slowest(medians), strict=True))


def _table(times: Times, effort: Effort) -> EngineTable:
    choices: dict[str, tuple[Choice, ...]] = {}
    for name in COLLECTIVES:
        by_size = {size: times[name, size] for size in _sizes(name, effort)}
        if name in SIZED:
            choices[name] = tuple(
                _choice(t, f"at {format_size(s)}") for s, t in by_size.items()
            )
            continue
        labels, mean = next(iter(by_size.values())), statistics.geometric_mean
        means = {n: mean(times_s[n] for times_s in by_size.values()) for n in labels}
        choices[name] = (_choice(means, "in the mean"),)
    return EngineTable(choices, f"measurement, medians of {effort.rounds} rounds")


def _choice(times_s: Mapping[str, float], where: str) -> Choice:
    best = min(times_s, key=lambda label: times_s[label])
    text = ", ".join(f"{label} {s * 1e6:.0f} us" for label, s in times_s.items())
    return Choice.of(best, f"{text} {where}")
