"""Arrival of gradients during backward, without communication."""

import math
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

import ronde.torch as hvd
from ronde.bench.training.outcome import GradientArrival, Phase
from ronde.bench.training.replica import Stopwatch
from ronde.bench.training.torch_replicas import TorchReplica


class ArrivalClock(Stopwatch):
    """Marks the start of backward."""

    def __init__(self, replica: TorchReplica) -> None:
        super().__init__()
        self._mark = replica.marks.mark
        self.begun: Any = None

    def mark(self, phase: Phase) -> None:
        if phase is Phase.FORWARD:
            self.begun = self._mark()


def measure_arrivals(
    replica: TorchReplica, num_steps: int
) -> tuple[GradientArrival, ...]:
    """Return the gradients in order of arrival; collective.

    All ranks step without communication. Times are medians over the steps of all ranks.
    The hooks exist during these steps only.
    """
    weights = [w for w in replica.model.parameters() if w.requires_grad]
    mark, between = replica.marks
    stamps: dict[int, Any] = {}

    def arrive(index: int, _: Tensor) -> None:
        stamps[index] = mark()

    hooks = [
        cast("Any", weight).register_post_accumulate_grad_hook(partial(arrive, index))
        for index, weight in enumerate(weights)
    ]
    hvd.barrier()
    rows: list[list[float]] = []
    for _ in range(1 + num_steps):
        stamps.clear()
        clock = ArrivalClock(replica)
        replica.step(clock)
        replica.synchronize()
        rows.append(
            [
                between(clock.begun, stamps[i]) if i in stamps else math.nan
                for i in range(len(weights))
            ]
        )
    for hook in hooks:
        hook.remove()
    del rows[0]  # brings the replica's memory back into the caches
    everyone = hvd.allgather(torch.tensor(rows, dtype=torch.float64))
    medians = everyone.quantile(0.5, dim=0)  # NaN for unused weights
    arrivals = [
        GradientArrival(weight.numel(), weight.element_size(), ready_s * 1e3)
        for weight, ready_s in zip(
            weights, cast("list[float]", medians.tolist()), strict=True
        )
        if not math.isnan(ready_s)
    ]
    return tuple(sorted(arrivals, key=lambda each: each.ready_ms))
