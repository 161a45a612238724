"""Gradients, the buckets that they share, and how a bucket becomes a sum over ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ronde.collectives import Communicator, ReduceOp, Work
from ronde.coordination.waits import Waits
from ronde.data_parallel.buckets import BucketPlan
from ronde.data_parallel.group import Steps, aside
from ronde.errors import UsageError

_SPARSE = 4


@dataclass(frozen=True, slots=True)
class Scaling:
    """The factors that turn a sum over ranks into what the caller asked for.

    result = after * sum over ``size`` ranks of (before * gradient).
    """

    before: float
    after: float
    size: int

    def without(self, num_joined: int) -> "Scaling":
        """Return the same factors where some ranks do not add anything any more."""
        return replace(self, size=self.size - num_joined) if num_joined else self

    @property
    def keep(self) -> float:
        """The factor for a result to enter a further round and come out unchanged."""
        return 1.0 / (self.size * self.before * self.after)


@dataclass(slots=True)
class Gradient:
    """A parameter and the state of its gradient between two optimizer steps.

    Attributes:
        name: In messages.
        parameter: The leaf whose ``.grad`` this is.
        view: Its place in its bucket, strided like the parameter; None where it has
            none.
        result: What the last round made ``parameter.grad``; None before the first.
        sparse_dims: Where it travels sparse, the number of its sparse dimensions.
        num_passes: Backward passes since the last reduction.
        is_reduced: Whether ``result`` is still that: nothing was added to it. Kept only
            where ``Scaling.keep`` is not 1.
        was_used: Whether this rank contributed something in the round under way.
        was_sparse: Whether what it contributed was sparse.
        is_fusible: Whether backward may write it to ``view``, in some passes: see
            ``hooks``. Equal on all ranks.
        is_scaled_in_sum: Whether the factor before the sum is the bucket's to apply.
        is_open: Whether a round is under way that waits for its value.
        is_written: Whether backward has written its value to ``view`` and is about to
            hand it over.
        num_hooks: Hooks of ours on the parameter.
        num_fused: Values that backward wrote to ``view`` until now.
    """

    name: str
    parameter: Tensor
    view: Tensor | None = None
    result: Tensor | None = None
    sparse_dims: int = 0
    num_passes: int = 0
    is_reduced: bool = False
    was_used: bool = False
    was_sparse: bool = False
    is_fusible: bool = False
    is_scaled_in_sum: bool = False
    is_open: bool = False
    is_written: bool = False
    num_hooks: int = 0
    num_fused: int = 0

    @property
    def is_planned(self) -> bool:
        return self.view is not None or self.sparse_dims > 0

    def factor(self, scaling: Scaling) -> float:
        """Return what ``parameter.grad`` is to be multiplied by where it is copied."""
        before = 1.0 if self.is_scaled_in_sum else scaling.before
        if self.is_reduced and self.parameter.grad is self.result:
            return before * scaling.keep
        return before

    def copy_in(self, scaling: Scaling) -> None:
        """Move ``parameter.grad`` into the bucket, scaled for the sum, and detach it.

        From here to the end of the round ``parameter.grad`` is None: whatever backward
        adds meanwhile goes to a tensor of its own and is not lost. What backward wrote
        into the bucket itself stays where it is.
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


class PendingSum(ABC):
    """A bucket's sum under way: one collective, or two that follow each other.

    All ranks call ``advance`` in the same order relative to their other collectives.
    All but ``works`` raise ``CollectiveError`` where a collective failed.
    """

    @abstractmethod
    def works(self) -> Iterable[Work[Any]]:
        """Return what the next ``arrive``, ``advance`` or ``finish`` waits for.

        On an accelerator nothing: there waiting only orders what comes next.
        """

    @abstractmethod
    def arrive(self) -> None:
        """Wait for what comes first: the control numbers are summed then."""

    def advance(self) -> None:
        """Wait for the first collective and start the second, if there is one."""
        self.arrive()

    def finish(self) -> None:
        """Wait for the rest: the values are the sum then."""
        self.arrive()


class GradientBucket:
    """Gradients that are reduced together.

    Control numbers follow the gradients. First one each, set to one by every rank that
    has that gradient: after the reduction a zero there shows that no rank had it, so
    that it can stay None, as it would in one process. ``_SPARSE`` ones a rank show that
    some rank's was sparse; then the result becomes sparse again, on all.

    Attributes:
        memory: Flat: the values, and the control numbers behind them. It lies where the
            communicator reduces it without a copy.
        values: The gradients, and padding.
        control: What is summed as it is, in small numbers.
        flags: The end of ``control``, in the bucket that is started first: ones from
            ranks that train and zeros from those that only participate, but for
            ``odd_flags``. See Note [Control flags] in ``rounds``.
        odd_flags: Flags in which this rank differs from that in this round.
        slots: Each gradient's place in ``values``; what lies between is padding.
        gradients: One a slot; ``was_used`` tells which this rank has.
        views: Their places.
        prescale: Multiplies the values in their sum: backward writes gradients to their
            places, and nothing should touch them again. None where they are scaled when
            they get there. Whether it is None is the same on all ranks.
        num_pending: Gradients to wait for before it is full.
        is_launched: Whether nothing is left to be started in this round.
        pending: The sum under way.
        on_over: Called when that was waited for; with False if it failed.
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
        self.pending: PendingSum | None = None
        self.on_over: Callable[[bool], None] | None = None

    def adopt(self) -> None:
        """Make this bucket the home of its gradients, with the values they have."""
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

    def works(self) -> Iterable[Work[Any]]:
        return () if self.pending is None else self.pending.works()

    def read_flags(self) -> list[float]:
        """Wait for the first collective and return the flags, summed over all ranks."""
        if self.pending is not None:
            self.pending.arrive()
        return cast("list[float]", self.flags.real.tolist())

    def advance(self) -> None:
        """Start what follows the first collective, if that is not all."""
        if self.pending is not None:
            self.pending.advance()

    def drop(self) -> None:
        """Wait for the sum and leave it to the others."""
        if self.pending is None:
            return
        is_good = False
        try:
            self.pending.finish()
            is_good = True
        finally:
            if self.on_over is not None:
                self.on_over(is_good)
        self.pending = None

    def count(self, flag: int) -> int:
        """Return a flag of the last round, summed over all ranks."""
        return round(float(self.flags[flag].real))

    def finish(self, scaling: Scaling, keep: Callable[[], float]) -> bool:
        """Wait for the sum and hand the results to the parameters.

        Args:
            scaling: As in ``fill``.
            keep: The factor for a result to enter the round after this one.

        Returns:
            Whether backward added to a gradient while it was under way.
        """
        if self.pending is None:
            return False
        self.drop()
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


SumBucket = Callable[[GradientBucket, Communicator], PendingSum]
"""Starts the sum of ``bucket.memory`` over all ranks, in place; collective.

What it keeps between rounds belongs to parameters: buckets are planned anew."""


class Compressor(Protocol):
    """A pair of static functions; any class that has them serves.

    Both must be deterministic and keep the number of elements, since the ranks' results
    are summed element by element.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what travels and whatever ``decompress`` needs to undo it."""
        ...

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:  # noqa: ANN401 - the user's own
        """Turn the reduced ``tensor`` back into the original dtype."""
        ...


class NoneCompressor:
    """Send gradients as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        """Return ``tensor`` itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: None) -> Tensor:  # noqa: ARG004 - the interface
        """Return ``tensor`` itself."""
        return tensor


class _CastCompressor:
    wire_dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Cast floating point to the wire's dtype; leave the rest alone."""
        wire = tensor.to(cls.wire_dtype) if tensor.is_floating_point() else tensor
        return wire, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Cast back."""
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Send floating point as float16: half the bytes, range up to 65504."""

    wire_dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Send floating point as bfloat16: half the bytes, float32's range, 8 bits."""

    wire_dtype = torch.bfloat16


class CompressedSum(PendingSum):
    """The sum of what a compressor makes of a whole bucket.

    The control numbers travel with the values where the compressor is one of ours,
    which keep small integers. What a user's own makes of them nobody knows: they travel
    by themselves then, and also where only the values are to be scaled.
    """

    def __init__(
        self,
        compressor: type[Compressor],
        bucket: GradientBucket,
        communicator: Communicator,
    ) -> None:
        prescale = bucket.prescale
        self._values = bucket.values
        self._control: Work[Tensor] | None = None
        is_ours = compressor in (NoneCompressor, FP16Compressor, BF16Compressor)
        if is_ours and prescale is None:
            self._values = bucket.memory
        else:
            self._control = communicator.all_reduce(bucket.control, ReduceOp.SUM)
            if not self._values.numel():
                compressor = NoneCompressor
        self._compressor = compressor
        self._context: Any
        wire, self._context = compressor.compress(self._values)
        self._work: Work[Tensor] | None = communicator.all_reduce(
            wire, ReduceOp.SUM, prescale=prescale or 1.0
        )

    def works(self) -> Iterable[Work[Any]]:
        if self._work is None or not self._values.is_cpu:
            return ()
        return (self._work,) if self._control is None else (self._control, self._work)

    def arrive(self) -> None:
        if self._work is None:
            return
        if self._control is not None:
            self._control.wait()
        result = self._compressor.decompress(self._work.wait(), self._context)
        if result is not self._values:
            self._values.copy_(result)
        self._work = None


class SparseGradients:
    """Gradients of which only the rows that are not zero travel.

    They are gathered from all ranks one after the other, in this order on every rank. A
    result holds the entries of all ranks in rank order, added up nowhere yet: equal on
    all ranks, and so is whatever an optimizer makes of it.
    """

    def __init__(
        self, gradients: Sequence[Gradient], communicator: Communicator
    ) -> None:
        self.gradients = gradients
        self._gather = communicator.all_gather

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
        """
        trained = [g for g in self.gradients if g.parameter.requires_grad]
        if not trained:
            return
        own = [_own(gradient, scaling) for gradient in trained]

        def gather() -> list[list[Tensor]]:
            works = [[self._gather(part) for part in each] for each in own]
            return [[work.wait() for work in each] for each in works]

        gathered = yield from aside(waits, gather)
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

    def participate_with_zeros(self, are_reduced: Sequence[bool]) -> None:
        """Take part in the others' reductions, as marked, without adding anything."""
        for gradient, is_reduced in zip(self.gradients, are_reduced, strict=True):
            if is_reduced:
                for work in [self._gather(part) for part in _nothing(gradient)]:
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
