"""One bucket at run time: a flat buffer, the views into it, and its reduction."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ronde.collectives import Communicator, Work
from ronde.data_parallel.bucket_reduction import (
    BucketContent,
    BucketReduction,
    PendingSum,
)
from ronde.data_parallel.buckets import Bucket
from ronde.data_parallel.gradient import Gradient, Scaling, dense
from ronde.errors import UsageError

_SPARSE = 4


@dataclass(slots=True)
class GradientBucket:
    """Gradients that are reduced together.

    Control numbers follow the gradients. First one flag each, set to one by every rank
    that has that gradient: after the reduction a zero there says that no rank had it,
    so that it can stay None, as it would in one process. ``_SPARSE`` ones a rank say
    that some rank's was sparse; then the result becomes sparse again, on all.

    Attributes:
        content: What is summed.
        views: The gradients' places.
        flags: One a gradient, then the notes.
        notes: What ranks tell each other: ones from those that train and zeros from
            those that only keep up, but for ``silent``. Only the bucket that is started
            first has any.
        silent: Notes in which this rank differs from that in this round.
        num_pending: Gradients to wait for before it is full.
        is_launched: Whether nothing is left to be started in this round.
        pending: The sum under way.
    """

    content: BucketContent
    views: Sequence[Tensor]
    flags: Tensor
    notes: Tensor
    silent: Sequence[int] = ()
    num_pending: int = 0
    is_launched: bool = False
    pending: PendingSum | None = None

    @classmethod
    def allocate(
        cls,
        plan: Bucket,
        gradients: Sequence[Gradient],
        communicator: Communicator,
        *,
        num_notes: int = 0,
    ) -> "GradientBucket":
        """Make the zeroed buffer of ``plan`` and its gradients' views; collective.

        It lies where the communicator reduces it without a copy.
        """
        members = [gradients[slot.index] for slot in plan.slots]
        dtype, device = cast("tuple[torch.dtype, torch.device]", plan.kind)
        end = plan.numel + len(members)
        buffer = communicator.allocate(end + num_notes, dtype, device)
        views = [
            _view_like(buffer[s.offset : s.offset + s.numel], g.parameter)
            for s, g in zip(plan.slots, members, strict=True)
        ]
        values, control = buffer[: plan.numel], buffer[plan.numel :]
        prescale = 1.0 if any(gradient.is_fusible for gradient in members) else None
        content = BucketContent(buffer, values, control, plan.slots, members, prescale)
        return cls(content, views, control, buffer[end:])

    @property
    def gradients(self) -> Sequence[Gradient]:
        """The members, in the order of their places."""
        return self.content.gradients

    def adopt(self) -> None:
        """Make this bucket the home of its gradients, with the values they have."""
        for gradient, view in zip(self.gradients, self.views, strict=True):
            old = gradient.view
            gradient.view = view
            gradient.is_scaled_in_sum = self.content.prescale is not None
            if old is not None and gradient.parameter.grad is old:
                view.copy_(old)
                gradient.give(view)

    def open(self) -> None:
        """Get ready for a round: count the gradients to wait for."""
        self.num_pending = 0
        for gradient in self.gradients:
            gradient.was_used = gradient.was_sparse = gradient.is_written = False
            gradient.is_open = gradient.parameter.requires_grad
            self.num_pending += gradient.parameter.requires_grad
        # Nothing trainable: a frozen part of the model costs nothing, on any rank. But
        # a round begins with the notes.
        self.is_launched = self.num_pending == 0 and self.notes.numel() == 0

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
            gradient.is_open = False
            if gradient.is_written:
                raise UsageError(
                    "synchronize() must be called outside of backward(), got a call "
                    f"while backward makes {gradient.name}. Call it after backward()."
                )
            if not gradient.was_used:
                self.views[slot].zero_()
                self.flags[slot] = 0
            elif gradient.was_sparse:
                self.flags[slot] = _SPARSE * scaling.size
        for note in self.silent:
            self.notes[note] = 0
        self._launch(communicator, scaling, reduction)

    def launch_nothing(
        self,
        communicator: Communicator,
        scaling: Scaling,
        reduction: BucketReduction,
    ) -> None:
        """Take part in the others' sum without adding anything; open it before."""
        self.is_launched = True
        for gradient in self.gradients:
            gradient.is_open = False
        self.content.memory.zero_()
        for note in self.silent:
            self.notes[note] = 1
        self._launch(communicator, scaling, reduction)

    def _launch(
        self,
        communicator: Communicator,
        scaling: Scaling,
        reduction: BucketReduction,
    ) -> None:
        content = self.content
        if content.prescale is not None:
            content = replace(content, prescale=scaling.before)
        self.pending = reduction.launch(content, communicator)

    def works(self) -> Iterable[Work[Any]]:
        """Return what the next ``advance`` or ``finish`` waits for."""
        return () if self.pending is None else self.pending.works()

    def read_notes(self) -> list[float]:
        """Wait for the first collective and return the notes, summed over all ranks."""
        if self.pending is not None:
            self.pending.arrive()
        return cast("list[float]", self.notes.real.tolist())

    def advance(self) -> None:
        """Start what follows the first collective, if that is not all."""
        if self.pending is not None:
            self.pending.advance()

    def drop(self) -> None:
        """Wait for the sum and leave it to the others."""
        if self.pending is not None:
            self.pending.finish()
            self.pending = None

    def count(self, note: int) -> int:
        """Return a note of the last round, summed over all ranks."""
        return round(float(self.notes[note].real))

    def finish(self, scaling: Scaling, keep: Callable[[], float]) -> bool:
        """Wait for the sum and hand the results to the parameters.

        Args:
            scaling: As in ``launch``.
            keep: The factor for a result to enter the round after this one.

        Returns:
            Whether backward added to a gradient while it was under way.
        """
        if self.pending is None:
            return False
        self.drop()
        if scaling.after != 1.0:
            self.content.values.mul_(scaling.after)
        used = self._used_anywhere()
        is_late = False
        for slot, (gradient, view) in enumerate(
            zip(self.gradients, self.views, strict=True)
        ):
            late = gradient.parameter.grad
            if late is not None:
                view.mul_(keep()).add_(dense(late))
                is_late = True
            gradient.is_reduced = late is None
            if late is not None or used is None or used[slot]:
                is_sparse = gradient.was_sparse or _is_sparse(used, slot, scaling)
                gradient.give(view.to_sparse(1) if is_sparse else view)
        return is_late

    def _used_anywhere(self) -> list[float] | None:
        """Return the flags; None, without a look, if this rank had all gradients.

        The look costs an accelerator a synchronisation, hence only where it is needed.
        """
        if all(gradient.was_used for gradient in self.gradients):
            return None
        return cast("list[float]", self.flags.real.tolist())


def _is_sparse(used: list[float] | None, slot: int, scaling: Scaling) -> bool:
    # Half way, so that no rounding of the wire's matters.
    return used is not None and used[slot] > _SPARSE // 2 * scaling.size


def _view_like(flat: Tensor, parameter: Tensor) -> Tensor:
    # Strided as autograd itself would make it, which is what optimizers are fast on
    # (channels_last weights, for one).
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides)
