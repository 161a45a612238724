"""An optimizer with ``zero=1`` loses nothing when ranks die and join."""

import copy
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.limits import HANG_S
from tests.membership_controller import become_member, controlling
from tests.parity.sessions import run_sessions
from tests.ranks import run_ranks_bare

import ronde.torch as hvd
from ronde.errors import UsageError
from ronde.membership import Rules, own_member
from ronde.torch.elastic import find_keepers, pack, unpack

STEPS = 20
Orders = dict[tuple[int, int], str]


class Fatal:
    """Ends its process when its state is wanted: others have the rank's copy then."""

    is_armed = False

    def state_dict(self) -> dict[str, Any]:
        if self.is_armed:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def train(claim: Any, path: str, orders: Orders, zero: int = 1, **options: Any) -> Any:
    """Train with Adam; ``orders`` are what a member does at a step, once."""
    channel = become_member(path, claim.rank)
    hvd.init()
    torch.manual_seed(0)
    layers = torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3)
    model = torch.nn.Sequential(*layers).double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), 0.01), model.named_parameters(), zero=zero
    )
    generator = torch.Generator().manual_seed(5)
    inputs, targets = (
        torch.randn(48, n, generator=generator, dtype=torch.float64) for n in (7, 3)
    )
    data = torch.utils.data.TensorDataset(inputs, targets)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.5)
    fatal = Fatal()
    objects = {"schedule": schedule, "fatal": fatal}
    options = {"copy_every": 1, "objects": objects, **options}
    loop = hvd.elastic.Loop(
        *(model, optimizer, data), batch=12, epochs=STEPS // 4, **options
    )
    numbers: list[int] = []
    for step in loop:
        order = orders.pop((channel.number, step.number), "")
        with step:
            rows, wanted = step.inputs
            loss = (model(rows) - wanted).square().mean()
            if order == "grow":
                channel.order("grow")
            elif order == "save":
                channel.order("save")
                while not own_member().is_save_asked:
                    time.sleep(0.001)
            elif order == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            numbers.append(step.number)
            schedule.step()
            if order == "kill before it copies":
                os.kill(os.getpid(), signal.SIGKILL)
            fatal.is_armed = order == "kill while it copies"
    weights = [value.clone() for value in model.state_dict().values()]
    hvd.shutdown()
    return numbers, weights


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    """Return the weights of one process without ``zero``."""
    with controlling(1) as (_, path):
        [(_, weights)] = run_ranks_bare(1, train, path, {}, 0)
    return weights


def assert_as_expected(results: list[Any], expected: list[torch.Tensor]) -> None:
    done = [result for result in results if result is not None]
    for _, weights in done:
        for own, first, alone in zip(weights, done[0][1], expected, strict=True):
            assert torch.equal(own, first)
            # Sums over other ranks round otherwise; a lost state shows at 1e-3.
            torch.testing.assert_close(own, alone, rtol=1e-9, atol=1e-12)


BEFORE, WHILE = "kill before it copies", "kill while it copies"


@pytest.mark.parametrize(
    ("engine", "orders"),
    [
        ("shared_memory", {(0, 4): "kill", (2, 8): BEFORE, (3, 12): WHILE}),
        ("gloo", {(3, 4): BEFORE, (1, 8): WHILE, (0, 12): "kill"}),
        ("hierarchical", {(2, 4): WHILE, (0, 8): "kill", (1, 12): BEFORE}),
    ],
    ids=str,
)
def test_a_lost_ranks_share_is_another_ones(
    engine: str, orders: Orders, expected: list[torch.Tensor]
) -> None:
    dying = [victim for victim, _ in orders]
    with controlling(4) as (_, path):
        results = run_ranks_bare(
            4,
            train,
            path,
            orders,
            dying=dying,
            timeout_s=HANG_S,
            environment={"RONDE_ENGINE": engine},
        )
    assert [rank for rank, each in enumerate(results) if each is None] == sorted(dying)
    assert_as_expected(results, expected)
    for numbers, _ in filter(None, results):
        assert sorted(set(numbers)) == list(range(STEPS))
        assert len(numbers) <= STEPS + len(orders)


def test_two_die_whose_copies_are_with_others(expected: list[torch.Tensor]) -> None:
    orders = {(1, 7): "kill", (3, 7): "kill"}
    with controlling(4) as (_, path):
        results = run_ranks_bare(4, train, path, orders, dying=[1, 3], timeout_s=HANG_S)
    assert_as_expected(results, expected)


def train_with_few_copies(claim: Any, path: str, orders: Orders) -> Any:
    return train(claim, path, orders, copy_every=4)


def test_steps_since_the_last_copy_are_done_again(
    expected: list[torch.Tensor],
) -> None:
    with controlling(2, Rules(1, 3)) as (_, path):
        results = run_ranks_bare(
            3,
            train_with_few_copies,
            path,
            {(0, 5): "grow", (1, 15): "kill"},
            dying=[1],
            timeout_s=HANG_S,
        )
    assert_as_expected(results, expected)
    numbers = results[0][0]
    # Copies are made every fourth step from the one at which the new rank came on.
    first = numbers[15]
    assert numbers == [*range(15), *range(first, STEPS)]
    assert 15 - 4 <= first < 15
    assert results[2][0][0] > 5


def lose_both(claim: Any, path: str, checkpoint: str) -> Any:
    """Two die in one moment, one of which keeps the other's copy."""
    orders = {(1, 7): "kill", (2, 7): "kill"}
    try:
        return train(claim, path, orders, checkpoint=checkpoint, checkpoint_every=4)
    except UsageError as error:
        return str(error)


def test_a_share_that_is_lost_with_its_copy_comes_from_a_checkpoint(
    tmp_path: Path, expected: list[torch.Tensor]
) -> None:
    with controlling(4) as (_, path):
        results = run_ranks_bare(
            4, lose_both, path, str(tmp_path), dying=[1, 2], timeout_s=HANG_S
        )
    assert_as_expected(results, expected)
    assert results[0][0] == [*range(7), *range(4, STEPS)]


def save(claim: Any, path: str, folder: str, orders: Orders) -> Any:
    return train(
        claim, path, orders, copy_every=4, checkpoint=folder, checkpoint_every=1000
    )


def test_a_checkpoint_that_is_asked_for_follows_the_next_copy(
    tmp_path: Path, expected: list[torch.Tensor]
) -> None:
    for size, orders in ((3, {(0, 1): "save"}), (2, {})):
        with controlling(size) as (_, path):
            results = run_ranks_bare(
                size, save, path, str(tmp_path), orders, timeout_s=HANG_S
            )
        assert_as_expected(results, expected)
        assert [each.name for each in tmp_path.iterdir()] == ["step-4.pt"]
    assert results[0][0] == list(range(4, STEPS))


def test_without_a_checkpoint_it_says_what_is_lost() -> None:
    with controlling(4) as (_, path):
        results = run_ranks_bare(4, lose_both, path, "", dying=[1, 2], timeout_s=HANG_S)
    for message in (results[0], results[3]):
        assert "was lost together with its copy" in message
        assert message.endswith("to Loop, with a small checkpoint_every.")


def go_on_from_a_loaded_state() -> tuple[Any, Any]:
    def step(model: torch.nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 5)).square().sum().backward()
        optimizer.step()

    torch.manual_seed(0)
    plain, divided = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    adam = torch.optim.Adam(plain.parameters(), 0.1)
    for _ in range(3):
        step(plain, adam)
    divided.load_state_dict(plain.state_dict())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(divided.parameters(), 0.1), zero=1
    )
    optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
    step(plain, adam)
    data = torch.utils.data.TensorDataset(torch.ones(8, 5))
    for each in hvd.elastic.Loop(divided, optimizer, data, batch=8, epochs=1):
        with each:
            step(divided, optimizer)
    return plain.weight.tolist(), divided.weight.tolist()


def test_a_state_that_was_loaded_before_stays() -> None:
    for expected, found in run_sessions(2, go_on_from_a_loaded_state):
        assert found == expected


def test_keepers_are_on_other_hosts() -> None:
    assert find_keepers(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    assert find_keepers(["a", "b", "a", "b"]) == [1, 0, 3, 2]
    assert find_keepers(["a", "a", "b"]) == [2, 0, 1]
    assert find_keepers(["a"] * 3) == [1, 2, 0]
    assert find_keepers(["a"]) == [0]


def test_what_is_packed_comes_back() -> None:
    value = [{"step": torch.tensor(3.0), "exp_avg": torch.arange(5).half()}, (1, "a")]
    [state, rest] = unpack(pack(value))
    assert (state["step"].item(), state["exp_avg"].tolist()) == (3.0, [0, 1, 2, 3, 4])
    assert rest == (1, "a")
