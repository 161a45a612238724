"""``@hvd.elastic.run`` while ranks die, stop and join; Horovod's script unchanged."""

import os
import signal
from typing import Any

import pytest
import torch
from tests.limits import HANG_S
from tests.membership_controller import become_member, controlling
from tests.ranks import run_ranks_bare

import ronde.torch as hvd
from ronde.membership import Rules

STEPS = 12
ALL_STEPS = list(range(1, STEPS + 1))


def train_elastically(
    claim: Any, path: str, orders: dict[tuple[int, int], str], num_steps: int = STEPS
) -> Any:
    """Train; ``orders`` are what a member does at a step, once."""
    channel = become_member(path, claim.rank)
    hvd.init()
    torch.manual_seed(1 + hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    steps: list[tuple[int, int]] = []

    @hvd.elastic.run
    def train(state: Any) -> str:
        while state.step < num_steps:
            order = orders.pop((channel.number, state.step), "")
            optimizer.zero_grad()
            output = model(torch.ones(4, 8) * torch.arange(4)[:, None])
            if order == "grow":
                channel.order("grow")
            elif order:
                channel.order(order) if order == "stop" else None
                number = signal.SIGSTOP if order == "stop" else signal.SIGKILL
                os.kill(os.getpid(), number)
            output.square().mean().backward()
            optimizer.step()
            state.step += 1
            steps.append((state.step, hvd.size()))
            state.commit()
        return "all done"

    state = hvd.elastic.TorchState(model, optimizer, step=0)
    result = train(state)
    weights = [value.clone() for value in model.state_dict().values()]
    hvd.shutdown()
    return result, steps, weights


def assert_alike(results: list[Any]) -> None:
    done = [result for result in results if result is not None]
    for result, _, weights in done:
        assert result == "all done"
        for own, first in zip(weights, done[0][2], strict=True):
            assert torch.equal(own, first)


@pytest.mark.parametrize(
    ("engine", "orders"),
    [
        ("shared_memory", {(0, 4): "kill", (2, 8): "stop"}),
        ("gloo", {(3, 4): "stop", (1, 8): "kill"}),
        ("hierarchical", {(0, 4): "kill", (2, 8): "stop"}),
    ],
    ids=str,
)
def test_the_others_go_on(engine: str, orders: dict[tuple[int, int], str]) -> None:
    size = 4
    with controlling(size) as (_, path):
        results = run_ranks_bare(
            size,
            train_elastically,
            path,
            orders,
            dying=[victim for victim, _ in orders],
            timeout_s=HANG_S,
            environment={"RONDE_ENGINE": engine},
        )
    assert_alike(results)
    survivors = [each for each in results if each is not None]
    assert len(survivors) == size - len(orders)
    for _, steps, _ in survivors:
        numbers = [step for step, _ in steps]
        # Nothing twice; who was a step behind took it over.
        assert numbers == sorted({*numbers})
        assert {*ALL_STEPS} - {*numbers} <= {at for _, at in orders}
        assert dict(steps)[STEPS] == len(survivors)


@pytest.mark.parametrize("engine", ["shared_memory", "gloo"])
def test_a_rank_joins_and_all_are_alike(engine: str) -> None:
    with controlling(3, Rules(1, 4)) as (controller, path):
        results = run_ranks_bare(
            4,
            train_elastically,
            path,
            {(0, 2): "grow"},
            60,
            timeout_s=HANG_S,
            environment={"RONDE_ENGINE": engine},
        )
        views = [note.what for note in controller.notes if "begins" in note.what]
    assert views == ["begins 3", "begins 4"]
    assert_alike(results)
    for _, steps, _ in results[:3]:
        # Nothing was done twice.
        assert [step for step, _ in steps] == list(range(1, 61))
