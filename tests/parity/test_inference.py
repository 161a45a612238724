"""Horovod's calls in ``torch.inference_mode()``: another thread carries them out."""

import pytest
import torch
from tests.ranks import run_ranks_bare

import ronde.torch as hvd


def evaluate_and_train_by_turns(_, engine):
    hvd.init(engine=engine)
    for turn in range(10):
        is_evaluation = turn % 2 == 0
        with torch.inference_mode(mode=is_evaluation):
            handles = [
                hvd.allreduce_async(torch.ones(3), name=f"{turn} {i}", op=hvd.Sum)
                for i in range(3)
            ]
        with torch.inference_mode(mode=not is_evaluation):
            # Of both kinds, fused with those above where they meet.
            other = hvd.allreduce_async(torch.ones(3), name=f"{turn} other", op=hvd.Sum)
        with torch.inference_mode(mode=is_evaluation):
            sums = [hvd.synchronize(handle) for handle in (*handles, other)]
            inplace = hvd.allreduce_(torch.ones(5000), op=hvd.Sum)
            gathered = hvd.allgather(torch.ones(2 + hvd.rank()))
            sent = hvd.broadcast_(torch.full((3,), 1.0 + hvd.rank()), 0)
        assert [each.tolist() for each in sums] == [[2.0] * 3] * 4
        assert (inplace[-1].item(), gathered.sum().item(), sent.sum().item()) == (
            2,
            5,
            3,
        )
    hvd.shutdown()
    return "done"


@pytest.mark.parametrize("engine", ["auto", "gloo"])
def test_inference_mode_is_heeded(engine):
    told = run_ranks_bare(2, evaluate_and_train_by_turns, engine)
    assert told == ["done"] * 2
