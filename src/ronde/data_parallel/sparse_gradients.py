"""Gradients of which only the rows that are not zero travel."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ronde.collectives import Communicator, Work
from ronde.coordination.waits import Waits
from ronde.data_parallel.gradient import Gradient, Scaling
from ronde.data_parallel.resumable import Steps, aside


@dataclass(frozen=True, slots=True)
class SparseGradients:
    """Sparse gradients, gathered from all ranks one after the other.

    A result holds the entries of all ranks in rank order, added up nowhere yet: equal
    on all ranks, and so is whatever an optimizer makes of it.

    Attributes:
        gradients: In the order in which every rank gathers them.
        communicator: Gathers them.
    """

    gradients: Sequence[Gradient]
    communicator: Communicator

    @property
    def num_pending(self) -> int:
        """How many are wanted and were not made by backward yet."""
        return sum(
            gradient.parameter.requires_grad and not gradient.num_passes
            for gradient in self.gradients
        )

    def reduce(self, scaling: Scaling, waits: Waits | None) -> Steps[None]:
        """Reduce those that are trained, and hand them to the parameters; collective.

        What no rank has stays None.

        Args:
            scaling: The factors.
            waits: Those of this process; None where there are none.
        """
        trained = [g for g in self.gradients if g.parameter.requires_grad]
        if not trained:
            return
        own = [_own(gradient, scaling) for gradient in trained]

        def gather() -> list[tuple[Tensor, Tensor]]:
            works = [self._gather(*each) for each in own]
            return [(indices.wait(), values.wait()) for indices, values in works]

        gathered = yield from aside(waits, gather)
        for gradient, (indices, values) in zip(trained, gathered, strict=True):
            positions, entries = indices.t(), values
            gradient.num_passes = 0
            gradient.is_reduced = True
            if gradient.parameter.grad is None and not entries.shape[0]:
                continue
            entries = entries * scaling.after if scaling.after != 1.0 else entries
            shape = gradient.parameter.shape
            gradient.give(
                torch.sparse_coo_tensor(
                    positions, entries, shape, check_invariants=False
                )
            )

    def reduce_nothing(self, are_reduced: Sequence[bool]) -> None:
        """Take part in the others' reductions without adding anything.

        Args:
            are_reduced: Which of the gradients the others reduce.
        """
        for gradient, is_reduced in zip(self.gradients, are_reduced, strict=True):
            if is_reduced:
                for work in self._gather(*_nothing(gradient)):
                    work.wait()

    def _gather(
        self, positions: Tensor, entries: Tensor
    ) -> tuple[Work[Tensor], Work[Tensor]]:
        gather = self.communicator.all_gather
        return gather(positions), gather(entries)


def _own(gradient: Gradient, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Return where this rank has entries, (entries, sparse dims), and those, scaled."""
    grad = gradient.parameter.grad
    if grad is None:
        return _nothing(gradient)
    grad = grad.detach()
    if not grad.is_sparse:
        grad = grad.to_sparse(gradient.sparse_dims)
    grad = grad.coalesce()
    entries = grad.values() * gradient.factor(scaling)
    return grad.indices().t().contiguous(), entries


def _nothing(gradient: Gradient) -> tuple[Tensor, Tensor]:
    parameter, dims = gradient.parameter, gradient.sparse_dims
    positions = torch.empty((0, dims), dtype=torch.int64, device=parameter.device)
    return positions, parameter.detach().new_empty((0, *parameter.shape[dims:]))
