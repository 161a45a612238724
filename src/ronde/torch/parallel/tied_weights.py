"""Weights shared by several pipeline stages, which stay equal by summed gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.tensor import DTensor

from ronde.errors import UsageError
from ronde.torch.parallel.equal_weights import gather_objects

Tie = dict[int, str]
"""One tied weight: its name in each stage that has it."""


def find_ties(model: nn.Module, stages: Sequence[Sequence[str]]) -> list[Tie]:
    """Return the weights that several stages share.

    Args:
        model: The model, not yet cut.
        stages: The names of the layers of each stage.
    """
    stage_of = {name: index for index, names in enumerate(stages) for name in names}
    found: dict[nn.Parameter, Tie] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stage = stage_of[name.partition(".")[0]]
        found.setdefault(parameter, {}).setdefault(stage, name)
    return [tie for tie in found.values() if len(tie) > 1]


class TiedWeights:
    """The copies of tied weights in a rank's stages; stage s is on rank s mod pp.

    Raises:
        UsageError: Stages shard a weight in different ways.
    """

    def __init__(
        self, stages: nn.Module, ties: Sequence[Tie], group: dist.ProcessGroup
    ) -> None:
        self._stages, self._ties, self._group = stages, ties, group
        self._unequal = list(ties)
        if ties:
            self._require_equal_sharding()
            self.make_equal()

    def make_equal(self) -> None:
        """Set all copies to the values of the first; collective.

        Copies on the meta device are left for a later call.
        """
        unequal, self._unequal = self._unequal, []
        for tie in unequal:
            copies = [_local(copy.detach()) for copy in self._copies(tie).values()]
            if copies and copies[0].is_meta:
                self._unequal.append(tie)
            elif copies:
                first = self._exchange(tie, copies[0])[0]
                for copy in copies:
                    copy.copy_(first)

    def add_gradients(self) -> None:
        """Set the gradient of each copy to the sum over all copies; collective."""
        for tie in self._ties:
            gradients: list[Tensor] = []
            for copy in self._copies(tie).values():
                if copy.requires_grad:
                    if copy.grad is None:
                        copy.grad = torch.zeros_like(copy)
                    gradients.append(_local(copy.grad))
            if gradients:
                own = torch.stack(gradients).sum(0)
                total = torch.stack(self._exchange(tie, own)).sum(0)
                for gradient in gradients:
                    gradient.copy_(total)

    def _copies(self, tie: Tie) -> dict[str, nn.Parameter]:
        rank, size = self._group.rank(), self._group.size()
        own = [name for stage, name in tie.items() if stage % size == rank]
        return {name: self._stages.get_parameter(name) for name in own}

    def _exchange(self, tie: Tie, own: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks that have the weight, ordered by rank."""
        size, me = self._group.size(), self._group.rank()
        tensors = {stage % size: torch.empty_like(own) for stage in tie}
        tensors[me] = own.contiguous()
        operations = [
            dist.P2POp(op, tensors[owner], group=self._group, group_peer=rank)
            for rank in tensors
            for op, owner in ((dist.isend, me), (dist.irecv, rank))
            if rank != me and own.numel()
        ]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return [tensors[rank] for rank in sorted(tensors)]

    def _require_equal_sharding(self) -> None:
        own = {
            name: str(copy.placements) if isinstance(copy, DTensor) else "whole"
            for tie in self._ties
            for name, copy in self._copies(tie).items()
        }
        of_ranks = gather_objects(own, self._group)
        found = {name: form for each in of_ranks for name, form in each.items()}
        for tie in self._ties:
            if len({found[name] for name in tie.values()}) > 1:
                copies = ", ".join(
                    f"{name} {found[name]} in stage {stage}"
                    for stage, name in tie.items()
                )
                raise UsageError(
                    "all stages must shard a shared weight in the same way, got "
                    f"{copies}. Leave the weight out of the plan."
                )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
