"""Each sample counts once an epoch, over random changes of ranks; without processes."""

import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from multiprocessing import Semaphore, Value, active_children

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests import ledger
from torch.utils.data import DataLoader, Dataset, IterableDataset

import ronde.torch as hvd
from ronde.errors import UsageError
from ronde.torch.elastic import (
    ElasticLoader,
    ElasticShards,
    LearningRateScale,
    Position,
    StepSampler,
    order_of,
    shard_batch,
)


@st.composite
def samplers(draw):
    num_samples = draw(st.integers(1, 60))
    policy = draw(st.sampled_from(["global", "per-rank"]))
    drop_last = draw(st.booleans())
    # So that a batch of the largest job is not larger than the data set.
    largest = max(1, num_samples // (5 if policy == "per-rank" else 1))
    largest = largest if drop_last else 70
    if drop_last and num_samples < 5:
        drop_last = False
    return StepSampler(
        num_samples,
        draw(st.integers(1, largest)),
        draw(st.booleans()),
        draw(st.integers(-5, 1 << 70)),
        drop_last,
        draw(st.one_of(st.none(), st.integers(1, 9))),
        policy,
    )


def run_schedule(sampler, rng, num_epochs):
    """Train with random members, of which some are lost before or after a step."""
    entries, position, step = [], Position(), 0
    view, new, members = 0, count(), []
    while position.epoch < num_epochs:
        if not members or rng.random() < 0.2:  # others, after whole steps
            members, view = change_members(members, new, rng), view + 1
        size = len(members)
        shards = [sampler.shard(position, rank, size) for rank in range(size)]
        (place,) = {(d.start.epoch, d.batch_size) for d in shards}
        before = [
            ledger.Entry(member, view, 0, step, *place, each.ids, is_applied=False)
            for member, each in zip(members, shards, strict=True)
        ]
        entries += before
        if rng.random() < 0.1:  # undone, on all of them
            members, view = change_members(members, new, rng), view + 1
            continue
        # Some of those that have applied it are lost before they write so.
        witnesses = rng.sample(before, rng.randint(1, size))
        entries += [entry._replace(is_applied=True) for entry in witnesses]
        (position,) = {d.position for d in shards}
        step += 1
    return entries


def change_members(members, new, rng):
    kept = rng.sample(members, rng.randint(0, len(members)))
    return kept + [next(new) for _ in range(rng.randint(not kept, 5 - len(kept)))]


@given(samplers(), st.integers(0, 1 << 60), st.integers(1, 3))
def test_each_sample_counts_once_in_any_schedule(sampler, seed, num_epochs):
    entries = run_schedule(sampler, random.Random(seed), num_epochs)
    batch = sampler.batch_size if sampler.policy == "global" else None
    arguments = (sampler.num_samples, num_epochs)
    problems = ledger.problems_of(
        entries, *arguments, batch_size=batch, drop_last=sampler.drop_last
    )
    assert problems == []


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 20))
def test_shares_are_even(num_samples, size, micro_batch):
    parts = [shard_batch(num_samples, rank, size, micro_batch) for rank in range(size)]
    assert [part.start for part in parts] + [num_samples] == [
        0,
        *(part.stop for part in parts),
    ]
    lengths = [part.stop - part.start for part in parts]
    numbers = [math.ceil(length / micro_batch) for length in lengths]
    assert max(lengths) - min(lengths) <= micro_batch
    assert max(numbers) - min(numbers) <= 1
    assert all(length % micro_batch == 0 for length in lengths[:-1])


@given(st.integers(1, 2000), st.integers(), st.integers(0, 1 << 40))
def test_an_order_is_a_permutation_that_seed_and_epoch_decide(length, seed, epoch):
    order = order_of(length, seed, epoch)
    assert sorted(order.tolist()) == list(range(length))
    assert np.array_equal(order, order_of(length, seed, epoch))
    if length > 100:
        assert not np.array_equal(order, order_of(length, seed, epoch + 1))
        assert not np.array_equal(order, order_of(length, seed + 1, epoch))


def test_weights_are_one_where_shares_are_equal_and_sum_to_the_ranks_otherwise():
    position = Position(0, 0)
    equal = [StepSampler(100, 12).shard(position, rank, 3) for rank in range(3)]
    assert [each.weights for each in equal] == [(1.0,)] * 3
    for size, micro_batch in [(3, None), (4, 3), (5, 7), (14, None)]:
        sampler = StepSampler(100, 13, micro_batch=micro_batch)
        shards = [sampler.shard(position, rank, size) for rank in range(size)]
        total = sum(weight for each in shards for weight in each.weights)
        assert total == pytest.approx(size, rel=1e-15 * 13 * size)


def test_a_rank_without_samples_gets_one_that_does_not_count():
    shards = [
        StepSampler(5, 4, shuffle=False).shard(Position(0, 4), r, 3) for r in range(3)
    ]
    assert [each.ids for each in shards] == [(), (), (4,)]
    assert [each.micro_batches for each in shards] == [((4,),)] * 3
    assert [each.weights for each in shards] == [(0.0,), (0.0,), (3.0,)]


class Numbers(Dataset):
    """Samples that are their ids, and draws from all generators."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == 13_013:
            raise LookupError("no sample 13013")
        noise = [random.random(), np.random.random(), torch.rand(()).item()]
        return index, torch.tensor(noise, dtype=torch.float64)


class Together(Numbers):
    """Loads samples together."""

    def __getitems__(self, indices):
        return [(index, torch.zeros(3)) for index in indices]


def ids_of(share):
    return [int(i) for inputs in share.micro_batches for i in inputs[0]]


@pytest.mark.parametrize(
    ("num_workers", "micro_batch", "dataset"),
    [(0, None, Numbers(100)), (2, 3, Numbers(100)), (2, None, Together(100))],
)
def test_a_loader_goes_where_it_is_sent(num_workers, micro_batch, dataset):
    options = {"prefetch_factor": 4} if num_workers else {}
    loader = ElasticLoader(
        dataset,
        11,
        micro_batch=micro_batch,
        epochs=2,
        num_workers=num_workers,
        **options,
    )
    sampler = StepSampler(100, 11, micro_batch=micro_batch)
    rng = random.Random(1)
    position, workers = Position(), set()
    others = set(active_children())
    for _ in range(40):
        size = rng.randint(1, 4)
        rank = rng.randrange(size)
        loader.seek(position, rank, size)
        for _ in range(rng.randint(0, 4)):
            shards = sampler.shard(position, rank, size)
            if shards.start.epoch == 2:
                with pytest.raises(StopIteration):
                    next(loader)
                position = Position(rng.randint(0, 1), rng.randrange(100))
                break
            share = next(loader)
            assert (share.start, share.position) == (position, shards.position)
            assert share.batch_size == min(11, 100 - position.samples)
            assert (share.ids, share.weights) == (shards.ids, shards.weights)
            if rng.random() < 0.8:  # else the step is left, and its batches dropped
                got = ids_of(share)
                assert got == [i for part in shards.micro_batches for i in part]
            position = shards.position
            workers |= set(active_children()) - others
    assert len(workers) == num_workers
    loader.close()


class Gated(Numbers):
    """Counts the samples loaded by all workers, and waits before each one."""

    def __init__(self, length):
        super().__init__(length)
        self.gate, self.num_loaded = Semaphore(0), Value("i", 0)

    def __getitem__(self, index):
        self.gate.acquire()
        with self.num_loaded.get_lock():
            self.num_loaded.value += 1
        return super().__getitem__(index)


def test_a_seek_leaves_what_was_requested_unloaded():
    data = Gated(1000)
    loader = ElasticLoader(data, 10, num_workers=1, prefetch_factor=8)
    loader.seek(Position(), 0, 1)
    for _ in range(10):
        data.gate.release()
    next(loader)
    loader.seek(Position(3, 500), 1, 2)
    for _ in range(6):
        data.gate.release()  # one that a worker may be in the middle of, and five
    share = next(loader)
    assert ids_of(share) == list(share.ids)
    assert share.start == (3, 500)
    assert data.num_loaded.value <= 16
    for _ in range(1000):
        data.gate.release()  # for the worker to end
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_cannot_be_loaded_is_an_error_each_time(num_workers):
    loader = ElasticLoader(Numbers(13_014), 5, shuffle=False, num_workers=num_workers)
    loader.seek(Position(0, 13_000), 0, 1)
    assert ids_of(next(loader)) == list(range(13_000, 13_005))
    next(loader)
    for _ in range(2):
        with pytest.raises(LookupError, match="13013"):
            next(loader)
    loader.seek(Position(0, 13_005), 0, 1)
    assert ids_of(next(loader)) == list(range(13_005, 13_010))
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_alike_on_any_rank(num_workers):
    seen = {}
    loader = ElasticLoader(
        Numbers(20), 10, seed=3, seed_samples=True, num_workers=num_workers
    )
    for rank, size in [(0, 1), (0, 3), (1, 3), (2, 3)]:
        loader.seek(Position(1, 10), rank, size)
        for index, noise in zip(*next(loader).inputs, strict=True):
            assert torch.equal(seen.setdefault(int(index), noise), noise)
    assert len(seen) == 10
    assert len({tuple(noise.tolist()) for noise in seen.values()}) == 10
    loader.close()


def test_a_loader_leaves_the_generator_alone_and_returns_to_its_state():
    before = torch.get_rng_state()
    loader = ElasticLoader(Numbers(20), 8, micro_batch=2, num_workers=1)
    loader.seek(Position(), 0, 1)
    with pytest.raises(UsageError, match="single micro-batch, got 4"):
        _ = next(loader).inputs
    old = next(loader)
    state = loader.state_dict()
    assert state == {"epoch": 0, "samples": 16}
    expected = next(loader)
    want = ids_of(expected)
    with pytest.raises(UsageError, match="after its step had ended"):
        next(old.micro_batches)
    left = next(loader)
    loader.load_state_dict(state)
    with pytest.raises(UsageError, match="after its step had ended"):
        next(left.micro_batches)
    assert ids_of(next(loader)) == want
    assert torch.equal(torch.get_rng_state(), before)
    loader.close()


def test_the_policy_per_rank_has_larger_batches_on_more_ranks():
    loader = ElasticLoader(Numbers(100), 8, policy="per-rank", drop_last=True)
    loader.seek(Position(), 1, 3)
    share = next(loader)
    assert (share.batch_size, len(share.ids), share.weights) == (24, 8, (1.0,))
    with pytest.raises(UsageError, match="got 104 with 13 ranks"):
        loader.seek(Position(), 1, 13)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize("data", [Stream(), DataLoader([1, 2]), iter([1]), 3])
def test_data_without_a_position_is_refused_with_the_reason(data):
    model = torch.nn.Linear(1, 1)
    with pytest.raises(UsageError, match="Other ranks could not continue"):
        hvd.elastic.Loop(model, torch.optim.SGD(model.parameters()), data)
    with pytest.raises(UsageError, match="Other ranks could not continue"):
        ElasticLoader(data, 1)


def test_a_sampler_of_the_users_own_is_refused():
    with pytest.raises(UsageError, match="does not accept sampler"):
        ElasticLoader([1], 1, sampler=[0])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"micro_batch": 0}, "micro_batch must be at least 1"),
        ({"policy": "both"}, "policy must be global or per-rank, got 'both'"),
        ({"dataset": []}, "num_samples must be at least 1, got 0"),
    ],
)
def test_bad_values_are_refused(changes, text):
    with pytest.raises(UsageError, match=text):
        ElasticLoader(**{"dataset": [1], "batch_size": 1} | changes)


class Shard:
    """Batches with a state, in another order each epoch."""

    def __init__(self, name, length):
        self.name, self.length = name, length
        self.epoch, self.number = 0, 0

    def __iter__(self):
        while self.number < self.length:
            self.number += 1
            yield torch.tensor([self.name, self.epoch, self.number])
        self.epoch, self.number = self.epoch + 1, 0

    def state_dict(self):
        return self.epoch, self.number

    def load_state_dict(self, state):
        self.epoch, self.number = state


LENGTHS = (4, 2, 5, 3, 4)


def own_shards():
    return [Shard(name, length) for name, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("seed", range(12))
def test_shards_move_whole_between_ranks(seed):
    """Ranks are threads; those that live exchange their states now and then."""
    rng = random.Random(seed)
    applied, position, ranks, exchanged = [], Position(), [], {}
    adder = Adder()
    with ThreadPoolExecutor(4) as threads:
        while position.epoch < 2:
            kept = rng.sample(ranks, rng.randint(min(1, len(ranks)), len(ranks)))
            num_new = rng.randint(not kept, 4 - len(kept))
            joiners = [
                ElasticShards(own_shards(), epochs=2, add_up=adder.add_up)
                for _ in range(num_new)
            ]
            ranks = kept + joiners
            for joiner in joiners if exchanged else ():
                joiner.load_state_dict(exchanged)
            for rank, source in enumerate(ranks):
                source.seek(position, rank, len(ranks))
            if rng.random() < 0.5:
                exchanged = exchange(ranks)
            for _ in range(rng.randint(1, 3)):
                shares = adder.take_step(ranks, threads)
                if None in shares:
                    position = Position(2)
                    break
                if rng.random() < 0.3:
                    break  # undone
                applied += batches_of(shares)
                (position,) = {share.position for share in shares}
    expected = [
        (epoch, name, number)
        for epoch in range(2)
        for name, length in enumerate(LENGTHS)
        for number in range(1, length + 1)
    ]
    assert sorted(applied) == expected


def exchange(ranks):
    states = [source.state_dict() for source in ranks]
    for source in ranks:
        for each in states:
            source.merge_states(each)
    return ranks[-1].state_dict()


class Adder:
    """Adds up what ranks that are threads give."""

    def take_step(self, ranks, threads):
        self._barrier, self._values = threading.Barrier(len(ranks)), []
        return list(threads.map(lambda source: next(source, None), ranks))

    def add_up(self, own):
        self._values.append(own)
        self._barrier.wait()
        total = sum(self._values)
        if self._barrier.wait() == 0:
            self._values.clear()
        self._barrier.wait()
        return total


def batches_of(shares):
    ((epoch, _),) = {share.start for share in shares}
    weights = [weight for share in shares for weight in share.weights]
    assert sum(weights) == pytest.approx(len(shares))
    batches = [batch.tolist() for share in shares for batch in share.micro_batches]
    return [(epoch, name, number) for name, _, number in batches]


def test_shards_without_state_or_for_too_many_ranks_are_refused():
    with pytest.raises(UsageError, match=r"shard 0 must have state_dict.*got list"):
        ElasticShards([[1, 2]])
    with pytest.raises(UsageError, match="at most the number of shards, 5, got 6"):
        ElasticShards(own_shards()).seek(Position(), 0, 6)
    source = ElasticShards([Shard(0, 0)], add_up=lambda own: own)
    source.seek(Position(), 0, 1)
    with pytest.raises(UsageError, match="had no batch"):
        next(source)


def test_a_ramp_leads_to_the_rate_of_the_linear_rule_and_no_scheduler_sees_it():
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    scale = LearningRateScale(optimizer, base_size=2, ramp_steps=4)
    sizes = [4] * 6 + [1] * 6
    rates = []
    for step, size in enumerate(sizes):
        if step in (0, 6):
            scale.begin(step, 3)
        scale.begin(step, size)  # the step is done again, with other ranks
        parameter.grad = torch.ones(())
        before = parameter.item()
        optimizer.step()
        rates.append((before - parameter.item()) * 2**step)
        assert optimizer.param_groups[0]["lr"] == 0.5**step
        schedule.step()
    assert rates == pytest.approx(
        [1.25, 1.5, 1.75, 2, 2, 2, 1.625, 1.25, 0.875, 0.5, 0.5, 0.5], rel=1e-6
    )
    scale.close()
    parameter.data.zero_()
    optimizer.step()
    assert parameter.item() == -(0.5 ** len(sizes))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1))
@settings(max_examples=30)
def test_ranks_that_saw_other_attempts_have_equal_factors(views):
    """One rank prepares each step of each view; another one only what was applied."""
    make = lambda: LearningRateScale(  # noqa: E731
        torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(0.5)), 3, ramp_steps=3
    )
    busy, lazy, step = make(), make(), 0
    for size, num_applied in views:
        busy.begin(step, size)
        for _ in range(num_applied):
            joiner = make()
            joiner.load_state_dict(lazy.state_dict())
            for each in (busy, lazy, joiner):
                each.begin(step, size)
            assert busy.factor == lazy.factor == joiner.factor
            step += 1
