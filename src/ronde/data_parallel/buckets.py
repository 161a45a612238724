"""Buckets of gradients: tuning their sizes, and the sum of a bucket over ranks."""

import time
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from ronde.collectives import Communicator, Work
from ronde.data_parallel.group import ReducerGroup, Steps, result_of, run_blocking
from ronde.drift import NUM_FLAGS
from ronde.errors import UsageError
from ronde.parallel.buckets import BucketLimits, BucketPlan
from ronde.tuning import Tuner, TuningOptions


class BucketTuning:
    """Tries bucket sizes on one reducer; rank 0 measures and decides for all ranks.

    ``candidates``, the default first, and ``is_over`` are equal on all ranks.
    """

    def __init__(
        self,
        name: str,
        candidates: Sequence[BucketLimits],
        communicator: Communicator,
        options: TuningOptions,
    ) -> None:
        self._communicator = communicator
        self._num_fed = options.num_fed
        self._tuner = Tuner(candidates, options, name, _columns)
        self.is_over = self._tuner.is_over
        self._num_rounds = 0
        self._last_s = time.perf_counter()

    def round_done(self) -> Steps[BucketLimits | None]:
        """Count a round; return new limits, if any. Collective in some rounds."""
        if self.is_over:
            return None
        now_s = time.perf_counter()
        if self._communicator.rank == 0:
            self._tuner.feed(now_s - self._last_s)
        self._last_s = now_s
        self._num_rounds += 1
        if self._num_rounds % self._num_fed:
            return None
        chosen = self._tuner.setting
        numbers = [chosen.first_bytes, chosen.other_bytes, int(self._tuner.is_over)]
        decision = torch.tensor(numbers, device="cpu")
        yield from result_of(self._communicator.broadcast(decision, 0))
        first, other, is_over = cast("list[int]", decision.tolist())
        self.is_over = bool(is_over)
        return BucketLimits(first, other)


def _columns(limits: BucketLimits) -> dict[str, int]:
    first, other = limits.first_bytes, limits.other_bytes
    return {"first_bucket_bytes": first, "bucket_bytes": other}


@dataclass(frozen=True, slots=True)
class Scaling:
    """Factors applied before and after the sum of a gradient over ``size`` ranks."""

    before: float
    after: float
    size: int

    def without(self, num_joined: int) -> "Scaling":
        return replace(self, size=self.size - num_joined) if num_joined else self

    @property
    def keep(self) -> float:
        """The factor for results that must pass the next round unchanged."""
        return 1.0 / (self.size * self.before * self.after)


@dataclass(slots=True, eq=False)
class Gradient:
    """A parameter and the state of its gradient between two optimizer steps."""

    name: str  # in messages
    parameter: Tensor
    # The gradient's slice of the bucket, strided like the parameter. ``parameter.grad``
    # is another tensor of the same memory, as a program may set its ``data``.
    view: Tensor | None = None
    kind: Hashable = None  # of the parameter when it was planned: see ``kind_of``
    sparse_result: Tensor | None = None  # the last round's result, if it was sparse
    sparse_dims: int = 0  # the number of sparse dimensions; 0 if sent dense
    num_passes: int = 0  # backward passes since the last reduction
    # True if nothing was added to the result of the last round.
    is_reduced: bool = False
    was_used: bool = False  # this rank has added to the current round
    was_sparse: bool = False  # this rank's addition was sparse
    # Backward may write the gradient to ``view``: see ``fusion``. Equal on all ranks.
    is_fusible: bool = False
    is_scaled_in_sum: bool = False  # by the bucket's sum, not by ``copy_in``
    is_open: bool = False  # the current round waits for this gradient
    is_written: bool = False  # backward wrote it to ``view``, but has not set ``grad``
    hook_id: int = -1  # of the reducer's post-accumulate hook
    num_hooks: int = 0  # the reducer's hooks on the parameter
    num_fused: int = 0  # gradients that backward wrote to ``view`` so far
    # The gradients of this parameter in all reducers, this one included.
    siblings: "list[Gradient]" = field(default_factory=list["Gradient"])

    @property
    def is_planned(self) -> bool:
        return self.kind is not None

    def is_result(self, grad: Tensor) -> bool:
        """Return True if ``grad`` is the result of the last round."""
        if grad.is_sparse:
            return grad is self.sparse_result
        return self.view is not None and grad.is_set_to(self.view)

    def is_result_of_sibling(self, grad: Tensor) -> bool:
        """Return True if ``grad`` is an unchanged result of another reducer."""
        return len(self.siblings) > 1 and any(
            other is not self and other.is_reduced and other.is_result(grad)
            for other in self.siblings
        )

    def factor(self, scaling: Scaling) -> float:
        before = 1.0 if self.is_scaled_in_sum else scaling.before
        grad = self.parameter.grad
        is_kept = self.is_reduced and grad is not None and self.is_result(grad)
        return before * scaling.keep if is_kept else before

    def copy_in(self, scaling: Scaling) -> None:
        """Move ``parameter.grad`` into the bucket, scaled for the sum."""
        grad, view = self.parameter.grad, self.view
        if grad is None or view is None:
            return
        factor = self.factor(scaling)
        if self.was_used:
            view.add_(_dense(grad), alpha=factor)
        elif grad.is_sparse or not grad.is_set_to(view):
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
        self.sparse_result = result if result.is_sparse else None
        self.parameter.grad = result

    def forget_plan(self) -> None:
        """Remove the gradient from its bucket, but keep ``parameter.grad``."""
        self.view = self.sparse_result = self.kind = None
        self.is_reduced = self.is_scaled_in_sum = self.is_open = False

    def reset(self) -> None:
        self.forget_plan()
        self.sparse_dims = self.num_passes = 0


def kind_of(parameter: Tensor) -> Hashable:
    """Return the properties of a parameter that require a new plan if they change."""
    return parameter.dtype, parameter.device, parameter.shape, parameter.stride()


def _num_uses(memory: Tensor) -> int:
    """Return the number of tensors that share this tensor's storage."""
    storage = memory.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001


def _dense(grad: Tensor) -> Tensor:
    grad = grad.detach()
    return grad.to_dense() if grad.is_sparse else grad


Sum = Generator[Iterable[Work[Any]], None, None]
"""The sum of a bucket's memory over all ranks, in place.

The first step yields the started works to wait for (on an accelerator none); the
second yields an empty tuple once the sum has arrived.
"""
ARRIVED, OVER = 1, 2
"""Stages of a sum: its result has arrived; it is also recorded in timelines."""
_SPARSE = 4


class GradientBucket:
    """Gradients that are reduced together.

    ``memory`` is flat. It begins with ``values``, the gradients with padding, and
    ``control``, one number for each gradient. A rank that has a gradient sets its
    number to 1: if the sum is 0, no rank had it, and it stays None, as in one process.
    A rank whose gradient is sparse sets ``_SPARSE`` * ranks; then the result is sparse
    on all ranks. The first bucket ends with ``flags`` and ``drift``: see Note [Control
    flags] in ``rounds``. Ranks that train set flags to 1, except ``odd_flags``; joined
    ranks set them to 0.

    ``prescale`` multiplies the values in their sum, if backward writes gradients into
    the bucket; it is None if they are scaled when copied in. ``is_launched`` is True if
    the sum is started, or not needed in this round.

    Results are views of the bucket. If a program keeps one beyond the step, the next
    round uses other, private memory.
    """

    def __init__(
        self,
        plan: BucketPlan,
        gradients: Sequence[Gradient],
        communicator: Communicator,
        num_flags: int,
    ) -> None:
        self.slots = plan.slots
        self.gradients = [gradients[slot.index] for slot in plan.slots]
        # Strided as autograd would make gradients, such as channels_last: optimizers
        # are fast if the strides of parameter and gradient are equal.
        likes = [torch.empty_like(g.parameter, device="meta") for g in self.gradients]
        self._layouts = [(like.shape, like.stride()) for like in likes]
        dtype, device = cast("tuple[torch.dtype, torch.device]", plan.kind)
        self._num_values = plan.numel
        self._end = plan.numel + len(self.gradients)
        self._drift = self._end + num_flags
        numel = self._drift + (NUM_FLAGS if num_flags else 0)
        shared = communicator.allocate(numel, dtype, device)
        self._shared, self._num_shared_uses = shared, _num_uses(shared)
        self._use(shared, self._num_shared_uses)
        self._is_scaled = any(gradient.is_fusible for gradient in self.gradients)
        self.prescale: float | None = None
        self.odd_flags: Sequence[int] = ()
        self.num_pending = 0  # gradients that have not arrived
        self.is_launched = False
        self.works: Iterable[Work[Any]] = ()  # the next stage of the sum waits for them
        self._sum: Sum | None = None
        self._stage = 0

    def _use(self, memory: Tensor, num_uses: int) -> None:
        self.memory, self.control = memory, memory[self._num_values :]
        self.values, self.all_flags = memory[: self._num_values], memory[self._end :]
        self.flags, self.drift = memory[self._end : self._drift], memory[self._drift :]
        self._ones = memory[self._num_values : self._drift]
        self._views = [
            self.values[slot.offset : slot.offset + slot.numel].as_strided(*layout)
            for slot, layout in zip(self.slots, self._layouts, strict=True)
        ]
        self._num_own_uses = num_uses + 6 + len(self._views)

    def adopt(self) -> None:
        """Assign the gradients to this bucket, and move their values into it."""
        for gradient, view in zip(self.gradients, self._views, strict=True):
            if not gradient.is_planned:
                continue
            old, grad = gradient.view, gradient.parameter.grad
            gradient.view = view
            gradient.is_scaled_in_sum = self._is_scaled
            if old is None or grad is None or grad.is_sparse:
                continue
            if grad.is_set_to(old):
                grad.data = view.copy_(old)  # also for other references to it

    def open(self) -> None:
        """Prepare for a round, in which all trained gradients are pending."""
        self._choose_memory()
        self.num_pending = 0
        for gradient in self.gradients:
            gradient.was_used = gradient.was_sparse = gradient.is_written = False
            gradient.is_open = gradient.parameter.requires_grad
            self.num_pending += gradient.parameter.requires_grad
        # Frozen gradients are not reduced, but the first bucket is, for its flags.
        self.is_launched = self.num_pending == 0 and self.flags.numel() == 0

    def _choose_memory(self) -> None:
        """Use other memory if the program has kept a result of an earlier round."""
        is_shared = self.memory is self._shared
        num_others = _num_uses(self.memory) - self._num_own_uses
        if num_others or not is_shared:
            # A gradient that was not reset does not count as kept.
            grads = [(g, g.parameter.grad) for g in self.gradients]
            num_others -= sum(d is not None and g.is_result(d) for g, d in grads)
        if not is_shared and _num_uses(self._shared) == self._num_shared_uses:
            self._use(self._shared, self._num_shared_uses)
        elif num_others > 0:
            own = torch.zeros_like(self.memory)
            self._use(own, _num_uses(own))
        else:
            return
        self.adopt()

    def fill(self, scaling: Scaling) -> None:
        self.is_launched = True
        self._ones.fill_(1)
        for slot, gradient in enumerate(self.gradients):
            grad = gradient.parameter.grad
            if grad is not None and not gradient.is_result_of_sibling(grad):
                gradient.copy_in(scaling)
            gradient.num_passes = 0
            gradient.is_open = False
            if gradient.is_written:
                raise UsageError(
                    "synchronize() was called during backward(), while it computed "
                    f"{gradient.name}. Call it after backward()."
                )
            if not gradient.was_used:
                self._views[slot].zero_()
                self.control[slot] = 0
            elif gradient.was_sparse:
                self.control[slot] = _SPARSE * scaling.size

    def fill_with_zeros(self) -> None:
        self.is_launched = True
        for gradient in self.gradients:
            gradient.is_open = False
        self.memory.zero_()

    def start(self, total: Sum, scaling: Scaling, *, odd: int = 0) -> None:
        for flag in self.odd_flags:
            self.flags[flag] = odd
        self.prescale = scaling.before if self._is_scaled else None
        self._sum, self._stage = total, 0
        self.works = next(total)

    def go_to(self, stage: int) -> None:
        """Advance the current sum, if there is one, to a stage."""
        while self._sum is not None and self._stage < stage:
            self._stage += 1
            self.works = next(self._sum, ())
        if stage == OVER:
            self._sum = None

    def drop(self) -> None:
        self._sum, self.works = None, ()

    def count(self, flag: int) -> int:
        return round(float(self.flags[flag].real))

    def finish(self, scaling: Scaling, keep: Callable[[], float]) -> bool:
        """Assign results to ``grad``; return True if backward has added gradients.

        ``keep`` returns the factor for a result that enters the next round.
        """
        if self._sum is None:
            return False
        self.go_to(OVER)
        if scaling.after != 1.0:
            self.values.mul_(scaling.after)
        # Read only if this rank did not have all gradients, as reading synchronises
        # with an accelerator.
        used: list[float] | None = None
        if not all(gradient.was_used for gradient in self.gradients):
            used = cast("list[float]", self.control.real.tolist())
        # Half of the number for sparse, so that rounding by compression is harmless.
        sparse_from = _SPARSE // 2 * scaling.size
        is_late = False
        for slot, gradient in enumerate(self.gradients):
            view, late = self._views[slot], gradient.parameter.grad
            if gradient.view is not view:
                continue  # the parameter has changed, and will be planned anew
            if late is not None and gradient.is_result_of_sibling(late):
                continue
            if late is not None:
                view.mul_(keep()).add_(_dense(late))
                is_late = True
            gradient.is_reduced = late is None
            if late is not None or used is None or used[slot]:
                is_sparse = gradient.was_sparse
                is_sparse |= used is not None and used[slot] > sparse_from
                # Autograd does not treat ``data`` as a view.
                gradient.assign_grad(view.to_sparse(1) if is_sparse else view.data)
        return is_late


def reduce_sparse(
    gradients: Sequence[Gradient], scaling: Scaling, group: ReducerGroup
) -> Steps[None]:
    """Gather the entries of sparse gradients; collective.

    A result has the entries of all ranks in rank order, not coalesced. A gradient that
    no rank has stays None.
    """
    trained = [g for g in gradients if g.parameter.requires_grad]
    if not trained:
        return
    own = [_own(gradient, scaling) for gradient in trained]

    def gather() -> list[list[Tensor]]:
        all_gather = group.communicator.all_gather
        works = [[all_gather(part) for part in each] for each in own]
        return [[work.wait() for work in each] for each in works]

    gathered = yield from run_blocking(group.waits, gather)
    for gradient, (positions, entries) in zip(trained, gathered, strict=True):
        if not gradient.is_planned:
            continue
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


def _own(gradient: Gradient, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Return this rank's sparse indices, one row per entry, and the scaled entries."""
    grad = gradient.parameter.grad
    if grad is None or not gradient.is_planned:
        return no_entries(gradient)
    grad = grad.detach()
    if not grad.is_sparse:
        grad = grad.to_sparse(gradient.sparse_dims)
    grad = grad.coalesce()
    entries = grad.values() * gradient.factor(scaling)
    return grad.indices().t().contiguous(), entries


def no_entries(gradient: Gradient) -> tuple[Tensor, Tensor]:
    parameter, dims = gradient.parameter, gradient.sparse_dims
    positions = torch.empty((0, dims), dtype=torch.int64, device=parameter.device)
    return positions, parameter.detach().new_empty((0, *parameter.shape[dims:]))
