"""A rank that is missing in a collective: the warning, and the end of the job.

The cases are those of Horovod's integration test of stalls, with the texts, and also
for gradients.
"""

import functools
import logging
import re
import threading

import pytest
import torch
from tests.limits import HANG_S
from tests.parity.sessions import run_sessions

import ronde.torch as hvd

SOON = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
BOUNDED = SOON | {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5"}
"""So long no rank that starts is late."""


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []
        self.has_some = threading.Event()

    def emit(self, record):
        text = record.getMessage()
        if not text.startswith("backward() returned before"):
            self.lines.append(text)
            self.has_some.set()


def _listen():
    heard = _Lines()
    logger = logging.getLogger("ronde")
    logger.addHandler(heard)
    logger.propagate = False
    return heard


@pytest.mark.waits
def test_late_gradients_are_told_of_and_then_used():
    """Rank 1 computes for long; rank 0 is warned; then both go on."""

    def work():
        heard = _listen()
        model = torch.nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        for step in range(2):
            if step == 1 and hvd.rank() == 1:
                hvd.barrier(process_set=hvd.global_process_set)
            if step == 1 and hvd.rank() == 0:
                waiting = threading.Thread(
                    target=lambda: (heard.has_some.wait(HANG_S), hvd.barrier())
                )
                waiting.start()
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        if hvd.rank() == 0:
            waiting.join()
        return heard.lines, model.weight.tolist()

    (first, weights), (second, same) = run_sessions(2, work, environment=SOON)
    assert not second
    assert weights == same
    assert "waiting for remainder of ranks for more than 1 seconds" in first[0]
    assert "1: [gradients" in first[0]
    assert "rank 1: waiting for [barrier.noname]" in first[0]


@pytest.mark.waits
@pytest.mark.parametrize(
    "engine", ["auto", pytest.param("gloo", marks=pytest.mark.long)]
)
def test_gradients_that_never_come_end_the_job(engine):
    def work():
        _listen()
        model = torch.nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        if hvd.rank() == 1:
            call = functools.partial(hvd.allreduce, torch.ones(1), name="alone")
        else:
            model(torch.ones(2, 3)).sum().backward()
            call = optimizer.step
        with pytest.raises(hvd.HorovodInternalError) as caught:
            call()
        return str(caught.value)

    _, second = run_sessions(2, work, engine=engine, environment=BOUNDED)
    assert second.startswith("Horovod has been shut down.")
    # Each waits for the other, and since nearly the same time: one, or both, had waited
    # for as long as is allowed when they were asked.
    missing = re.findall(r"^(\d)(!?): \[(\w+)", second, re.MULTILINE)
    named = {rank: name for rank, _, name in missing}
    assert named == {"0": "allreduce", "1": "gradients"}
    assert "!" in {mark for _, mark, _ in missing}
