"""Broadcast of parameters and optimizer state, and their comparison over ranks."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ronde.collectives import Work
from ronde.collectives.objects import broadcast_json
from ronde.collectives.torch_modes import outside_compiler
from ronde.coordination.requests import OpKind
from ronde.drift import Background, Drift, compare
from ronde.errors import UsageError
from ronde.session.operations import (
    Broadcast,
    NamedTransport,
    allgather_object as allgather_object,  # noqa: PLC0414
    broadcast_object as broadcast_object,  # noqa: PLC0414
    require_whole,
)
from ronde.session.session import ProcessSet, global_process_set, rank, state_of
from ronde.torch.optimizer import DistributedOptimizer, plain_name
from ronde.torch.state_trees import rebuild_tree, split_tree


@outside_compiler
def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int
) -> None:
    """Broadcast parameters from ``root_rank`` to all ranks, in place; collective.

    ``params`` is a ``state_dict()``, ``(name, tensor)`` pairs like those of
    ``named_parameters()``, or tensors matched by order; other values are
    skipped.
    """
    named = _named_tensors(params)
    require_whole(tensor for _, tensor in named)
    works: list[Work[Any]] = []
    for name, tensor in named:
        function = Broadcast(global_process_set, name, root_rank=root_rank)
        works.append(function.start((tensor,), in_place=True))
    for work in works:
        work.wait()


@outside_compiler
def broadcast_optimizer_state(
    optimizer: Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Broadcast an optimizer's state and options from ``root_rank``; collective.

    The optimizer must have the same class and parameters on every rank; its state may
    be empty. As in Horovod, a rank without state fills missing gradients with zeros,
    except those of sparse embeddings of ``model``. ``UsageError`` is raised for LBFGS,
    and for state other than tensors, numbers and strings.
    """
    state = OptimizerState(optimizer, model)
    carrier = NamedTransport("", global_process_set)
    plain = broadcast_json(carrier, lambda: state.plain, root_rank)
    if rank() != root_rank:
        state.expect(plain)
    broadcast_parameters(state.tensors, root_rank)
    state.load()


class OptimizerState:
    """An optimizer's state, as JSON and a list of tensors."""

    def __init__(
        self, optimizer: Optimizer, model: torch.nn.Module | None = None
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError("cannot broadcast torch.optim.LBFGS state")
        require_whole(p for group in optimizer.param_groups for p in group["params"])
        if not optimizer.state:
            _make_gradients(optimizer, model)
        self.tensors: list[Tensor] = []  # filled when ``plain`` is read
        self._optimizer = optimizer
        self._received: Any = None

    @cached_property
    def plain(self) -> Any:  # noqa: ANN401  JSON's
        """The state as JSON; its tensors are appended to ``tensors``."""
        return split_tree(self._optimizer.state_dict(), self.tensors)

    def expect(self, plain: Any) -> None:  # noqa: ANN401  JSON's
        """Prepare ``tensors`` to receive another rank's state.

        If ``plain`` equals this rank's own, the optimizer's own tensors are used.
        """
        is_sharded = DistributedOptimizer.share_of(self._optimizer) is not None
        if plain != self.plain or is_sharded:
            self.tensors = []
            self._received = rebuild_tree(plain, self.tensors)

    def load(self) -> None:
        """Load the received state into the optimizer."""
        if self._received is not None:
            self._optimizer.load_state_dict(self._received)


@outside_compiler
def check_parity(
    model: torch.nn.Module,
    optimizer: Optimizer | None = None,
    process_set: ProcessSet = global_process_set,
) -> Drift:
    """Compare weights and optimizer state bitwise between ranks; collective.

    This compares the model's parameters, and the optimizer's state and options. Two
    things are not compared, because they may differ between ranks: buffers, such as
    the statistics of ``BatchNorm``, and with ``zero=1`` the optimizer's state. Sharded
    parameters raise ``UsageError``.
    """
    named = [(plain_name(name), p) for name, p in model.named_parameters()]
    require_whole(parameter for _, parameter in named)
    ranks = state_of(process_set, OpKind.ALLGATHER).ranks
    return compare(
        NamedTransport(None, process_set), named, optimizer, Background(ranks)
    )


def _make_gradients(optimizer: Optimizer, model: torch.nn.Module | None) -> None:
    if isinstance(optimizer, torch.optim.SparseAdam):
        return
    modules = () if model is None else model.modules()
    embeddings = [m for m in modules if isinstance(m, torch.nn.Embedding) and m.sparse]
    sparse = {id(embedding.weight) for embedding in embeddings}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        is_bare = parameter.requires_grad and parameter.grad is None
        if is_bare and id(parameter) not in sparse:
            parameter.grad = torch.zeros_like(parameter)


def _named_tensors(
    params: Mapping[str, Any] | Iterable[Any],
) -> list[tuple[str, Tensor]]:
    if isinstance(params, Tensor | str | bytes) or not hasattr(params, "__iter__"):
        raise UsageError(f"invalid params of type: {type(params)}")
    items: Iterable[Any] = params
    if isinstance(params, Mapping):
        items = sorted(cast("Mapping[str, Any]", params).items(), key=lambda i: i[0])
    pairs: list[Any] = [i if isinstance(i, tuple) else ("", i) for i in items]
    return [(plain_name(str(n or "")), t) for n, t in pairs if isinstance(t, Tensor)]
