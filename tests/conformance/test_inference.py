"""Collectives in ``torch.inference_mode()``, whichever thread carries them out.

A tensor that was made there may be written to there alone.
"""

import time

import pytest
import torch

from ronde.collectives import connect

ENGINES = ["gloo", "shared_memory", "scheduled"]


def evaluate_and_train_by_turns(claim, engine, dtype):
    communicator = connect(claim, timeout_s=60.0, engine=engine)
    for turn in range(12):
        for numel in (4, 5000, 500_000):
            with torch.inference_mode(mode=turn % 2 == 0):
                work = communicator.all_reduce(torch.ones(numel, dtype=dtype))
                others = [
                    communicator.broadcast(torch.ones(numel, dtype=dtype), 0),
                    communicator.all_gather(torch.ones(numel, dtype=dtype)),
                    communicator.reduce_scatter(torch.ones(2 * numel, dtype=dtype)),
                ]
            # Late by turns, so that another thread does the share of who is late.
            if turn % 4 == 2 * communicator.rank:
                time.sleep(0.01)
            assert work.wait()[-1].item() == communicator.size
            for other in others:
                other.wait()
    communicator.close()
    return "done"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ENGINES)
def test_inference_mode_is_heeded_by_every_thread(run_ranks_bare, engine, dtype):
    told = run_ranks_bare(2, evaluate_and_train_by_turns, engine, dtype)
    assert told == ["done"] * 2
