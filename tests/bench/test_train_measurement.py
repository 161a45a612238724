"""Training steps on real ranks: who steps, what is in step, what does not fit."""

import statistics
import time
from dataclasses import replace

import pytest
import torch

import ronde.torch as hvd
from ronde.bench import (
    MODELS,
    Marks,
    ParameterServer,
    Phase,
    Stopwatch,
    TorchReplica,
    TrainOptions,
    Variant,
    batches,
    is_in_step,
    measure,
    measure_arrivals,
    measure_footprint,
    time_block,
)
from ronde.errors import UsageError

CPU = torch.device("cpu")
ENGINES = {
    1: {},
    2: {"RONDE_ENGINE": "gloo"},
    3: {"RONDE_ENGINE": "scheduled", "RONDE_ALGORITHM": "tree"},
}
IN_FORCE = {1: ("", ""), 2: ("gloo", ""), 3: ("scheduled", "tree")}
SHORT = TrainOptions(
    MODELS["mnist_cnn"], batch=4, rounds=2, steps=2, warmup=1, device="cpu"
)
KINDS = [
    SHORT,
    replace(SHORT, steps=None, rounds=1, input="gathered"),
    replace(SHORT, dtype="bfloat16", is_channels_last=True),
    replace(SHORT, optimizer="adam", compression="fp16"),
    replace(SHORT, model=MODELS["transformer"], batch=1),
]


def measure_all(_, kinds):
    hvd.init()
    seen = []
    outcomes = [measure(options, lambda *at: seen.append(at)) for options in kinds]
    hvd.shutdown()
    return outcomes, seen


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_comes_to_the_same_figures(run_ranks_bare, size):
    kinds = KINDS if size == 2 else KINDS[:1]
    results = run_ranks_bare(size, measure_all, kinds, environment=ENGINES[size])
    outcomes, seen = results[0]
    assert all(result == results[0] for result in results)
    assert all(each.is_in_step for each in outcomes)
    num_variants = 1 if size == 1 else 3
    num_blocks = 2 * num_variants
    assert seen[: num_blocks + 1] == [(n, num_blocks) for n in range(num_blocks + 1)]
    for options, each in zip(kinds, outcomes, strict=True):
        assert len(each.rounds) == options.rounds
        assert each.num_steps == (options.steps or each.num_steps) >= 1
        assert set(each.rounds[0]) == set(list(Variant)[:num_variants])
        blocks = [block for a_round in each.rounds for block in a_round.values()]
        assert all(0 < sum(b.phases_s.values()) <= b.step_s for b in blocks)
        computing = (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)
        assert all(b.phases_s[phase] > 0 for b in blocks for phase in computing)
        require_parts(each, size)
    setting = outcomes[0].setting
    assert (setting.engine, setting.algorithm) == IN_FORCE[size]
    assert setting.collective_backend == ("" if size == 1 else "gloo")
    assert setting.hosts == (size,)


def require_parts(outcome, size):
    """Check the gradients, buckets and single steps of an outcome."""
    arrivals, buckets = outcome.gradients, outcome.buckets
    assert all(each.itemsize == 4 for each in arrivals)
    assert sum(g.numel for g in arrivals) == outcome.options.model.num_parameters
    ready_ms = [each.ready_ms for each in arrivals]
    assert ready_ms[0] > 0
    assert ready_ms == sorted(ready_ms)
    assert (buckets is None) == (size == 1)
    if buckets is not None:
        assert sum(buckets.num_gradients) == len(arrivals)
        limits = (buckets.first_bytes, buckets.other_bytes)
        assert limits == (1 << 20, 25 << 20)
        rest = list(arrivals)
        for num_bytes, num in zip(
            buckets.num_bytes, buckets.num_gradients, strict=True
        ):
            ours, rest = rest[:num], rest[num:]
            sent = sum(each.numel * each.itemsize for each in ours)
            # Each gradient is padded to 64 bytes and has a number of control data;
            # flags of the first bucket are fewer than 64.
            assert sent < num_bytes <= sent + (64 + 4) * num + 4 * 64
    for variant in outcome.variants():
        num_ranks = 1 if variant is Variant.ONE_RANK else size
        for a_round in outcome.rounds:
            block = a_round[variant]
            assert [len(steps_s) for steps_s in block.steps_s] == (
                [outcome.num_steps] * num_ranks
            )
            # A block is over when its slowest rank's steps are.
            assert all(s > 0 for steps_s in block.steps_s for s in steps_s)
            total_s = max(map(sum, block.steps_s))
            assert total_s <= outcome.num_steps * block.step_s * (1 + 1e-6) + 1e-6


class Counting:
    """Notes how long its steps take, which is a while on rank 1."""

    def __init__(self):
        self.steps_s = []

    is_split_apart = False
    marks = Marks()

    def synchronize(self):
        pass

    def step(self, clock):
        start_s = time.perf_counter()
        clock.start()
        for _ in range(hvd.rank() * 2000):
            torch.ones(100).sum()
        clock.mark(Phase.FORWARD)
        self.steps_s.append(time.perf_counter() - start_s)


def count_steps(_, is_alone):
    hvd.init()
    replica = Counting()
    block = time_block(replica, 3, is_alone=is_alone)
    hvd.shutdown()
    return replica.steps_s, block.step_s


def test_alone_means_alone(run_ranks_bare):
    (alone, step_s), (waiting, also_s) = run_ranks_bare(2, count_steps, True)
    assert (len(alone), len(waiting)) == (4, 0)
    assert step_s == also_s >= statistics.mean(alone[1:])


def test_a_block_takes_as_long_as_its_slowest_rank(run_ranks_bare):
    (_, also_s), (slow, step_s) = run_ranks_bare(2, count_steps, False)
    assert len(slow) == 4
    assert step_s == also_s >= statistics.mean(slow[1:])


def drift_apart(_):
    hvd.init()
    replica = TorchReplica(SHORT, CPU, Variant.ALL_RANKS)
    before = is_in_step({Variant.ALL_RANKS: replica})
    if hvd.rank() == 1:
        with torch.no_grad():
            weight = next(replica.model.parameters()).view(-1)
            weight[3] = torch.nextafter(weight[3], torch.tensor(1.0))
    after = is_in_step({Variant.ALL_RANKS: replica})
    plans = plan_again()
    hvd.shutdown()
    return (before, after), plans


def plan_again():
    """Freeze a weight in the first step only; another one is never used."""
    replica = TorchReplica(SHORT, CPU, Variant.ALL_RANKS)
    weights, plans = list(replica.model.parameters()), []
    weights[0].requires_grad_(False)
    for _ in range(2):
        replica.step(Stopwatch())
        plans.append(replica.buckets().num_gradients)
        weights[0].requires_grad_()
    alone = TorchReplica(SHORT, CPU, Variant.ONE_RANK)
    alone.model.unused = torch.nn.Parameter(torch.ones(7))
    arrivals = measure_arrivals(alone, 2)
    hooks = [each._post_accumulate_grad_hooks for each in alone.model.parameters()]
    return len(weights), plans, sorted(each.numel for each in arrivals), any(hooks)


def test_ranks_that_drift_apart_are_seen_and_plans_are_the_last(run_ranks_bare):
    first, second = run_ranks_bare(2, drift_apart)
    assert first == second
    assert first[0] == (True, False)
    num_weights, plans, sizes, has_hooks = first[1]
    assert [sum(each) for each in plans] == [num_weights - 1, num_weights]
    assert (len(sizes), 7 in sizes, has_hooks) == (num_weights, False, False)


def serve(_):
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    server, found = ParameterServer(model), []
    for _ in range(2):
        model(torch.randn(4, 3)).square().sum().backward()
        own = [each.grad.clone() for each in model.parameters()]
        server.average()
        averaged = [each.grad.clone() for each in model.parameters()]
        found.append((own, averaged))
        model.zero_grad(set_to_none=False)
    hvd.shutdown()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_a_parameter_server_gives_all_ranks_the_same_mean(run_ranks_bare, size):
    for steps in zip(*run_ranks_bare(size, serve), strict=True):
        for rows in zip(*(zip(*step, strict=True) for step in steps), strict=True):
            own, averaged = zip(*rows, strict=True)
            assert all(torch.equal(each, averaged[0]) for each in averaged)
            assert not torch.equal(own[0], own[1])
            torch.testing.assert_close(averaged[0], torch.stack(own).mean(0))


def refuse(_):
    hvd.init()
    with pytest.raises(UsageError) as raised:
        measure(replace(SHORT, batch=10**9), lambda *_: None)
    hvd.shutdown()
    return str(raised.value)


def test_what_does_not_fit_is_refused_on_every_rank(run_ranks_bare):
    first, second = run_ranks_bare(2, refuse)
    assert first == second
    assert "does not fit into a rank's memory" in first
    assert "Type: --batch " in first


def test_what_backward_needs_is_counted_without_being_allocated():
    """Each layer saves its input; ReLU's result is the next layer's input."""
    options = TrainOptions(MODELS["mlp"], batch=1)
    log_softmax = 10
    saved_bytes = 4 * (4096 + 3072 + log_softmax)
    data_bytes = 4 * 784 + 8
    footprint = measure_footprint(options, num_replicas=1)
    assert footprint.sample_bytes == saved_bytes + 2 * data_bytes
    adam = measure_footprint(replace(options, optimizer="adam"), 1)
    assert adam.fixed_bytes - footprint.fixed_bytes == 4 * 15_832_074


@pytest.mark.parametrize("kind", ["prepared", "gathered"])
def test_batches_are_of_the_size_asked_for(kind):
    options = replace(SHORT, input=kind, is_channels_last=True)
    source = batches(options, CPU, seed=1)
    drawn = [next(source) for _ in range(4)]
    assert all(x.shape == (4, 1, 28, 28) and y.shape == (4,) for x, y in drawn)
    is_repeated = torch.equal(drawn[0][0], drawn[2][0])
    assert is_repeated == (kind == "prepared")
    assert not torch.equal(drawn[0][0], drawn[1][0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"steps": -1}, "steps must be at least 1, got -1"),
        ({"warmup": -1}, "warmup must be at least 0, got -1"),
        (
            {"model": MODELS["gpt2"], "is_channels_last": True},
            "channels-last needs .*, got gpt2",
        ),
        (
            {"model": MODELS["mlp"], "is_channels_last": True},
            "channels-last needs .*, got mlp",
        ),
    ],
)
def test_senseless_options_are_refused(changes, words):
    with pytest.raises(UsageError, match=words):
        replace(SHORT, **changes)
