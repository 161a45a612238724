"""Time the cost of a step of ``ronde serve`` beside a model that sleeps for 20 ms.

A front with two ranks serves 16 requests at a time. The cost is the time from step to
step on rank 0, less the time in the engine: commands, broadcast, digest and tokens. The
last line is JSON.

    python benchmarks/serve_front.py -n 2
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import torch

from ronde.serve import Capacity, InferenceRequest, ReplicaConfig, StepEngine, StepRow
from ronde.serve.front import Front, FrontOptions
from ronde.serve.metrics import ServingMetrics
from ronde.serve.supervision import ReplicaOptions
from ronde.world import RankInfo

NUM_STEPS, NUM_REQUESTS, STEP_S = 500, 16, 0.02
LOGITS = torch.zeros(8)


def compute(rows: Sequence[StepRow]) -> torch.Tensor:
    time.sleep(STEP_S)
    return LOGITS.expand(len(rows), -1)


def make_engine(_config: ReplicaConfig, _info: RankInfo) -> StepEngine:
    return StepEngine(compute, compute, Capacity(9000, 16, NUM_REQUESTS, 9000, 8))


class TimedMetrics(ServingMetrics):
    """Metrics that keep the times of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[float, float]] = []

    def on_step(self, num_tokens: int, step_s: float, broadcast_s: float) -> None:
        super().on_step(num_tokens, step_s, broadcast_s)
        if num_tokens == NUM_REQUESTS:
            self.steps.append((time.monotonic(), step_s))


async def measure(num_ranks: int) -> list[float]:
    """Return the seconds that each step took beside the engine's."""
    metrics = TimedMetrics()
    config = ReplicaConfig("", engine="benchmarks.serve_front:make_engine")
    jobs = [ReplicaOptions(num_ranks, ("--standalone",))]
    front = Front(
        config, FrontOptions(), jobs, metrics, lambda text: print(text, file=sys.stderr)
    )
    ranks = asyncio.create_task(front.run())
    await front.was_ready.wait()
    flights = [
        front.submit(InferenceRequest(0, (1,), NUM_STEPS)) for _ in range(NUM_REQUESTS)
    ]
    for flight in flights:
        await flight.more(NUM_STEPS - 1)
    await front.drain(10)
    await ranks
    return [
        later_s - earlier_s - step_s
        for (earlier_s, _), (later_s, step_s) in pairwise(metrics.steps)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, default=2)
    cost_s = sorted(asyncio.run(measure(parser.parse_args().n)))
    p50_s, p95_s = median(cost_s), cost_s[int(0.95 * len(cost_s))]
    print(f"a step costs {1e3 * p50_s:.2f} ms (p95 {1e3 * p95_s:.2f}) beside its model")
    print(json.dumps({"p50_s": p50_s, "p95_s": p95_s, "step_s": STEP_S}))


if __name__ == "__main__":
    main()
