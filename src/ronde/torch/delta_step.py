"""Local optimizer steps, combined over all ranks by Adasum.

The *delta* of a step is the change that it makes to the parameters. Adasum combines
deltas instead of gradients, so that the momentum and scaling of each rank's optimizer
affect the result.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2021,
section 4.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ronde.collectives import Communicator
from ronde.collectives.adasum import adasum_all_reduce
from ronde.data_parallel import Compressor, GroupConnector, ReducerKey
from ronde.data_parallel.group import run


class DeltaStep:
    """An optimizer step on each rank, followed by Adasum of the deltas.

    Each step begins with an all-reduce that counts the ranks that still train. Ranks
    that have joined stop when the count is 0. ``last_round`` is the number of this
    rank's last step.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        compressor: type[Compressor],
        connector: GroupConnector,
    ) -> None:
        self.last_round = 0
        self._num_steps = 0
        self._parameters = [p for p in parameters if p.is_floating_point()]
        self._compressor = compressor
        self._connector = connector
        self._communicator: Communicator | None = None

    @property
    def key(self) -> ReducerKey:
        return self._connector.key

    def add(self, parameters: Sequence[Tensor]) -> None:
        self._parameters += [p for p in parameters if p.is_floating_point()]

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:  # noqa: ANN401 - the optimizer's
        """Run the optimizer's step, then combine the deltas; collective."""
        starts = [parameter.detach().clone() for parameter in self._parameters]
        result = optimizer.step(closure) if closure else optimizer.step()
        self._combine_steps(starts)
        return result

    def start_connecting(self) -> None:
        if self._communicator is None:
            self._connector.start()

    @torch.no_grad()
    def participate_with_zeros(self) -> None:
        """Contribute zeros to other ranks' steps until no rank trains any more."""
        communicator = self._connected(is_watched=False)
        while communicator.all_reduce(torch.zeros(1, device="cpu")).wait().item():
            self._num_steps += 1
            for members in self._kinds():
                nothing = [torch.zeros_like(self._parameters[i]) for i in members]
                self._combine(communicator, nothing)

    def unbind(self, *, is_abrupt: bool = False) -> None:
        """Disconnect; with ``is_abrupt``, abort calls in progress on other ranks."""
        self._connector.give_up()
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        if is_abrupt:
            communicator.abort()
        else:
            communicator.close()

    @torch.no_grad()
    def _combine_steps(self, starts: Sequence[Tensor]) -> None:
        communicator = self._connected()
        communicator.all_reduce(torch.ones(1, device="cpu")).wait()
        self._num_steps += 1
        self.last_round = self._num_steps
        for members in self._kinds():
            deltas = [self._parameters[i] - starts[i] for i in members]
            self._combine(communicator, deltas)
            for i, delta in zip(members, deltas, strict=True):
                self._parameters[i].copy_(starts[i].add_(delta))

    def _connected(self, *, is_watched: bool = True) -> Communicator:
        if self._communicator is None:
            group = run(self._connector.connect(is_watched=is_watched))
            self._communicator = group.communicator
            self.last_round = self._num_steps = 0
        return self._communicator

    def _kinds(self) -> list[list[int]]:
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, parameter in enumerate(self._parameters):
            kind = (parameter.dtype, parameter.device)
            kinds.setdefault(kind, []).append(index)
        return list(kinds.values())

    def _combine(self, communicator: Communicator, deltas: Sequence[Tensor]) -> None:
        flat = torch.cat([delta.reshape(-1) for delta in deltas])
        wire, context = self._compressor.compress(flat)
        lengths = [delta.numel() for delta in deltas]
        combined = self._compressor.decompress(
            adasum_all_reduce(communicator, wire, lengths), context
        )
        parts = cast("tuple[Tensor, ...]", combined.split(lengths))
        for delta, part in zip(deltas, parts, strict=True):
            delta.copy_(part.view_as(delta))
