"""Each rank steps alone, and the ways that they went are combined by Adasum.

A step's *delta* is where it led from: Adasum of the deltas, and not of the gradients,
takes each rank's own momentum and scaling into account.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2021,
section 4.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ronde.collectives import Communicator
from ronde.collectives.adasum import adasum
from ronde.data_parallel import Bond, Compressor, Key

Kind = tuple[torch.dtype, torch.device]


class DeltaStep:
    """Steps of an optimizer whose deltas are combined over all ranks.

    Collective to create and to use: every rank has the same parameters in the same
    order. Every step begins with the number of ranks that take it, for those that have
    joined and only keep up.

    Attributes:
        key: Its name, equal on all ranks.
        last_round: Number of the last step that this rank took.

    Args:
        parameters: All that may change.
        compressor: What travels.
        bond: Ties it to the other ranks.
        rebind: Makes another bond for the first use after ``unbind()``; collective.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        compressor: type[Compressor],
        bond: Bond,
        *,
        rebind: Callable[[], Bond],
    ) -> None:
        self.key: Key = bond.key
        self.last_round = 0
        self._num_steps = 0
        self._parameters = [p for p in parameters if p.is_floating_point()]
        self._compressor = compressor
        self._bond: Bond | None = bond
        self._rebind = rebind

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Take more parameters in; collective."""
        self._parameters += [p for p in parameters if p.is_floating_point()]

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:  # noqa: ANN401 - the optimizer's
        """Step here, and go where the ranks' steps lead together; collective.

        Raises:
            CollectiveError: A rank is gone.
        """
        starts = [parameter.detach().clone() for parameter in self._parameters]
        result = optimizer.step(closure) if closure else optimizer.step()
        self._go_together(starts)
        return result

    @torch.no_grad()
    def keep_up(self) -> None:
        """Take part in the others' steps without one of its own, to the last.

        Raises:
            CollectiveError: A rank is gone.
        """
        communicator = self._communicator()
        while communicator.all_reduce(torch.zeros(1, device="cpu")).wait().item():
            self._num_steps += 1
            for members in self._kinds():
                nothing = [torch.zeros_like(self._parameters[i]) for i in members]
                self._combine(communicator, nothing)

    def unbind(self, *, is_abrupt: bool = False) -> None:
        """Leave the other ranks; the next use binds anew.

        Args:
            is_abrupt: Have what is under way fail, here and there.
        """
        if self._bond is not None:
            communicator = self._bond.communicator
            self._bond = None
            if is_abrupt:
                communicator.abort()
            else:
                communicator.close()

    @torch.no_grad()
    def _go_together(self, starts: Sequence[Tensor]) -> None:
        communicator = self._communicator()
        communicator.all_reduce(torch.ones(1, device="cpu")).wait()
        self._num_steps += 1
        self.last_round = self._num_steps
        for members in self._kinds():
            deltas = [self._parameters[i] - starts[i] for i in members]
            self._combine(communicator, deltas)
            for i, delta in zip(members, deltas, strict=True):
                self._parameters[i].copy_(starts[i].add_(delta))

    def _communicator(self) -> Communicator:
        if self._bond is None:
            self._bond = self._rebind()
            self.key = self._bond.key
            self.last_round = self._num_steps = 0
        return self._bond.communicator

    def _kinds(self) -> list[list[int]]:
        """Return which parameters can share a message."""
        kinds: dict[Kind, list[int]] = {}
        for index, parameter in enumerate(self._parameters):
            kind = (parameter.dtype, parameter.device)
            kinds.setdefault(kind, []).append(index)
        return list(kinds.values())

    def _combine(self, communicator: Communicator, deltas: Sequence[Tensor]) -> None:
        flat = torch.cat([delta.reshape(-1) for delta in deltas])
        wire, context = self._compressor.compress(flat)
        lengths = [delta.numel() for delta in deltas]
        combined = self._compressor.decompress(
            adasum(communicator, wire, lengths), context
        )
        parts = cast("tuple[Tensor, ...]", combined.split(lengths))
        for delta, part in zip(deltas, parts, strict=True):
            delta.copy_(part.view_as(delta))
