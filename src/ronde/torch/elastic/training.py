"""The state of a training run, and its broadcast to ranks with an older state."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ronde.errors import CollectiveError, UsageError
from ronde.membership.member import Member
from ronde.membership.view import NEW
from ronde.session.session import rank
from ronde.torch.elastic.data import DataSource
from ronde.torch.functions import OptimizerState, broadcast_object, broadcast_parameters


class Training:
    """The model, the optimizers and all other state, after ``num_applied`` steps.

    Attributes:
        objects: Other objects with ``state_dict()`` and ``load_state_dict()``, by name.
        num_applied: The number of steps applied so far, including earlier views.
        position: The position in the data after the applied steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        data: DataSource,
        objects: Mapping[str, Any],
    ) -> None:
        self.model, self.optimizers = model, optimizers
        self.data, self.objects = data, objects
        self.num_applied = 0
        self.position = data.position

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a step may change."""
        tensors = self.model.state_dict()
        for index, each in enumerate(self.optimizers):
            states = enumerate(each.state.values())
            tensors |= {
                f"optimizer{index}.{number}.{name}": value
                for number, state in states
                for name, value in state.items()
                if isinstance(value, Tensor)
            }
        return tensors

    def small_state(self) -> dict[str, Any]:
        """Return all state except the model's and the optimizers'."""
        return {
            "step": self.num_applied,
            "position": tuple(self.position),
            "data": self.data.state_dict(),
            "objects": {name: o.state_dict() for name, o in self.objects.items()},
        }

    def load_small_state(self, state: dict[str, Any]) -> None:
        """Load the result of ``small_state``."""
        self.num_applied = state["step"]
        self.data.load_state_dict(state["data"])
        self.position = type(self.position)(*state["position"])
        for name, each in self.objects.items():
            each.load_state_dict(state["objects"][name])

    def state_dict(self) -> dict[str, Any]:
        """Return all state, including the model's and the optimizers'."""
        return {
            **self.small_state(),
            "model": self.model.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of ``state_dict``."""
        self.model.load_state_dict(state["model"])
        for each, saved in zip(self.optimizers, state["optimizers"], strict=True):
            each.load_state_dict(saved)
        self.load_small_state(state)

    def describe(self) -> list[str]:
        """Describe torch, model and optimizers in lines to compare between ranks."""
        tensors = self.model.state_dict().items()
        return [
            f"torch {torch.__version__}",
            *(f"optimizer {type(each).__name__}" for each in self.optimizers),
            *(f"{n} {list(t.shape)} {t.dtype}" for n, t in tensors),
        ]

    def broadcast(self, root: int, newest: int, member: Member | None) -> None:
        """Copy the root's state to all ranks; collective.

        Args:
            root: A rank with the newest state.
            newest: The step of that state.
            member: This process's membership in an elastic job, or None.
        """
        own = self.describe()
        optimizers = [OptimizerState(each, self.model) for each in self.optimizers]
        sent = None
        if rank() == root:
            sent = own, [each.plain for each in optimizers], self.small_state()
        # In one object, as each exchange takes milliseconds.
        theirs, plain, small = broadcast_object(sent, root)
        require_same(own, theirs)
        kept = None
        # A broadcast that fails half way leaves no valid state, unless the states were
        # equal. So a rank that is a step behind keeps a copy of its own state.
        if member is not None and member.step != newest:
            kept = None if member.step == NEW else deepcopy(self.state_dict())
            member.step = NEW
        try:
            if rank() != root:
                for state, each in zip(optimizers, plain, strict=True):
                    state.expect(each)
            broadcast_parameters(list(self._named_tensors(optimizers)), root)
            for state in optimizers:
                state.load()
            if rank() != root:
                self.load_small_state(small)
        except CollectiveError:
            if member is not None and kept is not None:
                self.load_state_dict(kept)
                member.step = self.num_applied
            raise

    def _named_tensors(
        self, optimizers: Sequence[OptimizerState]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.model.state_dict().items():
            if isinstance(value, Tensor):
                yield f"model.{name}", value
        for index, state in enumerate(optimizers):
            for number, tensor in enumerate(state.tensors):
                yield f"optimizer{index}.{number}", tensor


def require_same(own: list[str], theirs: list[str]) -> None:
    """Raise ``UsageError`` unless two ranks' descriptions are equal."""
    for mine, other in zip(own, theirs, strict=False):
        if mine != other:
            raise UsageError(
                f"this rank has {mine}, but the other ranks have {other}. Start the "
                "same program, with the same versions, on every host."
            )
    if len(own) != len(theirs):
        raise UsageError(
            f"this rank has {len(own) - 1} optimizers and tensors, but the other ranks "
            f"have {len(theirs) - 1}. Start the same program on every host."
        )
