"""Tuning on real ranks; a delay put into a real engine makes the outcome certain."""

import time

import pytest

from ronde.bench import Effort, tune
from ronde.collectives import (
    COLLECTIVES,
    SIZED,
    TorchDistributedEngine,
    connect,
    explain,
)
from ronde.errors import UsageError

SHORT = Effort(rounds=1, seconds=0.0, sizes_bytes=(64, 100, 256, 512, 1024))
DELAY_S = 0.2


class Slow(TorchDistributedEngine):
    """Gloo with a delay before every all_reduce and all_gather."""

    def all_reduce(self, source, out, what):
        time.sleep(DELAY_S)
        return super().all_reduce(source, out, what)

    def all_gather(self, own, out, counts, call="all_gather"):
        time.sleep(DELAY_S)
        return super().all_gather(own, out, counts, call)


def by_gloo(claim):
    return connect(claim, engine="gloo", timeout_s=60.0)


def tune_slow_and_fast(communicator):
    slow = communicator.duplicate()
    slow._engine.__class__ = Slow
    seen = []
    table = tune(
        {"gloo": communicator, "scheduled/ring": slow},
        SHORT,
        lambda done, total: seen.append((done, total)),
    )
    slow.close()
    assert seen[-1] == (len(seen), len(seen))
    return table


def test_the_fastest_is_chosen_by_all_ranks_alike(run_ranks):
    first, *others = run_ranks(3, tune_slow_and_fast, connecting=by_gloo)
    assert all(table.choices == first.choices for table in others)
    assert [explain(table) for table in others] == [explain(first)] * 2
    assert set(first.choices) == set(COLLECTIVES)
    for name in COLLECTIVES:
        assert len(first.choices[name]) == (5 if name in SIZED else 1)
    for choice in (*first.choices["all_reduce"], *first.choices["all_gather"]):
        assert choice.engine == "gloo"
        assert "scheduled/ring" in choice.reason


def test_somebody_must_be_measured():
    with pytest.raises(UsageError, match="communicators must be at least one"):
        tune({})
