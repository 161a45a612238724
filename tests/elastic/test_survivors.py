"""Ranks die, and the others take their next step in the same processes."""

import os
import signal
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from tests.membership_controller import become_member, controlling
from tests.ranks import run_ranks_bare

import ronde.torch as hvd
from ronde.errors import CollectiveError
from ronde.membership import own_member
from ronde.torch.lifetime import reform

ENGINES = ("shared_memory", "gloo", "hierarchical")
STEPS = 100


def go_on(model: torch.nn.Module, reason: str, events: list[tuple[float, str]]) -> int:
    """Connect and take the state over, whoever is lost meanwhile; return the step."""
    while True:
        begins = reform(reason)
        events.append((time.monotonic(), "connected"))
        member = own_member()
        assert member is not None
        root = member.view.rank_of(begins.source)
        try:
            if not begins.is_equal:
                hvd.broadcast_parameters(model.state_dict(), root)
        except CollectiveError as error:
            events.append((time.monotonic(), f"again: {error}"))
        else:
            return begins.step


def train(
    claim: Any,
    path: str,
    victim: int,
    at: int,
    how: str,
    dying_s: Mapping[int, float] = MappingProxyType({}),
) -> Any:
    """Train; the ``victim`` ends itself, others of ``dying_s`` so long after that."""
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
    steps: list[tuple[float, int]] = []
    events: list[tuple[float, str]] = []
    while member.step < STEPS:
        try:
            member.allow(member.step + 1)
            optimizer.zero_grad()
            output = model(torch.ones(8, 64) * (hvd.rank() + 1))
            if channel.number == victim and member.step == at:
                if how == "stop":
                    channel.order("stop")
                os.kill(
                    os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL
                )
            output.square().mean().backward()
            optimizer.step()
            member.step += 1
            steps.append((time.monotonic(), hvd.size()))
        except CollectiveError as error:
            if channel.number in dying_s:
                signal.setitimer(signal.ITIMER_REAL, dying_s[channel.number])
            events.append((time.monotonic(), f"{type(error).__name__}: {error}"))
            member.step = go_on(model, str(error), events)
            member.running()
    member.done(member.step)
    weights = [p.detach().clone() for p in model.parameters()]
    return steps, events, weights, hvd.size()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_survivors_go_on(engine: str, size: int) -> None:
    for victim in range(size):
        with controlling(size) as (controller, path):
            results = run_ranks_bare(
                size,
                train,
                path,
                victim,
                5,
                "kill",
                dying=[victim],
                timeout_s=20.0,
                environment={"RONDE_ENGINE": engine},
            )
            lost_s = next(n.at_s for n in controller.notes if "lost" in n.what)
        survivors = [result for result in results if result is not None]
        assert len(survivors) == size - 1
        for steps, events, weights, left in survivors:
            assert left == size - 1
            # A survivor may have been one step behind the others.
            assert [of for _, of in steps][5:] == [size - 1] * (len(steps) - 5)
            assert STEPS - 1 <= len(steps) <= STEPS
            assert min(at_s for at_s, of in steps if of < size) - lost_s < 3.0, events
            for own, first in zip(weights, survivors[0][2], strict=True):
                assert torch.equal(own, first)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "delay_ms",
    [
        *(5, 20, 60),
        *(pytest.param(ms, marks=pytest.mark.long) for ms in (1, 10, 30, 40, 80)),
    ],
)
def test_another_dies_while_they_connect(engine: str, delay_ms: int) -> None:
    size = 5
    with controlling(size) as (controller, path):
        results = run_ranks_bare(
            size,
            train,
            path,
            0,
            5,
            "kill",
            {delay_ms % 4 + 1: delay_ms * 1e-3},
            dying=[0, delay_ms % 4 + 1],
            timeout_s=20.0,
            environment={"RONDE_ENGINE": engine},
        )
        lost_s = [n.at_s for n in controller.notes if "lost" in n.what][1]
    survivors = [result for result in results if result is not None]
    assert len(survivors) == 3
    for steps, events, weights, left in survivors:
        assert left == 3
        assert min(at_s for at_s, of in steps if of == 3) - lost_s < 3.0, events
        for own, first in zip(weights, survivors[0][2], strict=True):
            assert torch.equal(own, first)
