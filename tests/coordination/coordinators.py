"""Ranks with a coordinator each, for tests."""

from collections.abc import Callable
from typing import Any

import torch
from tests.ranks import run_ranks_bare

from ronde.collectives import Connections, ReduceOp
from ronde.coordination import (
    CoordinationOptions,
    Coordinator,
    NamedOperation,
    OpKind,
    connect_channel,
)


def run_coordinated(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    hosts: str = "",
    engine: str = "",
    options: CoordinationOptions | None = None,
    **limits: Any,
) -> list[Any]:
    """Call ``fn(coordinator, *args)`` on ``size`` ranks.

    Args:
        size: Number of ranks.
        fn: What to call.
        args: Its further arguments.
        hosts: A letter a rank: the host that it is to think itself on.
        engine: What moves the tensors.
        options: How the coordinators work.
        limits: ``timeout_s``, ``dying``: see ``run_ranks_bare``.
    """

    def work(claim: Any) -> Any:
        connections = Connections(claim, engine=engine)
        communicator = connections.connect("all", range(size))
        channel = connect_channel(
            connections.store("control"), claim.rank, hosts or "a" * size, timeout_s=60
        )
        coordinator = Coordinator(
            communicator, channel, options or CoordinationOptions()
        )
        try:
            return fn(coordinator, *args)
        finally:
            coordinator.close()
            communicator.close()

    return run_ranks_bare(size, work, **limits)


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


__all__ = [
    "NamedOperation",
    "OpKind",
    "ReduceOp",
    "operation",
    "run_coordinated",
    "summed",
]
