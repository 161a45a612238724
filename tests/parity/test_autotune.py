"""Bucket sizes that are tried while ranks train."""

import csv
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from tests.ranks import run_ranks, run_ranks_bare
from torch import nn

import ronde.torch as hvd
from ronde.data_parallel import (
    BucketLimits,
    GradientSpec,
    Reducer,
    ReducerGroup,
    ReducerOptions,
    candidate_limits,
    plan_buckets,
)
from ronde.errors import UsageError
from ronde.session import current_session
from ronde.tuning import TuningLog, TuningOptions

AMOUNT = TuningOptions(
    warmup_samples=1, steps_per_sample=2, max_samples=8, num_pairs=3, min_gain=0.0
)
MOST_STEPS = (1 + 8 + 2 * 3) * AMOUNT.num_fed
WIDTHS = (64, 1200, 600, 900, 8)
QUICKLY = {
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "0",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "1",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "4",
}


@given(st.lists(st.integers(1, 1 << 24), min_size=1, max_size=40))
def test_candidates_lead_to_different_buckets(sizes):
    specs = [GradientSpec(numel, 4, "x") for numel in sizes]
    default, order = BucketLimits(), range(len(sizes))
    limits = candidate_limits(specs, order, default)
    plans = [plan_buckets(specs, order, each) for each in limits]
    assert limits[0] == default
    assert len(set(plans)) == len(plans)


def build() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def train(communicator, options, num_steps, last_step=None):
    """Train; ``last_step`` says after how many steps a rank has no data any more."""
    model = build()
    named = list(model.named_parameters())
    reducer = Reducer(named, ReducerGroup(communicator.duplicate()), options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    plans: list[int] = []
    for number in range(num_steps if last_step is None else last_step):
        random = torch.Generator().manual_seed(10 * number + communicator.rank)
        inputs = torch.randn(2, WIDTHS[0], generator=random, dtype=torch.float64)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        reducer.step_done()
        plans.append(len(reducer.rounds.buckets))
    if last_step is not None:
        reducer.participate_with_zeros()
    results = [p.detach().clone() for p in model.parameters()]
    limits = reducer.rounds.tuned_limits
    reducer.close()
    return results, plans, limits


def test_all_ranks_change_at_once_and_gradients_do_not(tmp_path):
    path = tmp_path / "autotune.csv"

    def run(communicator):
        log = TuningLog(path) if communicator.rank == 0 else None
        tuning = replace(AMOUNT, log=log)
        options = ReducerOptions(tuning=tuning)
        return train(communicator, options, MOST_STEPS + 5)

    def run_plainly(communicator):
        return train(communicator, ReducerOptions(), MOST_STEPS + 5)

    results = run_ranks(2, run)
    weights, plans, limits = results[0]
    assert limits is not None
    assert len(set(plans)) >= 3
    assert plans[-1] == plans[-5]
    assert results[1][1:] == (plans, limits)
    for mine, theirs in zip(weights, results[1][0], strict=True):
        assert torch.equal(mine, theirs)
    expected = run_ranks(2, run_plainly)[0][0]
    # To the bit: a gradient's sum does not depend on the bucket that it travels in.
    for mine, theirs in zip(weights, expected, strict=True):
        assert torch.equal(mine, theirs)
    check_log(path, limits)


def check_log(path, limits):
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["tuned"] for row in rows} == {"gradients.0.weight"}
    phases = [row["phase"] for row in rows]
    assert phases[:2] == ["warmup", "search"]
    assert phases.count("best") == 1
    best = rows[-1]
    assert best["phase"] == "best"
    assert int(best["first_bucket_bytes"]) == limits.first_bytes
    assert int(best["bucket_bytes"]) == limits.other_bytes
    assert float(best["score"]) > 0


def test_a_rank_that_has_joined_changes_with_the_others():
    def run(communicator):
        options = ReducerOptions(tuning=AMOUNT)
        # Rank 0, which decides, runs out of data first.
        last = (3, MOST_STEPS + 3, 11)[communicator.rank]
        return train(communicator, options, MOST_STEPS, last)[2]

    results = run_ranks(3, run)
    assert results[0] is not None
    assert all(result == results[0] for result in results)


def test_horovods_variables_turn_it_on(tmp_path):
    path = tmp_path / "autotune.csv"

    def run(_):
        hvd.init()
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for _ in range(MOST_STEPS):
            optimizer.zero_grad()
            model(torch.ones(2, WIDTHS[0], dtype=torch.float64)).sum().backward()
            optimizer.step()
        limits = optimizer.reducer.rounds.tuned_limits
        hvd.shutdown()
        return limits

    variables = QUICKLY | {"HOROVOD_AUTOTUNE_LOG": str(path)}
    limits = run_ranks_bare(2, run, environment=variables)
    assert limits[0] is not None
    assert limits[0] == limits[1]
    assert path.read_text().splitlines()[-1].startswith("gradients.0.weight,best,")


def test_a_log_that_cannot_be_written_is_refused(tmp_path):
    path = tmp_path / "nowhere" / "autotune.csv"
    variables = QUICKLY | {"HOROVOD_AUTOTUNE_LOG": str(path)}
    with pytest.raises(UsageError, match="cannot write HOROVOD_AUTOTUNE_LOG="):
        run_ranks_bare(1, lambda _: hvd.init(), environment=variables)


@pytest.mark.parametrize("is_set", [False, True])
def test_fusion_is_tuned_unless_its_threshold_is_set(tmp_path, is_set):
    path = tmp_path / "autotune.csv"

    def run(_):
        hvd.init()
        tensors = [torch.full((100 + i,), float(hvd.rank())) for i in range(20)]
        # Three steps more than samples take: the first only marks the time, in the
        # second the last sample ends, and before the third all ranks hear of it.
        for _ in range((4 + 2 * 6) * 2 + 3):
            handles = [
                hvd.allreduce_async(t, name=str(i), op=hvd.Sum)
                for i, t in enumerate(tensors)
            ]
            results = [hvd.synchronize(handle) for handle in handles]
        for tensor, result in zip(tensors, results, strict=True):
            assert torch.equal(result, torch.ones_like(tensor))
        coordinator = current_session().states[0].coordinator
        threshold = coordinator.execution.threshold_bytes
        hvd.shutdown()
        return threshold

    variables = QUICKLY | {"HOROVOD_AUTOTUNE_LOG": str(path)}
    if is_set:
        variables["HOROVOD_FUSION_THRESHOLD"] = str(1 << 20)
    thresholds = run_ranks_bare(2, run, environment=variables)
    assert thresholds[0] == thresholds[1]
    rows = path.read_text().splitlines()[1:]
    if is_set:
        assert thresholds[0] == 1 << 20
        assert not rows
    else:
        assert rows[-1].startswith(f"fusion,best,,,{thresholds[0]},")
