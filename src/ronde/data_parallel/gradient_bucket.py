"""One bucket at run time: a flat buffer, the views into it, and its reduction."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ronde.collectives import Communicator, ReduceOp, Work
from ronde.data_parallel.buckets import Bucket
from ronde.data_parallel.compression import Compressor


@dataclass(frozen=True, slots=True)
class Scaling:
    """The factors that turn a sum over ranks into what the caller asked for.

    result = after * sum over ranks of (before * gradient).
    """

    before: float
    after: float
    size: int

    @classmethod
    def of(
        cls, size: int, *, is_average: bool, predivide: float = 1.0, passes: int = 1
    ) -> "Scaling":
        """Derive the factors.

        Args:
            size: Number of ranks.
            is_average: Divide by ``size``; before the sum, unless ``predivide`` says
                how much of it comes before.
            predivide: Horovod's ``gradient_predivide_factor``.
            passes: Divide by this many backward passes as well.
        """
        if not is_average:
            return cls(1.0 / passes, 1.0, size)
        if predivide == 1.0:
            return cls(1.0 / (size * passes), 1.0, size)
        return cls(1.0 / (predivide * passes), predivide / size, size)

    @property
    def keep(self) -> float:
        """The factor for a result to enter a further round and come out unchanged."""
        return 1.0 / (self.size * self.before * self.after)


@dataclass(slots=True)
class Gradient:
    """A parameter and the state of its gradient between two optimizer steps.

    Attributes:
        name: How messages call it.
        parameter: The leaf whose ``.grad`` this is.
        view: Its place in its bucket, strided like the parameter; None while unplanned.
        num_passes: Backward passes since the last reduction.
        is_reduced: Whether ``parameter.grad`` is a result that nothing was added to;
            kept only where ``Scaling.keep`` is not 1.
        was_used: Whether this rank contributed something in the round under way.
    """

    name: str
    parameter: Tensor
    view: Tensor | None = None
    num_passes: int = 0
    is_reduced: bool = False
    was_used: bool = False

    def move(self, scaling: Scaling) -> None:
        """Move ``parameter.grad`` into the bucket, scaled for the sum, and detach it.

        From here to the end of the round ``parameter.grad`` is None: whatever backward
        adds meanwhile goes to a tensor of its own and is not lost.
        """
        grad, view = self.parameter.grad, self.view
        if grad is None or view is None:
            return
        factor = scaling.before
        if self.is_reduced and grad is view:
            factor *= scaling.keep
        if self.was_used:
            view.add_(_dense(grad), alpha=factor)
        elif grad is not view:
            torch.mul(_dense(grad), factor, out=view)
        elif factor != 1.0:
            view.mul_(factor)
        self.was_used = True
        self.parameter.grad = None


@dataclass(slots=True)
class GradientBucket:
    """Gradients that are reduced together.

    The buffer ends with one element a gradient, set to one by every rank that has that
    gradient: after the reduction a zero there says that no rank had it, so that it can
    stay None, as it would in one process.
    """

    gradients: Sequence[Gradient]
    buffer: Tensor
    views: Sequence[Tensor]
    flags: Tensor
    num_pending: int = 0
    is_launched: bool = False
    work: Work[Tensor] | None = None
    compressed: tuple[type[Compressor], object] | None = None

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
        return cls(members, buffer, views, buffer[plan.numel :])

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
        compressor: type[Compressor],
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
        wire, context = compressor.compress(self.buffer)
        self.compressed = (compressor, context)
        self.work = communicator.all_reduce(wire, ReduceOp.SUM)

    def finish(self, scaling: Scaling) -> bool:
        """Wait for the sum and hand the results to the parameters.

        Returns:
            Whether backward added to a gradient while it was under way.
        """
        if self.work is None or self.compressed is None:
            return False
        compressor, context = self.compressed
        result = compressor.decompress(self.work.wait(), context)
        if result is not self.buffer:
            self.buffer.copy_(result)
        self.work = self.compressed = None
        if scaling.after != 1.0:
            self.buffer.mul_(scaling.after)
        used = self._used_anywhere()
        is_late = False
        for slot, (gradient, view) in enumerate(
            zip(self.gradients, self.views, strict=True)
        ):
            late = gradient.parameter.grad
            if late is not None:
                view.mul_(scaling.keep).add_(_dense(late))
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


def _dense(grad: Tensor) -> Tensor:
    grad = grad.detach()
    return grad.to_dense() if grad.is_sparse else grad
