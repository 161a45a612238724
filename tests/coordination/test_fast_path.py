"""The fast path of small all-reduces, also mixed with other operations."""

import os
import random
import signal
import threading
import time
from functools import partial
from itertools import count, product

import pytest
import torch
from tests.coordination.coordinators import ON_ALL, ON_THREE, run_coordinated, summed
from torch import Tensor

from ronde.collectives import ReduceOp
from ronde.coordination import CoordinationOptions, NamedOperation, OpKind
from ronde.errors import CollectiveError, PeerLostError

SEVERAL = ON_THREE[:1] + ON_THREE[2:]
NEVER_NAP_S = 3600.0


def counted(channel, sent) -> None:
    """Append to a list for each message that a channel sends."""
    send = channel.send

    def count_and_send(to: int, message: bytes) -> None:
        sent.append(to)
        send(to, message)

    channel.send = count_and_send


def reduced(name: str, tensor: Tensor, **more) -> NamedOperation:
    """Reduce ``tensor`` into a new one."""
    return NamedOperation(
        OpKind.ALLREDUCE, (tensor,), name, (torch.empty_like(tensor),), **more
    )


@pytest.mark.parametrize("size", ON_ALL[1:])
def test_known_names_take_no_messages(size) -> None:
    sent: list[int] = []  # each rank has one of its own

    def work(coordinator):
        for name in "ab":
            coordinator.run(summed(name, torch.ones(1)))
        coordinator.fast_path.patience_s = NEVER_NAP_S
        sent.clear()
        for step in range(200):
            own = torch.tensor([float(step + coordinator.rank)])
            (total,) = coordinator.run(summed("ab"[step % 2], own))
            assert total.item() == sum(range(size)) + size * step
        return len(sent)

    # A rank that is kept waiting for long may have the others go the ordinary way.
    adapt = partial(counted, sent=sent)
    assert max(run_coordinated(size, work, adapt=adapt)) < 50


@pytest.mark.parametrize(
    "engine",
    [
        *("shared_memory", "gloo", "hierarchical"),
        pytest.param("auto", marks=pytest.mark.long),  # shared memory once more
    ],
)
def test_results_are_the_engines_own(engine) -> None:
    """Compare bitwise, for every dtype and layout that can be reduced.

    All combinations on shared memory, and on the others every pair of values.
    """

    def work(coordinator):
        rank = coordinator.rank
        floats = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
        dtypes = [*floats, torch.int8, torch.int64, torch.bool, torch.complex64]
        shapes = [(), (1,), (3, 5), (0,), (2, 0), (1 << 10,), (5000,)]
        ops = [*ReduceOp]
        numbers = count()
        cases = list(product(dtypes, shapes, ops))
        if engine != "shared_memory":
            pairs = product(enumerate(dtypes), enumerate(shapes))
            cases = [(d, s, ops[(i + j) % len(ops)]) for (i, d), (j, s) in pairs]
        for dtype, shape, op in cases:
            name = f"t{next(numbers)}"
            torch.manual_seed(rank)
            tensor = (torch.randn(shape) * 9).to(dtype)
            if tensor.dim() == 2:
                tensor = tensor.t()
            scales = [(1.0, 1.0), (0.5, 3.0)][dtype in floats]
            more = {"reduce_op": op, "prescale": scales[0], "postscale": scales[1]}
            results = []
            try:
                for _ in range(3):  # by messages, then not
                    results += coordinator.run(reduced(name, tensor, **more))
                    results += coordinator.run(
                        NamedOperation(
                            OpKind.ALLREDUCE,
                            (own := tensor.clone(),),
                            f"{name}.in place",
                            (own,),
                            **more,
                        )
                    )
            except ValueError:
                assert not results  # not defined: always, or never
                continue
            for result in results:
                same = results[0].reshape(-1).view(torch.uint8)
                assert torch.equal(result.reshape(-1).view(torch.uint8), same)
                assert result.stride() == tensor.stride()

    run_coordinated(3, work, engine=engine)


@pytest.mark.parametrize("size", SEVERAL)
def test_calls_of_every_kind_mixed(size) -> None:
    """Some ranks wait at once, others later and in their own order."""

    def work(coordinator):
        choose = random.Random(coordinator.rank)
        alike = random.Random(7)
        for step in range(60):
            names = [f"n{alike.randrange(6)}" for _ in range(4)]
            names = list(dict.fromkeys(names))
            if alike.random() < 0.3:
                # In any order only for ranks that do not wait for each in turn.
                choose.shuffle(names)
                is_async = True
            else:
                is_async = choose.random() < 0.3
            if choose.random() < 0.1:
                torch.randn(300, 300) @ torch.randn(300, 300)
            wanted = [
                summed(name, torch.full((5,), float(step + int(name[1:]))))
                for name in names
            ]
            if is_async:
                works = [coordinator.submit(each) for each in wanted]
                results = [each.wait() for each in works]
            else:
                results = [coordinator.run(each) for each in wanted]
            for name, (total,) in zip(names, results, strict=True):
                expected = float(step + int(name[1:])) * size
                assert torch.equal(total, torch.full((5,), expected))

    run_coordinated(size, work)


@pytest.mark.parametrize("size", SEVERAL)
def test_a_round_that_other_ranks_left_is_finished(size) -> None:
    """One thread is slow to finish its round while another starts the next."""

    def work(coordinator):
        path, chance = coordinator.fast_path, random.Random(coordinator.rank)
        wait, is_awaited, failures = path.wait, path.is_awaited, []

        def nap() -> None:
            time.sleep(0.005 * chance.random())

        def ask(name: str, steps: range) -> None:
            try:
                for step in steps:
                    value = torch.full((1,), float(step))
                    (total,) = coordinator.run(summed(name, value))
                    assert total.item() == step * size
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        path.wait = lambda timeout_s: (wait(timeout_s), nap())
        path.is_awaited = lambda: (nap(), is_awaited())[1]
        for start in range(0, 200, 10):
            ask("a", range(start, start + 8))  # so that all come back to rounds
            later = range(start + 8, start + 10)
            threads = [threading.Thread(target=ask, args=(n, later)) for n in "ab"]
            for thread in threads:
                thread.start()
                nap()
            for thread in threads:
                thread.join()
        assert not failures

    run_coordinated(size, work)


@pytest.mark.parametrize("size", SEVERAL)
def test_a_request_that_changed_on_one_rank(size) -> None:
    def work(coordinator):
        for _ in range(3):
            coordinator.run(summed("x", torch.ones(2)))
        numel = 3 if coordinator.rank == 1 else 2
        with pytest.raises(CollectiveError, match="Mismatched ALLREDUCE tensor shapes"):
            coordinator.run(summed("x", torch.ones(numel)))
        for numel in (3, 3, 2, 2, 2):  # changed on all, and back
            (total,) = coordinator.run(summed("x", torch.ones(numel)))
            assert torch.equal(total, torch.full((numel,), float(size)))
        for op, expected in [(ReduceOp.SUM, size), (ReduceOp.MAX, 1)] * 3:
            (total,) = coordinator.run(summed("x", torch.ones(2), reduce_op=op))
            assert total[0] == expected

    run_coordinated(size, work)


@pytest.mark.parametrize("size", SEVERAL)
def test_a_rank_that_dies_while_others_sleep_for_it_is_named(size) -> None:
    def work(coordinator):
        for step in count():
            if step == 20 and coordinator.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if step < 20:
                coordinator.run(summed("x", torch.ones(1)))
                continue
            with pytest.raises(PeerLostError, match=r"[Rr]ank 1\b"):
                coordinator.run(summed("x", torch.ones(1)))
            return

    run_coordinated(size, work, dying=[1])


@pytest.mark.parametrize("size", SEVERAL)
@pytest.mark.parametrize("is_busy", [False, True])
def test_no_wake_up_is_lost(size, is_busy) -> None:
    """Every wait sleeps for an hour unless it is woken.

    Also where the coordinator's own thread ends the rounds that another waits for.
    """

    def work(coordinator):
        is_over = threading.Event()

        def wake():
            while is_busy and not is_over.wait(0.0003):
                coordinator.wake()

        waking = threading.Thread(target=wake)
        waking.start()
        path = coordinator.fast_path
        path.first_nap_s, path.num_polls = NEVER_NAP_S, 0
        choose = random.Random(coordinator.rank)
        for _ in range(3):
            coordinator.run(summed("x", torch.ones(1)))
        for step in range(1000):
            for _ in range(choose.choice([0, 0, 30, 300])):
                pass
            (total,) = coordinator.run(summed("x", torch.full((1,), float(step))))
            assert total.item() == size * step
        is_over.set()
        waking.join()

    options = CoordinationOptions(gather_time_s=0.0)
    run_coordinated(size, work, options=options)
