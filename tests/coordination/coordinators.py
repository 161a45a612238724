"""Ranks with one coordinator each, for tests."""

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.limits import HANG_S
from tests.ranks import run_ranks_bare

from ronde.collectives import Connections
from ronde.coordination import (
    ControlChannel,
    CoordinationOptions,
    Coordinator,
    NamedOperation,
    OpKind,
    connect_channel,
)

NEVER_S = 5 * HANG_S
"""The collectives' own timeout, longer than any test."""
ON_THREE = [3, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 2, 4))]
ON_ALL = [1, 2, 3, 4]


@contextmanager
def coordinating(
    connections: Connections,
    name: str = "all",
    *,
    hosts: str = "",
    options: CoordinationOptions | None = None,
    adapt: Callable[[ControlChannel], None] = lambda _: None,
) -> Generator[Coordinator]:
    """Connect a coordinator of all ranks; ``adapt`` may change its channel.

    ``hosts`` has a letter for the host of each rank.
    """
    rank, size = connections.info.rank, connections.info.size
    communicator = connections.connect(name, range(size))
    store, hosts = connections.store(f"control {name}"), hosts or "a" * size
    channel = connect_channel(store, rank, hosts, timeout_s=HANG_S)
    adapt(channel)
    coordinator = Coordinator(communicator, channel, options or CoordinationOptions())
    try:
        yield coordinator
    finally:
        coordinator.close()
        communicator.close()


def run_coordinated(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    engine: str = "",
    dying: Collection[int] = (),
    **options: Any,
) -> list[Any]:
    """Call ``fn(coordinator, *args)`` on ranks; ``options`` are of ``coordinating``.

    Ranks in ``dying`` are meant to end: see ``run_ranks_bare``.
    """

    def work(claim: Any) -> Any:
        connections = Connections(claim, timeout_s=NEVER_S, engine=engine)
        with coordinating(connections, **options) as coordinator:
            return fn(coordinator, *args)

    return run_ranks_bare(size, work, dying=dying, timeout_s=HANG_S)


def summed(name: str, tensor: torch.Tensor, **more: Any) -> NamedOperation:
    """Sum ``tensor`` in place."""
    return NamedOperation(OpKind.ALLREDUCE, (tensor,), name, (tensor,), **more)


def operation(
    kind: OpKind, name: str, tensor: torch.Tensor, **more: Any
) -> NamedOperation:
    """Make an operation on a copy."""
    if kind in (OpKind.ALLREDUCE, OpKind.ADASUM, OpKind.BROADCAST):
        more["outputs"] = (tensor.clone(),)
    if kind is OpKind.BROADCAST:
        more.setdefault("root", 0)
    if kind in (OpKind.BARRIER, OpKind.JOIN):
        return NamedOperation(kind)
    return NamedOperation(kind, (tensor,), name, **more)
