"""Elastic training in process: what is kept, restored and made equal; who trains."""

import operator
import os
import random
import threading
import time
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.limits import HANG_S
from torch import nn
from torch.utils.data import DataLoader

import ronde.torch as hvd
from ronde.torch.elastic import (
    HostsUpdatedInterrupt,
    HostUpdateResult,
    StateHandler,
    get_handler_registry,
    run_fn,
    set_handler_registry,
)

ADDED, REMOVED = HostUpdateResult.added, HostUpdateResult.removed


def on_ranks(run_ranks_bare, size: int, fn: Callable[..., Any], *args: Any) -> list:
    """Call ``fn(*args)`` between ``init`` and ``shutdown`` on ``size`` ranks."""

    def body(info, *args):
        hvd.init()
        try:
            return fn(*args)
        finally:
            hvd.shutdown()

    return run_ranks_bare(size, body, *args, timeout_s=HANG_S)


def train_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def test_all_of_a_state_is_restored_and_made_equal(run_ranks_bare) -> None:
    def fn():
        torch.manual_seed(hvd.rank())
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None))
        model.eval()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + hvd.rank())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        state = hvd.elastic.TorchState(
            model, optimizer, scheduler=scheduler, seen=[hvd.rank()], epoch=hvd.rank()
        )
        state.sync()
        assert (state.seen, state.epoch) == ([0], 0)
        assert optimizer.param_groups[0]["lr"] == 0.1
        weights = values_of(model)

        train_a_step(model, optimizer)
        scheduler.step()
        state.seen.append(7)
        state.epoch += 1
        committed = values_of(model)
        state.commit()

        train_a_step(model, optimizer)
        scheduler.step()
        state.seen.append(8)
        state.epoch += 1
        state.restore()
        assert (state.seen, state.epoch) == ([0, 7], 1)
        assert scheduler.last_epoch == 1
        assert scheduler.optimizer is optimizer
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert_equal(values_of(model), committed)
        # Adam's step counter was not the copy's own.
        assert all(int(s["step"]) == 1 for s in optimizer.state.values())
        return weights, committed

    first, *others = on_ranks(run_ranks_bare, 3, fn)
    for other in others:
        assert_equal(first[0], other[0])
        assert_equal(first[1], other[1])


def test_assigning_what_is_handled_saves_it(run_ranks_bare) -> None:
    def fn():
        state = hvd.elastic.TorchState(nn.Linear(1, 1))
        other = nn.Linear(1, 1)
        before = values_of(other)
        state.model = other
        nn.init.constant_(other.weight, 3.0)
        state.restore()
        assert state.model is other
        assert_equal(values_of(other), before)

    on_ranks(run_ranks_bare, 1, fn)


def test_types_can_be_given_handlers(run_ranks_bare) -> None:
    class Box:
        def __init__(self, value):
            self.value = value

    class BoxHandler(StateHandler):
        def save(self):
            self.saved = self.value.value

        def restore(self):
            self.value.value = self.saved

        def sync(self):
            self.value.value = hvd.broadcast_object(self.value.value)

    def fn():
        set_handler_registry([(Box, BoxHandler), *get_handler_registry()])
        box = Box(hvd.rank())
        model = nn.Linear(1, 1)
        state = hvd.elastic.TorchState(box=box, model=model)
        state.sync()
        state.commit()
        box.value = 9
        before = values_of(model)
        nn.init.constant_(model.weight, 9.0)
        state.restore()
        assert state.box is box
        assert_equal(values_of(model), before)  # by the handler that it had
        return box.value

    assert on_ranks(run_ranks_bare, 2, fn) == [0, 0]


def test_every_rank_hears_what_rank_0_has_heard(run_ranks_bare) -> None:
    def fn():
        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, batch=0)
        heard = []

        def check():
            try:
                state.check_host_updates()
                heard.append(None)
            except HostsUpdatedInterrupt as interrupt:
                heard.append(interrupt.skip_sync)

        def tell(*updates):
            if hvd.rank() == 0:
                for timestamp, update in updates:
                    state.on_hosts_updated(timestamp, update)
            check()

        tell()
        tell((5, ADDED))
        tell((5, REMOVED))  # in the same second: another change all the same
        tell((6, REMOVED), (6, ADDED))
        tell((3, ADDED))  # of before: answered by what came since
        tell()
        state.on_hosts_updated(9, ADDED)
        state.on_reset()
        check()
        return heard

    expected = [None, False, True, False, None, None, None]
    assert on_ranks(run_ranks_bare, 3, fn) == [expected] * 3


def test_training_goes_on_after_a_failed_collective(run_ranks_bare) -> None:
    def fn():
        resets = []
        calls = []

        @hvd.elastic.run
        def train(state, num_steps):
            calls.append(state.step)
            while state.step < num_steps:
                state.total += int(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="x"))
                state.step += 1
                if state.step == 3 and len(calls) == 1:
                    hvd.allreduce(torch.ones(1 + hvd.rank()), name="wrong")
                if state.step % 2 == 0:
                    state.commit()
            return state.total

        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0, total=0)
        state.register_reset_callbacks([lambda: resets.append(hvd.size())])
        return train(state, 5), calls, resets

    assert on_ranks(run_ranks_bare, 3, fn) == [(15, [0, 2], [3])] * 3


def always_fails(calls, most=float("inf")):
    @hvd.elastic.run
    def train(state):
        calls.append((state.step, time.monotonic()))
        if len(calls) < most:
            raise hvd.HorovodInternalError("on purpose")

    train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=7))


def test_the_reset_limit_ends_training(run_ranks_bare) -> None:
    def body(info):
        hvd.init()
        calls = []
        with pytest.raises(hvd.HorovodInternalError) as caught:
            always_fails(calls)
        hvd.shutdown()
        error = caught.value
        return [step for step, _ in calls], str(error), str(error.__cause__)

    limit = {"HOROVOD_RESET_LIMIT": "2"}
    for calls, text, cause in run_ranks_bare(2, body, environment=limit):
        assert calls == [7] * 3
        assert text.startswith("training was interrupted 3 times, more than the reset")
        assert cause == "on purpose"


def test_training_that_fails_again_and_again_backs_off(run_ranks_bare) -> None:
    def body(info):
        hvd.init()
        calls = []
        always_fails(calls, most=5)
        hvd.shutdown()
        return [then - at for (_, at), (_, then) in pairwise(calls)]

    pauses_s = run_ranks_bare(1, body)[0]
    assert len(pauses_s) == 4
    least_s = [0.0, 0.1, 0.2, 0.4]  # the first try comes at once
    assert all(map(operator.ge, pauses_s, least_s)), pauses_s


def test_a_failure_while_ranks_meet_anew_is_one_more(run_ranks_bare) -> None:
    def fn():
        resets = []

        def reset():
            resets.append(len(resets))
            if len(resets) == 1:
                raise hvd.HorovodInternalError("nobody came")

        def train(state):
            if not resets:
                raise hvd.HorovodInternalError("on purpose")
            return state.step

        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=7)
        return run_fn(train, reset)(state), resets

    assert on_ranks(run_ranks_bare, 1, fn) == [(7, [0, 1])]


def test_any_other_exception_ends_training(run_ranks_bare) -> None:
    def fn():
        @hvd.elastic.run
        def train(state):
            raise KeyError("mine")

        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)
        with pytest.raises(KeyError, match="mine"):
            train(state)
        # Nobody passes changes on to it any more.
        hvd.elastic.notification_manager.handle_hosts_updated(1.0, ADDED)
        state.check_host_updates()

    on_ranks(run_ranks_bare, 1, fn)


def test_news_may_come_from_any_thread(run_ranks_bare) -> None:
    def fn():
        calls = []

        @hvd.elastic.run
        def train(state):
            calls.append(state.step)
            if len(calls) == 1:
                state.step = 4
                told = (float(hvd.rank()), ADDED)
                news = threading.Thread(
                    target=hvd.elastic.notification_manager.handle_hosts_updated,
                    args=told,
                )
                news.start()
                news.join()
                state.check_host_updates()
            return state.step

        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)
        return train(state), calls

    assert on_ranks(run_ranks_bare, 2, fn) == [(4, [0, 4])] * 2


def test_those_left_share_the_epoch_anew_when_a_rank_goes(run_ranks_bare) -> None:
    """Nothing is synchronised then; each sample must be seen all the same."""
    num_samples, batch_size = 30, 2

    def fn():
        first_rank = hvd.rank()
        sampler = hvd.elastic.ElasticSampler(range(num_samples), seed=3)
        loader = DataLoader(range(num_samples), batch_size=batch_size, sampler=sampler)
        state = hvd.elastic.TorchState(sampler=sampler)
        seen = []

        @hvd.elastic.run
        def train(state):
            for index, batch in enumerate(loader):
                seen.extend(batch.tolist())
                sampler.record_batch(index, batch_size)
                if len(seen) == 2 * batch_size and hvd.size() == 3:
                    state.on_hosts_updated(1.0, REMOVED)
                    # What an elastic launcher would tell those that are left.
                    os.environ.update(  # noqa: TID251
                        RANK=str(first_rank % 2), WORLD_SIZE="2", LOCAL_SIZE="2"
                    )
                    os.environ.update(  # noqa: TID251
                        LOCAL_RANK=str(first_rank % 2), LOCAL_WORLD_SIZE="2"
                    )
                    try:
                        state.commit()
                    except HostsUpdatedInterrupt:
                        if first_rank == 2:
                            return
                        raise

        train(state)
        return seen

    seen = on_ranks(run_ranks_bare, 3, fn)
    assert [len(each) for each in seen] == [4 + 9, 4 + 9, 4]
    assert sorted(chain.from_iterable(seen)) == list(range(num_samples))


def share_all_samples(num_samples, sizes, shuffle, data) -> None:
    taken: list[int] = []
    processed = 0
    for size in sizes:
        samplers = []
        for rank in range(size):
            sampler = hvd.elastic.ElasticSampler(range(num_samples), shuffle, 5)
            sampler.load_state_dict({"epoch": 2, "processed_num": processed})
            sampler.divide(size, rank)
            samplers.append(sampler)
        shares = [list(sampler) for sampler in samplers]
        assert {len(share) for share in shares} == {len(samplers[0])}
        done = data.draw(st.integers(0, len(shares[0])))
        taken += [i for share in shares for i in share[:done]]
        processed += done * size
    taken += [i for share in shares for i in share[done:]]
    assert set(taken) == set(range(num_samples))


def test_every_sample_is_taken_whatever_the_ranks(run_ranks_bare) -> None:
    """Also where fewer samples are left than half the ranks."""

    def fn():
        draw = given(
            num_samples=st.integers(0, 40),
            sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
            shuffle=st.booleans(),
            data=st.data(),
        )
        draw(settings(deadline=None, database=None)(share_all_samples))()

    on_ranks(run_ranks_bare, 1, fn)


def test_the_order_is_horovods(run_ranks_bare) -> None:
    def fn():
        sampler = hvd.elastic.ElasticSampler(range(10), seed=4)
        sampler.set_epoch(3)
        expected = list(range(10))
        random.Random(7).shuffle(expected)
        assert sampler.remaining_indices == expected
        sampler.record_batch(0, 4)
        assert sampler.state_dict() == {"epoch": 3, "processed_num": 4}
        assert list(sampler) == expected  # the share changes with reset() alone
        sampler.reset()
        assert list(sampler) == expected[4:]
        assert len(sampler) == 6

    on_ranks(run_ranks_bare, 1, fn)
