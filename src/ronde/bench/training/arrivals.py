"""Arrival of gradients during backward, without communication."""

import math
from typing import Any

import torch
from torch import Tensor

import ronde.torch as hvd
from ronde.bench.training.outcome import GradientArrival, Phase
from ronde.bench.training.replica import Stopwatch
from ronde.bench.training.torch_replicas import TorchReplica

_BEGUN = list(Phase).index(Phase.FORWARD) - len(Phase)  # counted from a step's end


def measure_arrivals(
    replica: TorchReplica, num_steps: int
) -> tuple[GradientArrival, ...]:
    """Return the gradients in order of arrival; collective.

    All ranks step without communication. Times are medians over the steps of all ranks.
    Hooks exist during these steps only. Unused weights are left out.
    """
    weights: list[Any] = [w for w in replica.model.parameters() if w.requires_grad]
    mark, between = replica.marks
    ready: dict[Tensor, Any] = {}
    ends: list[Any] = []  # of the step's phases

    def arrive(weight: Tensor) -> None:
        ready[weight] = mark()

    hooks = [each.register_post_accumulate_grad_hook(arrive) for each in weights]
    clock, rows = Stopwatch(lambda: ends.append(mark())), list[list[float]]()
    hvd.barrier()
    for _ in range(1 + num_steps):
        ready.clear()
        ends.clear()
        replica.step(clock)
        replica.synchronize()
        stamps = [ready.get(each) for each in weights]
        rows.append([between(ends[_BEGUN], s) if s else math.nan for s in stamps])
    for hook in hooks:
        hook.remove()
    # The first step brings the replica's memory back into the caches.
    everyone: Any = hvd.allgather(torch.tensor(rows[1:], dtype=torch.float64))
    medians_ms: list[float] = (everyone.quantile(0.5, dim=0) * 1e3).tolist()
    arrivals = [
        GradientArrival(weight.numel(), weight.element_size(), ready_ms)
        for weight, ready_ms in zip(weights, medians_ms, strict=True)
        if not math.isnan(ready_ms)
    ]
    return tuple(sorted(arrivals, key=lambda each: each.ready_ms))
