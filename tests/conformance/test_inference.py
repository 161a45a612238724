"""Collectives in ``torch.inference_mode()``, run by any thread.

A tensor made in inference mode may be written only in inference mode.
"""

import time

import pytest
import torch
from tests.limits import HANG_S

from ronde.collectives import connect

ENGINES = ["gloo", "shared_memory", "scheduled"]


def evaluate_and_train_by_turns(communicator, dtype):
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


def allocate_and_use_by_turns(communicator, dtype):
    for is_made_there in (True, False):
        with torch.inference_mode(mode=is_made_there):
            memory = communicator.allocate(600_000, dtype)
        for turn in range(4):
            for numel in (4, 5000, 500_000):
                with torch.inference_mode(mode=turn % 2 == 0):
                    part = memory[:numel]
                    part.fill_(1.0)
                    communicator.all_reduce(part).wait()
                    assert part[-1].item() == communicator.size
                    communicator.broadcast(part, 0).wait()


def send_and_receive_in_both_modes(communicator):
    for turn in range(8):
        for numel in (4, 500_000):
            # Those of one mode are asked for first, those of the other sent first.
            modes = [(tag, (tag + turn) % 2 == 0) for tag in (1, 2, 3, 4)]
            works = []
            if communicator.rank == 0:
                for tag, mode in reversed(modes):
                    with torch.inference_mode(mode=mode):
                        sent = torch.full((numel,), float(tag))
                        works.append(communicator.send(sent, 1, tag))
            else:
                for tag, mode in modes:
                    with torch.inference_mode(mode=mode):
                        # Of every second element: it is received elsewhere first.
                        room = torch.zeros(2 * numel)[:: 1 + tag // 3][:numel]
                        works.append(communicator.recv(room, 0, tag))
            told = [work.wait() for work in works]
            if communicator.rank == 1:
                assert [each[-1].item() for each in told] == [1.0, 2.0, 3.0, 4.0]


def do_all(communicator):
    for dtype in (torch.float32, torch.bfloat16):
        evaluate_and_train_by_turns(communicator, dtype)
        allocate_and_use_by_turns(communicator, dtype)
    send_and_receive_in_both_modes(communicator)
    return "done"


def by(engine):
    return lambda claim: connect(claim, timeout_s=HANG_S, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_inference_mode_of_the_caller_applies(run_ranks, engine):
    assert run_ranks(2, do_all, connecting=by(engine)) == ["done"] * 2
