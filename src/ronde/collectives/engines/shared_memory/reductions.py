"""Reductions, as steps between phases."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ronde.collectives.arithmetic import HALVES, reduce_stack, scale_
from ronde.collectives.engine import ReduceOp, Reduction
from ronde.collectives.engines.shared_memory.progress import Steps
from ronde.collectives.engines.shared_memory.shared_state import (
    Call,
    Pieces,
    SharedState,
    is_same_region,
)
from ronde.collectives.shapes import rows

Kernel = Callable[..., Tensor]
_KERNELS: dict[ReduceOp, Kernel] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVERAGE: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}
_FLOATS = frozenset({torch.float32, torch.float64})
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})


class Scratch:
    """Memory for sums of 16-bit floats, for one at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32, device="cpu")

    def take(self, numel: int) -> Tensor:
        """Return ``numel`` elements of any value."""
        if self._memory.numel() < numel:
            with torch.inference_mode(mode=False):
                self._memory = torch.empty(numel, dtype=torch.float32, device="cpu")
        return self._memory[:numel]


class ReduceKernel:
    """One reduction of one dtype over a fixed number of ranks.

    The ranks' elements are taken in rank order, so every rank that combines the same
    elements gets the same bits. 16-bit floats are rounded once.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        op: ReduceOp,
        size: int,
        postscale: float,
        scratch: Scratch,
    ) -> None:
        self._op = op
        self._size = size
        self._postscale = postscale
        self._kernel = _KERNELS[op]
        self._divisor = size if op is ReduceOp.AVERAGE else 1
        self._scratch = scratch
        if dtype in _FLOATS or (dtype in _INTEGERS and op is not ReduceOp.AVERAGE):
            is_plain = size == 2 and self._divisor == 1 and postscale == 1.0
            self.combine = self._combine_two if is_plain else self._combine_directly
        elif dtype in HALVES:
            self.combine = self._combine_widened
        else:
            self.combine = self._combine_stacked

    combine: Callable[[Sequence[Tensor], Tensor], None]
    """Combine one flat tensor a rank into ``out``, which may be one of them."""

    def _combine_two(self, sources: Sequence[Tensor], out: Tensor) -> None:
        self._kernel(sources[0], sources[1], out=out)

    def _combine_directly(self, sources: Sequence[Tensor], out: Tensor) -> None:
        kernel = self._kernel
        if self._size > 2:
            address = out.data_ptr()
            if any(source.data_ptr() == address for source in sources[2:]):
                # It would be overwritten before its turn.
                sources = [s.clone() if s.data_ptr() == address else s for s in sources]
        kernel(sources[0], sources[1], out=out)
        for source in sources[2:]:
            kernel(out, source, out=out)
        if self._divisor != 1:
            out.div_(self._divisor)
        if self._postscale != 1.0:
            scale_(out, self._postscale)

    def _combine_widened(self, sources: Sequence[Tensor], out: Tensor) -> None:
        wide = self._scratch.take(out.numel())
        kernel = self._kernel
        wide.copy_(sources[0])
        for source in sources[1:]:
            kernel(wide, source, out=wide)
        if self._divisor != 1:
            wide.div_(self._divisor)
        if self._postscale != 1.0:
            wide.mul_(self._postscale)
        out.copy_(wide)

    def _combine_stacked(self, sources: Sequence[Tensor], out: Tensor) -> None:
        # By bytes: torch stacks not every dtype.
        stack = torch.stack([source.view(torch.uint8) for source in sources])
        out.copy_(reduce_stack(stack.view(out.dtype), self._op, self._postscale))


WHOLE_BYTES = 4 << 10
"""Up to here every rank reduces everything: a meeting costs more."""
_PIECE_BYTES = 512 << 10
_LINE_BYTES = 64
_MAX_KNOWN = 1024


@dataclass(frozen=True, slots=True)
class KnownReduction:
    """A reduction of vectors of one length and dtype.

    Attributes:
        call: What must be equal on all ranks.
        prescale: Multiplies this rank's input.
        kernel: Combines the ranks' elements and scales the result.
        is_small: Every rank had better reduce everything.
    """

    call: Call
    prescale: float
    kernel: ReduceKernel
    is_small: bool


class KnownReductions:
    """The reductions that were asked for before: most calls come again."""

    def __init__(self, size: int) -> None:
        self._size = size
        # Equal reductions of one dtype are one object: see ``Reduction``.
        self._known: dict[tuple[Reduction, int], KnownReduction] = {}
        self._scratch = Scratch()

    def find(self, name: str, vector: Tensor, what: Reduction) -> KnownReduction:
        """Return what is to be done to such vectors."""
        numel = vector.numel()
        key = (what, numel)
        known = self._known.get(key)
        if known is None:
            dtype = vector.dtype
            call = Call(name, str(dtype), numel, f" by {what.op}")
            kernel = ReduceKernel(
                dtype, what.op, self._size, what.postscale, self._scratch
            )
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            is_small = numel * vector.element_size() <= WHOLE_BYTES
            known = KnownReduction(call, what.prescale, kernel, is_small)
            self._known[key] = known
        return known


def all_reduce(
    state: SharedState, source: Tensor, out: Tensor, what: KnownReduction
) -> Steps[None]:
    """Reduce ``source``, this rank's elements, into ``out``, which may be the same."""
    reduce = _reduce_small if what.is_small else _reduce_large
    return reduce(state, source, out, what)


def _reduce_small(
    state: SharedState, source: Tensor, flat: Tensor, what: KnownReduction
) -> Steps[None]:
    """Show all ranks everything; each reduces all of it.

    This is written for the time it takes: a few microseconds in all.
    """
    wanted = what.call.signature
    views = state.staging.views(state.staging.take(), flat.dtype, flat.numel())
    own = views[state.rank]
    own.copy_(source)
    if what.prescale != 1.0:
        scale_(own, what.prescale)
    turn = state.announce(wanted)
    yield
    if state.locations(turn, wanted) is None:
        raise (yield from state.mismatch(what.call))
    what.kernel.combine(views, flat)


def _reduce_large(
    state: SharedState, source: Tensor, flat: Tensor, what: KnownReduction
) -> Steps[None]:
    wanted = what.call.signature
    location = state.heap.locate(flat) if source is flat else 0
    slot = state.staging.take()
    prescale, views, is_shown = what.prescale, [], False
    if not location:
        step = state.staging.slot_bytes // flat.element_size()
        is_shown = flat.numel() <= step
        views = _show(state, slot, source if is_shown else source[:step], prescale)
    turn = state.announce(wanted, location)
    yield
    locations = state.locations(turn, wanted)
    if locations is None:
        raise (yield from state.mismatch(what.call))
    plan = state.heap.plans.get((wanted, *locations))
    if plan is None and is_same_region(locations):
        plan = _plan(state, flat, what, locations)
    if plan is not None:
        _reduce_in_place(state, what, plan)
        yield
        return
    # What was shown already is of use if all ranks have shown something.
    is_of_use = not any(locations)
    if is_of_use and is_shown and state.size == 2:
        what.kernel.combine(views, flat)
    else:
        reduce = _reduce_by_pairs if state.size == 2 else _reduce_by_shares
        shown = slot if is_of_use else -1
        lane = _Vectors(source, flat, what.kernel, prescale)
        yield from reduce(state, lane, shown)


def _show(
    state: SharedState, slot: int, piece: Tensor, prescale: float, offset: int = 0
) -> list[Tensor]:
    """Copy a piece into this rank's slot; return all ranks' pieces."""
    views = state.staging.views(slot, piece.dtype, piece.numel(), offset)
    own = views[state.rank]
    own.copy_(piece)
    if prescale != 1.0:
        scale_(own, prescale)
    return views


def _reduce_in_place(
    state: SharedState, what: KnownReduction, plan: list[Pieces]
) -> None:
    """Reduce this rank's share of all ranks' tensors where they lie."""
    # One's own is the nearest, and two can be combined in place of either.
    at = state.rank if state.size == 2 else 0
    for pieces in plan:
        if what.prescale != 1.0:
            for piece in pieces:
                scale_(piece, what.prescale)
        result = pieces[at]
        what.kernel.combine(pieces, result)
        for piece in pieces:
            if piece is not result:
                piece.copy_(result)
    # The next time the other way round: what came last is still in the cache.
    plan.reverse()


def _plan(
    state: SharedState, flat: Tensor, what: KnownReduction, locations: Sequence[int]
) -> list[Pieces]:
    """Cut this rank's share of all ranks' tensors into pieces that a cache holds."""
    itemsize = flat.element_size()
    first, last = share(flat.numel(), itemsize, state.size, state.rank)
    step = _PIECE_BYTES // itemsize
    tensors = _tensors(state, flat, locations)
    columns = [torch.split(tensor[first:last], step) for tensor in tensors]
    plan = list(zip(*columns, strict=True))
    key = (what.call.signature, *locations)
    state.heap.plans.put(key, plan, len(plan) * state.size)
    return plan


@dataclass(frozen=True, slots=True)
class _Vectors:
    """Elements on their way through the slots.

    Attributes:
        source: This rank's.
        target: Takes the result; may be ``source`` itself.
        kernel: Combines the ranks'.
        prescale: Multiplies this rank's.
    """

    source: Tensor
    target: Tensor
    kernel: ReduceKernel
    prescale: float


def _reduce_by_pairs(state: SharedState, lane: _Vectors, shown: int) -> Steps[None]:
    """Show the other rank one slot after the other; both reduce each.

    Args:
        state: All ranks' memory.
        lane: The elements.
        shown: The slot that has the first of them already, or -1.
    """
    staging, rank, dtype = state.staging, state.rank, lane.target.dtype
    step = state.staging.slot_bytes // lane.target.element_size()
    pieces = zip(
        torch.split(lane.source, step), torch.split(lane.target, step), strict=True
    )
    for piece, target in pieces:
        if shown < 0:
            views = _show(state, staging.take(), piece, lane.prescale)
            yield
        else:
            views = staging.views(shown, dtype, piece.numel())
            shown = -1
        if lane.prescale == 1.0:
            # The piece itself is nearer than what was shown of it.
            views = (piece, views[1]) if rank == 0 else (views[0], piece)
        lane.kernel.combine(views, target)


def _reduce_by_shares(state: SharedState, lane: _Vectors, shown: int) -> Steps[None]:
    """Show the others one slot after the other; each rank reduces its share of it.

    The arguments are those of ``_reduce_by_pairs``.
    """
    dtype, itemsize = lane.target.dtype, lane.target.element_size()
    staging = state.staging
    step = staging.slot_bytes // itemsize
    for start in range(0, lane.target.numel(), step):
        target = lane.target[start : start + step]
        if start or shown < 0:
            shown = staging.take()
            _show(state, shown, lane.source[start : start + step], lane.prescale)
            yield
        shares = [
            share(target.numel(), itemsize, state.size, rank)
            for rank in range(state.size)
        ]
        first, last = shares[state.rank]
        if last > first:
            views = staging.views(shown, dtype, last - first, first * itemsize)
            lane.kernel.combine(views, views[state.rank])
        yield
        for rank, (first, last) in enumerate(shares):
            if last > first:
                views = staging.views(shown, dtype, last - first, first * itemsize)
                target[first:last].copy_(views[rank])


def reduce_scatter(
    state: SharedState,
    flat: Tensor,
    out: Tensor,
    counts: Sequence[int],
    what: KnownReduction,
) -> Steps[None]:
    """Reduce ``counts[r]`` elements of ``flat`` for each rank r; see ``Engine``."""
    start = sum(counts[: state.rank])
    # Scaling where it lies would change the caller's tensor.
    location = 0 if what.prescale != 1.0 else state.heap.locate(flat)
    turn = state.announce(what.call.signature, location)
    yield
    locations = state.locations(turn, what.call.signature)
    if locations is None:
        raise (yield from state.mismatch(what.call))
    if is_same_region(locations):
        _reduce_part(state, flat, out, start, what, locations)
        yield
    else:
        yield from _reduce_shown(state, flat, out, counts, what)


def _reduce_shown(
    state: SharedState,
    flat: Tensor,
    out: Tensor,
    counts: Sequence[int],
    what: KnownReduction,
) -> Steps[None]:
    """Show all ranks their parts, one slot after the other."""
    parts = torch.split(flat, list(counts))
    room = state.staging.slot_bytes // state.size // _LINE_BYTES * _LINE_BYTES
    step = room // flat.element_size()
    for start in range(0, max(counts), step):
        slot = state.staging.take()
        for to, part in enumerate(parts):
            piece = part[start : start + step]
            if piece.numel():
                _show(state, slot, piece, what.prescale, to * room)
        yield
        target = out[start : start + step]
        if target.numel():
            at = state.rank * room
            views = state.staging.views(slot, flat.dtype, target.numel(), at)
            what.kernel.combine(views, target)


def _reduce_part(
    state: SharedState,
    flat: Tensor,
    out: Tensor,
    start: int,
    what: KnownReduction,
    locations: Sequence[int],
) -> None:
    """Reduce from where all ranks' tensors lie."""
    tensors = _tensors(state, flat, locations)
    step = max(1, _PIECE_BYTES // flat.element_size())
    for done in range(0, out.numel(), step):
        target = out[done : done + step]
        first = start + done
        pieces = [tensor[first : first + target.numel()] for tensor in tensors]
        what.kernel.combine(pieces, target)


def _tensors(
    state: SharedState, flat: Tensor, locations: Sequence[int]
) -> list[Tensor]:
    """Return all ranks' tensors where they lie; ``flat`` is like them."""
    return [
        state.heap.view(rank, location, flat.dtype, flat.numel())
        for rank, location in enumerate(locations)
    ]


def share(numel: int, itemsize: int, size: int, rank: int) -> tuple[int, int]:
    """Return first and end of the elements that ``rank`` reduces, in whole lines."""
    line = max(1, _LINE_BYTES // itemsize)
    num_lines = -(-numel // line)
    counts = rows(num_lines, size)
    first = sum(counts[:rank]) * line
    return min(first, numel), min(first + counts[rank] * line, numel)
