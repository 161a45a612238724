"""The negotiation alone: real nodes, messages in every order."""

import random
from typing import Any, TypeVar

import pytest
from benchmarks.coordination_scale import Simulator
from hypothesis import given, strategies as st

from ronde.coordination import (
    FailCommand,
    JoinedCommand,
    Loss,
    OpKind,
    Request,
    RunCommand,
    Tree,
)

C = TypeVar("C")

HOSTS = ["a", "aa", "aaa", "ab", "aab", "abab", "aabbccdd", "abcdefg"]


def request(
    name: str, shape: tuple[int, ...] = (2,), kind: OpKind = OpKind.ALLREDUCE
) -> Request:
    return Request(kind, name, ("float32",), (shape,), "cpu", 1, 1.0, 1.0, -1, True)


def network(hosts: str, capacity: int = 1024) -> Simulator:
    return Simulator(Tree.of_hosts(hosts, arity=2), capacity)


def ask(net: Simulator, rank: int, wanted: Request) -> None:
    """Submit as a coordinator does."""
    node = net.nodes[rank]
    known = node.cache.find(wanted.name)
    if known is None:
        node.submit(wanted)
    elif known[1] == wanted:
        node.hit(*known)
    else:
        node.change(known[0], wanted)


def names_run(net: Simulator, rank: int) -> list[str]:
    return [
        request.name
        for command in net.taken[rank]
        if isinstance(command, RunCommand)
        for request in command.requests
    ]


def commands_of(kind: type[C], taken: list[Any]) -> list[C]:
    return [command for command in taken if isinstance(command, kind)]


@given(
    hosts=st.sampled_from(HOSTS),
    capacity=st.sampled_from([0, 1, 3, 1024]),
    num_rounds=st.integers(1, 6),
    num_names=st.integers(1, 6),
    seed=st.integers(0, 2**32),
    has_changes=st.booleans(),
)
def test_every_name_runs_once_a_round_in_one_order(
    hosts, capacity, num_rounds, num_names, seed, has_changes
) -> None:
    choose = random.Random(seed)
    net = network(hosts, capacity)
    for number in range(num_rounds):
        shape = (choose.randrange(1, 3),) if has_changes else (2,)
        todo = []
        for _ in hosts:
            names = [f"n{i}" for i in range(num_names)]
            choose.shuffle(names)
            todo.append(names)
        while any(todo):
            rank = choose.choice([r for r, names in enumerate(todo) if names])
            ask(net, rank, request(todo[rank].pop(), shape))
            if choose.random() < 0.5:
                net.flush(rank)
            for _ in range(choose.randrange(3)):
                if net.deliver_any(choose):
                    net.flush(choose.randrange(len(hosts)))
        net.settle(choose)
        for rank in range(len(hosts)):
            run = names_run(net, rank)
            assert sorted(run[number * num_names :]) == sorted(
                f"n{i}" for i in range(num_names)
            )
    assert all(taken == net.taken[0] for taken in net.taken)


@given(
    hosts=st.sampled_from(HOSTS[1:]),
    capacity=st.sampled_from([1, 2, 3, 5]),
    seed=st.integers(0, 2**32),
    has_changes=st.booleans(),
)
def test_ranks_that_run_ahead_while_numbers_are_forgotten(
    hosts, capacity, seed, has_changes
) -> None:
    """A rank submits a name again as soon as it has run."""
    num_names, num_rounds = 5, 12
    choose = random.Random(seed)
    net = network(hosts, capacity)
    done = [[0] * num_names for _ in hosts]
    under_way = [[False] * num_names for _ in hosts]
    seen = [0] * len(hosts)

    def take(rank):
        for step in net.taken[rank][seen[rank] :]:
            for each in step.requests:
                index = int(each.name[1:])
                assert under_way[rank][index]
                under_way[rank][index] = False
                done[rank][index] += 1
        seen[rank] = len(net.taken[rank])

    for _ in range(100_000):
        rank = choose.randrange(len(hosts))
        net.flush(rank)
        take(rank)
        assert len(net.nodes[rank].cache.requests) <= capacity
        ready = [
            i
            for i in range(num_names)
            if not under_way[rank][i] and done[rank][i] < num_rounds
        ]
        if ready and choose.random() < 0.5:
            index = choose.choice(ready)
            size = 1 + (done[rank][index] // 4 if has_changes else 0)
            under_way[rank][index] = True
            ask(net, rank, request(f"n{index}", (size,)))
        elif not net.deliver_any(choose) and not ready:
            net.settle(choose)
            for other in range(len(hosts)):
                take(other)
            if all(count == num_rounds for counts in done for count in counts):
                break
    assert done == [[num_rounds] * num_names] * len(hosts)
    assert all(taken == net.taken[0] for taken in net.taken)
    assert all(
        len(net.nodes[0].cache.requests) == len(node.cache.requests)
        for node in net.nodes
    )


@given(
    hosts=st.sampled_from(HOSTS[1:]),
    seed=st.integers(0, 2**32),
    is_cached=st.booleans(),
)
def test_a_mismatch_fails_everywhere_and_the_next_runs(hosts, seed, is_cached) -> None:
    choose = random.Random(seed)
    net = network(hosts)
    size = len(hosts)
    if is_cached:
        for rank in range(size):
            ask(net, rank, request("x"))
        net.settle(choose)
    odd = choose.randrange(size)
    for rank in choose.sample(range(size), size):
        ask(net, rank, request("x", (3,) if rank == odd else (2,)))
        net.flush(rank)
        net.deliver_any(choose)
    net.settle(choose)
    for rank in range(size):
        ((name, text),) = commands_of(FailCommand, net.taken[rank])
        assert name == "x"
        assert "Mismatched ALLREDUCE tensor shapes" in text
        assert f"rank {odd}: ALLREDUCE x float32 [3]" in text
        ask(net, rank, request("x", (5,)))
    net.settle(choose)
    assert all(names_run(net, rank)[-1] == "x" for rank in range(size))


@given(hosts=st.sampled_from(HOSTS), seed=st.integers(0, 2**32))
def test_joined_ranks_are_ready_for_everything(hosts, seed) -> None:
    choose = random.Random(seed)
    net = network(hosts)
    size = len(hosts)
    for cycle in range(2):
        num_steps = [choose.randrange(4) for _ in range(size)]
        joined = [False] * size
        most = max(num_steps)
        for rank in range(size):
            net.taken[rank].clear()
        for step in range(most + 1):
            for rank in choose.sample(range(size), size):
                if joined[rank]:
                    continue
                if step < num_steps[rank]:
                    for i in range(2):
                        ask(net, rank, request(f"n{i}"))
                else:
                    joined[rank] = True
                    net.nodes[rank].join()
                net.flush(rank)
                net.deliver_any(choose)
            net.settle(choose)
        lasts = {
            last for taken in net.taken for (last,) in commands_of(JoinedCommand, taken)
        }
        assert len(lasts) == 1, cycle
        assert num_steps[lasts.pop()] == most
        for rank in range(size):
            assert isinstance(net.taken[rank][-1], JoinedCommand)
            assert names_run(net, rank).count("n0") == most
        assert all(taken == net.taken[0] for taken in net.taken)


def test_operations_before_the_join_run() -> None:
    net = network("aabb")
    choose = random.Random(0)
    for _ in range(2):
        ask(net, 2, request("x"))
        for rank in range(4):
            net.nodes[rank].join()
        net.settle(choose)
    for rank in range(4):
        assert names_run(net, rank) == ["x", "x"]
        assert isinstance(net.taken[rank][-1], JoinedCommand)


@pytest.mark.parametrize("kind", [OpKind.ALLGATHER, OpKind.ALLTOALL, OpKind.BROADCAST])
def test_only_reductions_go_with_join(kind) -> None:
    net = network("aab")
    net.nodes[0].join()
    for rank in (1, 2):
        ask(net, rank, request("x", kind=kind))
    net.settle(random.Random(0))
    for taken in net.taken:
        ((_, text),) = commands_of(FailCommand, taken)
        assert "is not supported with Join at this time." in text


def test_losses_reach_all_ranks() -> None:
    for lost in range(1, 8):
        net = network("aabbccdd")
        tree = net.nodes[lost].tree
        assert tree.parent is not None
        net.nodes[tree.parent].lose(Loss(lost, "it ended", is_orderly=False))
        net.settle(random.Random(lost))
        below = set(tree.children)
        for rank in {*range(8)} - below - {lost}:
            assert [each.rank for each in commands_of(Loss, net.taken[rank])] == [lost]


def test_bits_of_an_earlier_epoch_are_ignored() -> None:
    """A name in constant use keeps number 0, which is assigned again after a reset."""
    net, choose = network("aaa", capacity=2), random.Random(0)
    for step in range(31):
        for name in ("hot", f"n{step}"):
            for rank in range(3):
                ask(net, rank, request(name))
            net.settle(choose)
    assert net.nodes[0].cache.find("hot")[0] == 0
    for rank in range(3):
        ask(net, rank, request("last"))
        net.flush(rank)
    ask(net, 1, request("hot"))
    net.flush(1)
    net.deliver(1, 0)
    net.deliver(2, 0)
    net.flush(0)
    assert net.nodes[0].cache.find("last")[0] == 0  # the numbers have begun again
    net.settle(choose)
    for rank in (0, 2):
        ask(net, rank, request("last"))
    net.settle(choose)
    assert names_run(net, 0).count("last") == 1
    for rank in (0, 2):
        ask(net, rank, request("hot"))
    ask(net, 1, request("last"))
    net.settle(choose)
    assert names_run(net, 0)[-2:] in (["last", "hot"], ["hot", "last"])


def test_late_bits_of_dropped_names_are_ignored() -> None:
    net, choose = network("aa"), random.Random(0)
    for rank in range(2):
        ask(net, rank, request("x"))
    net.settle(choose)
    ask(net, 1, request("x"))
    net.flush(1)
    ask(net, 0, request("x", (3,)))
    net.flush(0)
    net.settle(choose)
    for rank in range(2):
        net.nodes[rank].join()
    net.settle(choose)
    for taken in net.taken:
        assert isinstance(taken[0], RunCommand)
        assert [type(each) for each in taken[1:]] == [FailCommand, JoinedCommand]
