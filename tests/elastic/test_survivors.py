"""Ranks die, and the others take their next step in the same processes.

A collective's own limit would end it long after the test is over.
"""

import os
import signal
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from tests.limits import HANG_S
from tests.membership_controller import become_member, controlling
from tests.ranks import run_ranks_bare

import ronde.torch as hvd
from ronde.errors import CollectiveError
from ronde.membership import own_member
from ronde.session import reform

ENGINES = ("shared_memory", "gloo", "hierarchical")
STEPS = 100
NOBODY: Mapping[int, float] = MappingProxyType({})


class Trained(NamedTuple):
    """What a rank did.

    Attributes:
        steps: The number of each step, and how many ranks took it.
        events: How it went, to be shown.
        weights: Of the model.
        size: How many are left.
    """

    steps: list[tuple[int, int]]
    events: list[str]
    weights: list[torch.Tensor]
    size: int


def go_on(model: torch.nn.Module, reason: str, events: list[str]) -> int:
    """Connect and take the state over, whoever is lost meanwhile; return the step."""
    while True:
        begins = reform(reason)
        events.append("connected")
        member = own_member()
        assert member is not None
        root = member.view.rank_of(begins.source)
        try:
            if not begins.is_equal:
                hvd.broadcast_parameters(model.state_dict(), root)
        except CollectiveError as error:
            events.append(f"again: {error}")
        else:
            return begins.step


def train(
    claim: Any,
    path: str,
    dying_at: Mapping[int, int],
    dying_s: Mapping[int, float] = NOBODY,
) -> Trained:
    """Train; members end themselves at a step, or so long after another's end."""
    channel = become_member(path, claim.rank)
    hvd.init()
    member = own_member()
    assert member is not None
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), model.named_parameters()
    )
    member.step = 0
    steps: list[tuple[int, int]] = []
    events: list[str] = []
    while member.step < STEPS:
        try:
            member.allow(member.step + 1)
            optimizer.zero_grad()
            output = model(torch.ones(8, 64) * (hvd.rank() + 1))
            if member.step == dying_at.get(channel.number):
                os.kill(os.getpid(), signal.SIGKILL)
            output.square().mean().backward()
            optimizer.step()
            member.step += 1
            steps.append((member.step, hvd.size()))
        except CollectiveError as error:
            if channel.number in dying_s:
                signal.setitimer(signal.ITIMER_REAL, dying_s[channel.number])
            events.append(f"{type(error).__name__}: {error}")
            member.step = go_on(model, str(error), events)
            member.running()
    member.done(member.step)
    weights = [p.detach().clone() for p in model.parameters()]
    return Trained(steps, events, weights, hvd.size())


def survive(
    engine: str,
    size: int,
    dying_at: dict[int, int],
    dying_s: Mapping[int, float] = NOBODY,
) -> list[Trained]:
    """Lose members; return what the others did, who are alike."""
    dying = {*dying_at, *dying_s}
    with controlling(size) as (_, path):
        results = run_ranks_bare(
            size,
            train,
            path,
            dying_at,
            dying_s,
            dying=dying,
            timeout_s=HANG_S,
            environment={"RONDE_ENGINE": engine},
        )
    survivors = [each for each in results if each is not None]
    assert len(survivors) == size - len(dying)
    for each in survivors:
        assert each.size == len(survivors), each.events
        for own, first in zip(each.weights, survivors[0].weights, strict=True):
            assert torch.equal(own, first)
    return survivors


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("size", "dying_at"), [(4, {3: 5, 1: 20, 0: 40}), (2, {1: 5})])
def test_survivors_go_on(engine: str, size: int, dying_at: dict[int, int]) -> None:
    for each in survive(engine, size, dying_at):
        numbers = [number for number, _ in each.steps]
        # Who was a step behind another took that one's state, and nothing is repeated.
        assert numbers == sorted({*numbers})
        assert {*range(1, STEPS + 1)} - {*numbers} <= {*dying_at.values()}
        for number, of in each.steps:
            # All that died had taken the step before the one that they died in.
            most, least = (
                size - sum(at < earliest for at in dying_at.values())
                for earliest in (number, number + 1)
            )
            assert least <= of <= most, each.events


DELAYS = [(5, "shared_memory"), (20, "gloo"), (60, "hierarchical")]


@pytest.mark.parametrize(
    ("delay_ms", "engine"),
    [
        *DELAYS,
        *(
            pytest.param(ms, engine, marks=pytest.mark.long)
            for ms in (1, 10, 30, 80)
            for engine in ENGINES
        ),
    ],
)
def test_another_dies_while_they_connect(engine: str, delay_ms: int) -> None:
    survive(engine, 5, {0: 5}, {delay_ms % 4 + 1: delay_ms * 1e-3})
