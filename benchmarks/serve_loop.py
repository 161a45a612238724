"""Time a step of the batch manager's loop with a model that costs nothing.

The ranks of ``ronde run`` serve eight requests at once; rank 0 then takes as many steps
with the engine alone. The difference is the loop's own cost. The last line is JSON.

    ronde run -n 2 --no-prefix benchmarks/serve_loop.py
"""

import json
import time
from collections.abc import Sequence

import torch

from ronde.serve import (
    BatchManager,
    Capacity,
    InferenceRequest,
    Response,
    StepEngine,
    StepRow,
)
from ronde.world import read_rank_info

NUM_STEPS, NUM_REQUESTS = 4000, 8
LOGITS = torch.zeros(8)
CAPACITY = Capacity(
    NUM_STEPS, block_tokens=16, max_requests=8, max_len=2 * NUM_STEPS, vocabulary=8
)


def compute(rows: Sequence[StepRow]) -> torch.Tensor:
    return LOGITS.expand(len(rows), -1)


def make_requests() -> list[InferenceRequest]:
    return [InferenceRequest(i, (1,), NUM_STEPS) for i in range(NUM_REQUESTS)]


def time_loop() -> float:
    """Return the seconds of a step of all ranks."""

    def get_requests(_: int) -> list[InferenceRequest]:
        manager.stop()
        return make_requests()

    def ignore(_: Response) -> None: ...

    engine = StepEngine(compute, compute, CAPACITY)
    manager = BatchManager(engine, get_requests, ignore)
    begun_s = time.monotonic()
    manager.run()
    return (time.monotonic() - begun_s) / NUM_STEPS


def time_engine() -> float:
    """Return the seconds of a step of this rank alone."""
    engine = StepEngine(compute, compute, CAPACITY)
    for request in make_requests():
        engine.add(request)
    begun_s = time.monotonic()
    while engine.has_work:
        engine.step()
    return (time.monotonic() - begun_s) / NUM_STEPS


def main() -> None:
    step_s = time_loop()
    if read_rank_info().rank == 0:
        own_s = time_engine()
        print(f"a step {1e3 * step_s:.3f} ms, {1e3 * own_s:.3f} of them the engine's")
        print(json.dumps({"step_s": step_s, "engine_s": own_s}))


if __name__ == "__main__":
    main()
