"""Gradients, the buckets that they share, and how a bucket becomes a sum over ranks."""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor

from ronde.collectives import Communicator, Work
from ronde.data_parallel.buckets import BucketPlan
from ronde.data_parallel.group import ReducerGroup, Steps, aside
from ronde.errors import UsageError

_SPARSE = 4


@dataclass(frozen=True, slots=True)
class Scaling:
    """result = after * sum over ``size`` ranks of (before * gradient)."""

    before: float
    after: float
    size: int

    def without(self, num_joined: int) -> "Scaling":
        return replace(self, size=self.size - num_joined) if num_joined else self

    @property
    def keep(self) -> float:
        """The factor for a result to enter a further round and come out unchanged."""
        return 1.0 / (self.size * self.before * self.after)


@dataclass(slots=True)
class Gradient:
    """A parameter and the state of its gradient between two optimizer steps."""

    name: str  # in messages
    parameter: Tensor
    view: Tensor | None = None  # its place in its bucket, strided like the parameter
    result: Tensor | None = None  # what the last round made ``parameter.grad``
    sparse_dims: int = 0  # where it travels sparse, the number of its sparse dimensions
    num_passes: int = 0  # backward passes since the last reduction
    # Whether nothing was added to ``result``; kept where ``Scaling.keep`` is not 1.
    is_reduced: bool = False
    was_used: bool = False  # whether this rank contributed to the round under way
    was_sparse: bool = False  # whether that was sparse
    # Whether backward may write it to ``view``: see ``hooks``. Equal on all ranks.
    is_fusible: bool = False
    is_scaled_in_sum: bool = False  # the factor before the sum is the bucket's to apply
    is_open: bool = False  # a round is under way that waits for its value
    is_written: bool = False  # backward wrote it to ``view`` and is to hand it over
    num_hooks: int = 0  # ours, on the parameter
    num_fused: int = 0  # values that backward wrote to ``view`` until now

    @property
    def is_planned(self) -> bool:
        return self.view is not None or self.sparse_dims > 0

    def factor(self, scaling: Scaling) -> float:
        before = 1.0 if self.is_scaled_in_sum else scaling.before
        if self.is_reduced and self.parameter.grad is self.result:
            return before * scaling.keep
        return before

    def copy_in(self, scaling: Scaling) -> None:
        """Move ``parameter.grad`` into the bucket, scaled for the sum, and detach it.

        Whatever backward adds before the end of the round goes to a tensor of its own.
        What it wrote into the bucket itself stays where it is.
        """
        grad, view = self.parameter.grad, self.view
        if grad is None or view is None:
            return
        factor = self.factor(scaling)
        if self.was_used:
            view.add_(_dense(grad), alpha=factor)
        elif grad.is_sparse or grad.data_ptr() != view.data_ptr():
            torch.mul(_dense(grad), factor, out=view)
        else:
            self.num_fused += self.is_written
            if factor != 1.0:
                view.mul_(factor)
        self.was_used = True
        self.is_written = False
        self.was_sparse |= grad.is_sparse
        self.parameter.grad = None

    def assign_grad(self, result: Tensor) -> None:
        self.parameter.grad = self.result = result

    def reset(self) -> None:
        """Go back to before the first round; ``parameter.grad`` stays."""
        self.view = self.result = None
        self.sparse_dims = self.num_passes = 0
        self.is_reduced = self.is_scaled_in_sum = self.is_open = False


def _dense(grad: Tensor) -> Tensor:
    grad = grad.detach()
    return grad.to_dense() if grad.is_sparse else grad


Sum = Generator[Iterable[Work[Any]], None, None]
"""The sum of a bucket's memory over all ranks, in place: one collective, or two.

It yields what its next stage waits for, on an accelerator nothing: once the first is
started, once it is over (the control numbers are summed then), and, if there is
another, once the second is started. All ranks go through the stages in the same order
relative to their other collectives. What it keeps between rounds belongs to parameters:
buckets are planned anew.
"""
ARRIVED, ADVANCED, OVER = 1, 2, 3
"""The stages: the first collective is over, the second started, all is over."""


class GradientBucket:
    """Gradients that are reduced together.

    Control numbers follow the gradients. First one each, set to one by every rank that
    has that gradient: after the reduction a zero there shows that no rank had it, so
    that it can stay None, as it would in one process. ``_SPARSE`` ones a rank show that
    some rank's was sparse; then the result becomes sparse again, on all.

    Attributes:
        memory: Flat: ``values``, the gradients and padding, then ``control``, what is
            summed as it is. The communicator reduces it without a copy.
        flags: The end of ``control``, in the bucket that is started first: ones from
            ranks that train and zeros from those that only participate, but for
            ``odd_flags``. See Note [Control flags] in ``rounds``.
        prescale: Multiplies the values in their sum: backward writes gradients to their
            places, and nothing should touch them again. None where they are scaled when
            they get there. Whether it is None is the same on all ranks.
        num_pending: Gradients to wait for before it is full.
        is_launched: Whether nothing is left to be started in this round.
        works: What the next stage of the sum under way waits for.
    """

    def __init__(
        self,
        plan: BucketPlan,
        gradients: Sequence[Gradient],
        communicator: Communicator,
        num_flags: int,
    ) -> None:
        """Make the zeroed buffer of ``plan``; collective."""
        self.slots = plan.slots
        self.gradients = [gradients[slot.index] for slot in plan.slots]
        dtype, device = cast("tuple[torch.dtype, torch.device]", plan.kind)
        end = plan.numel + len(self.gradients)
        self.memory = communicator.allocate(end + num_flags, dtype, device)
        self.values, self.control = self.memory[: plan.numel], self.memory[plan.numel :]
        self.flags = self.memory[end:]
        self.views = [
            _view_like(self.values[s.offset : s.offset + s.numel], g.parameter)
            for s, g in zip(self.slots, self.gradients, strict=True)
        ]
        self._is_scaled = any(gradient.is_fusible for gradient in self.gradients)
        self.prescale: float | None = None
        self.odd_flags: Sequence[int] = ()
        self.num_pending = 0
        self.is_launched = False
        self.works: Iterable[Work[Any]] = ()
        self._sum: Sum | None = None
        self._stage = 0

    def adopt(self) -> None:
        for gradient, view in zip(self.gradients, self.views, strict=True):
            old = gradient.view
            gradient.view = view
            gradient.is_scaled_in_sum = self._is_scaled
            if old is not None and gradient.parameter.grad is old:
                view.copy_(old)
                gradient.assign_grad(view)

    def open(self) -> None:
        """Get ready for a round: count the gradients to wait for."""
        self.num_pending = 0
        for gradient in self.gradients:
            gradient.was_used = gradient.was_sparse = gradient.is_written = False
            gradient.is_open = gradient.parameter.requires_grad
            self.num_pending += gradient.parameter.requires_grad
        # Nothing trainable: a frozen part of the model costs nothing, on any rank. But
        # a round begins with the flags.
        self.is_launched = self.num_pending == 0 and self.flags.numel() == 0

    def fill(self, scaling: Scaling) -> None:
        """Copy in whatever is there, for the sum that is launched now."""
        self.is_launched = True
        self.control.fill_(1)
        for slot, gradient in enumerate(self.gradients):
            gradient.copy_in(scaling)
            gradient.num_passes = 0
            gradient.is_open = False
            if gradient.is_written:
                raise UsageError(
                    "synchronize() must be called outside of backward(), got a call "
                    f"while backward makes {gradient.name}. Call it after backward()."
                )
            if not gradient.was_used:
                self.views[slot].zero_()
                self.control[slot] = 0
            elif gradient.was_sparse:
                self.control[slot] = _SPARSE * scaling.size
        self._set_flags(scaling, 0)

    def fill_with_zeros(self, scaling: Scaling) -> None:
        """Add nothing to the others' sum, which is launched now."""
        self.is_launched = True
        for gradient in self.gradients:
            gradient.is_open = False
        self.memory.zero_()
        self._set_flags(scaling, 1)

    def _set_flags(self, scaling: Scaling, odd: int) -> None:
        for flag in self.odd_flags:
            self.flags[flag] = odd
        self.prescale = scaling.before if self._is_scaled else None

    def start(self, total: Sum) -> None:
        """Start the sum of what it was filled with."""
        self._sum, self._stage = total, 0
        self.works = next(total)

    def go_to(self, stage: int) -> None:
        """Wait for the sum under way, if there is one, as far as that stage."""
        while self._sum is not None and self._stage < stage:
            self._stage += 1
            self.works = next(self._sum, ())
        if stage == OVER:
            self._sum = None

    def drop(self) -> None:
        """Leave the sum under way as it is."""
        self._sum, self.works = None, ()

    def count(self, flag: int) -> int:
        return round(float(self.flags[flag].real))

    def finish(self, scaling: Scaling, keep: Callable[[], float]) -> bool:
        """Wait for the sum and hand the results to the parameters.

        ``keep`` returns the factor for a result to enter the next round. Returns
        whether backward added to a gradient while it was under way.
        """
        if self._sum is None:
            return False
        self.go_to(OVER)
        if scaling.after != 1.0:
            self.values.mul_(scaling.after)
        # The look costs an accelerator a synchronisation, hence only where it is
        # needed: where this rank did not have all gradients.
        used: list[float] | None = None
        if not all(gradient.was_used for gradient in self.gradients):
            used = cast("list[float]", self.control.real.tolist())
        # Half way, so that no rounding of the wire's matters.
        sparse_from = _SPARSE // 2 * scaling.size
        is_late = False
        for slot, gradient in enumerate(self.gradients):
            view, late = self.views[slot], gradient.parameter.grad
            if late is not None:
                view.mul_(keep()).add_(_dense(late))
                is_late = True
            gradient.is_reduced = late is None
            if late is not None or used is None or used[slot]:
                is_sparse = gradient.was_sparse
                is_sparse |= used is not None and used[slot] > sparse_from
                gradient.assign_grad(view.to_sparse(1) if is_sparse else view)
        return is_late


def _view_like(flat: Tensor, parameter: Tensor) -> Tensor:
    # Strided as autograd itself would make it, which is what optimizers are fast on
    # (channels_last weights, for one).
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides)


class SparseGradients:
    """Gradients of which only the rows that are not zero travel.

    They are gathered from all ranks one after the other, in this order on every rank. A
    result holds the entries of all ranks in rank order, added up nowhere yet: equal on
    all ranks, and so is whatever an optimizer makes of it.
    """

    def __init__(self, gradients: Sequence[Gradient]) -> None:
        self.gradients = gradients

    @property
    def num_pending(self) -> int:
        return sum(
            gradient.parameter.requires_grad and not gradient.num_passes
            for gradient in self.gradients
        )

    def reduce(self, scaling: Scaling, group: ReducerGroup) -> Steps[None]:
        """Reduce those that are trained; what no rank has stays None. Collective."""
        trained = [g for g in self.gradients if g.parameter.requires_grad]
        if not trained:
            return
        own = [_own(gradient, scaling) for gradient in trained]

        def gather() -> list[list[Tensor]]:
            all_gather = group.communicator.all_gather
            works = [[all_gather(part) for part in each] for each in own]
            return [[work.wait() for work in each] for each in works]

        gathered = yield from aside(group.waits, gather)
        for gradient, (positions, entries) in zip(trained, gathered, strict=True):
            gradient.num_passes = 0
            gradient.is_reduced = True
            if gradient.parameter.grad is None and not entries.shape[0]:
                continue
            scaled = entries * scaling.after if scaling.after != 1.0 else entries
            shape = gradient.parameter.shape
            gradient.assign_grad(
                torch.sparse_coo_tensor(
                    positions.t(), scaled, shape, check_invariants=False
                )
            )

    def participate_with_zeros(
        self, are_reduced: Sequence[bool], communicator: Communicator
    ) -> None:
        """Take part in the others' reductions, as marked, without adding anything."""
        for gradient in compress(self.gradients, are_reduced):
            works = [communicator.all_gather(part) for part in _nothing(gradient)]
            for work in works:
                work.wait()


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
