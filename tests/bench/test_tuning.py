"""Tuning on real ranks; a delay put into a real engine makes the outcome certain."""

import time

import pytest
from tests.limits import HANG_S
from torch.distributed import PrefixStore

from ronde.bench import Effort, tune
from ronde.collectives import (
    COLLECTIVES,
    SIZED,
    Communicator,
    EngineConfig,
    TorchDistributedEngine,
    explain,
)
from ronde.errors import UsageError

DELAY_S = 100.0


class Slow(TorchDistributedEngine):
    """Gloo that is late at every all_reduce and all_gather, by the test's clock."""

    late_s = 0.0

    def all_reduce(self, source, out, what):
        Slow.late_s += DELAY_S
        return super().all_reduce(source, out, what)

    def all_gather(self, own, out, counts, call="all_gather"):
        Slow.late_s += DELAY_S
        return super().all_gather(own, out, counts, call)


SHORT = Effort(
    rounds=1,
    seconds=0.0,
    sizes_bytes=(64, 100, 256, 512, 1024),
    clock=lambda: time.perf_counter() + Slow.late_s,
)


def tune_slow_and_fast(info):
    store = EngineConfig(info, HANG_S).meet()
    engines = {"gloo": TorchDistributedEngine, "scheduled/ring": Slow}
    communicators = {
        name: Communicator(
            engine(
                PrefixStore(name, store),
                info.rank,
                info.size,
                timeout_s=HANG_S,
                is_one_host=True,
            )
        )
        for name, engine in engines.items()
    }
    seen = []
    table = tune(communicators, SHORT, lambda done, total: seen.append((done, total)))
    for each in communicators.values():
        each.close()
    assert seen[-1] == (len(seen), len(seen))
    return table


def test_the_fastest_is_chosen_by_all_ranks_alike(run_ranks_bare):
    first, *others = run_ranks_bare(3, tune_slow_and_fast)
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
