"""One bucket at run time: a flat buffer, the views into it, and its reduction."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ronde.collectives import Communicator
from ronde.data_parallel.bucket_reduction import (
    BucketContent,
    BucketReduction,
    PendingSum,
)
from ronde.data_parallel.buckets import Bucket
from ronde.data_parallel.gradient import Gradient, Scaling, dense


@dataclass(slots=True)
class GradientBucket:
    """Gradients that are reduced together.

    The buffer ends with one element a gradient, set to one by every rank that has that
    gradient: after the reduction a zero there says that no rank had it, so that it can
    stay None, as it would in one process.
    """

    content: BucketContent
    views: Sequence[Tensor]
    flags: Tensor
    num_pending: int = 0
    is_launched: bool = False
    pending: PendingSum | None = None

    @classmethod
    def allocate(
        cls, plan: Bucket, gradients: Sequence[Gradient], communicator: Communicator
    ) -> "GradientBucket":
        """Make the zeroed buffer of ``plan`` and its gradients' views; collective.

        It lies where the communicator reduces it without a copy.
        """
        members = [gradients[slot.index] for slot in plan.slots]
        first = members[0].parameter
        buffer = communicator.allocate(
            plan.numel + len(members), first.dtype, first.device
        )
        views = [
            _view_like(buffer[s.offset : s.offset + s.numel], g.parameter)
            for s, g in zip(plan.slots, members, strict=True)
        ]
        content = BucketContent(buffer, plan.slots, members)
        return cls(content, views, buffer[plan.numel :])

    @property
    def gradients(self) -> Sequence[Gradient]:
        """The members, in the order of their places."""
        return self.content.gradients

    def adopt(self) -> None:
        """Make this bucket the home of its gradients, with the values they have."""
        for gradient, view in zip(self.gradients, self.views, strict=True):
            old = gradient.view
            gradient.view = view
            if old is not None and gradient.parameter.grad is old:
                view.copy_(old)
                gradient.parameter.grad = view

    def open(self) -> None:
        """Get ready for a round: count the gradients to wait for."""
        self.num_pending = 0
        for gradient in self.gradients:
            gradient.was_used = False
            self.num_pending += gradient.parameter.requires_grad
        # Nothing trainable: a frozen part of the model costs nothing, on any rank.
        self.is_launched = self.num_pending == 0

    def launch(
        self,
        communicator: Communicator,
        scaling: Scaling,
        reduction: BucketReduction,
    ) -> None:
        """Start the sum over all ranks, once a round, of whatever is there."""
        if self.is_launched:
            return
        self.is_launched = True
        self.flags.fill_(1)
        for slot, gradient in enumerate(self.gradients):
            gradient.move(scaling)
            gradient.num_passes = 0
            if not gradient.was_used:
                self.views[slot].zero_()
                self.flags[slot] = 0
        self.pending = reduction.launch(self.content, communicator)

    def advance(self) -> None:
        """Start what follows the first collective, if that is not all."""
        if self.pending is not None:
            self.pending.advance()

    def finish(self, scaling: Scaling) -> bool:
        """Wait for the sum and hand the results to the parameters.

        Returns:
            Whether backward added to a gradient while it was under way.
        """
        if self.pending is None:
            return False
        self.pending.finish()
        self.pending = None
        if scaling.after != 1.0:
            self.content.buffer.mul_(scaling.after)
        used = self._used_anywhere()
        is_late = False
        for slot, (gradient, view) in enumerate(
            zip(self.gradients, self.views, strict=True)
        ):
            late = gradient.parameter.grad
            if late is not None:
                view.mul_(scaling.keep).add_(dense(late))
                is_late = True
            gradient.is_reduced = late is None
            if late is not None or used is None or used[slot]:
                gradient.parameter.grad = view
        return is_late

    def _used_anywhere(self) -> list[bool] | None:
        """Say which gradients some rank had; None, without a look, if this one had all.

        The look costs an accelerator a synchronisation, hence only where it is needed.
        """
        if all(gradient.was_used for gradient in self.gradients):
            return None
        return cast("list[bool]", (self.flags != 0).tolist())


def _view_like(flat: Tensor, parameter: Tensor) -> Tensor:
    # Strided as autograd itself would make it, which is what optimizers are fast on
    # (channels_last weights, for one).
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides)
