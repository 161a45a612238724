"""Reductions, as steps between meetings."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ronde.collectives.arithmetic import dense, put_back, require_reducible, scale_
from ronde.collectives.communicator import ReduceOp, rows
from ronde.collectives.engines.shared_memory.combining import Combiner, Scratch
from ronde.collectives.engines.shared_memory.executor import Steps
from ronde.collectives.engines.shared_memory.ground import Call, Ground
from ronde.collectives.engines.shared_memory.stage import (
    Pieces,
    is_same_region,
    offset_of,
)

WHOLE_BYTES = 4 << 10
"""Up to here every rank reduces everything: a meeting costs more."""
_PIECE_BYTES = 512 << 10
_LINE_BYTES = 64
_MAX_KNOWN = 1024


@dataclass(frozen=True, slots=True)
class Reduction:
    """What is asked for.

    Attributes:
        call: What must be equal on all ranks.
        prescale: Multiplies this rank's input.
        combiner: Combines the ranks' elements and scales the result.
        is_small: Every rank had better reduce everything.
    """

    call: Call
    prescale: float
    combiner: Combiner
    is_small: bool


class Asked:
    """The reductions that were asked for before: most calls come again."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: dict[tuple[object, ...], Reduction] = {}
        self._scratch = Scratch()

    def reduction(
        self,
        name: str,
        tensor: Tensor,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> Reduction:
        """Return what is to be done.

        Raises:
            UsageError: It is not defined for the dtype.
        """
        numel = tensor.numel()
        key = (name, tensor.dtype, numel, op, prescale, postscale)
        what = self._known.get(key)
        if what is None:
            require_reducible(tensor.dtype, op, prescale, postscale)
            call = Call(name, str(tensor.dtype), numel, f" by {op}")
            combiner = Combiner(tensor.dtype, op, self._size, postscale, self._scratch)
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            is_small = numel * tensor.element_size() <= WHOLE_BYTES
            what = Reduction(call, prescale, combiner, is_small)
            self._known[key] = what
        return what


def all_reduce(
    ground: Ground, tensor: Tensor, flat: Tensor, source: Tensor, what: Reduction
) -> Steps[Tensor]:
    """Reduce into ``flat``, which has the elements of ``tensor``, and put them back.

    Args:
        ground: All ranks' memory.
        tensor: What is returned.
        flat: Takes the result.
        source: This rank's elements; ``flat`` itself to work in place.
        what: The reduction.
    """
    reduce = _reduce_small if what.is_small else _reduce_large
    return reduce(ground, tensor, flat, source, what)


def _reduce_small(
    ground: Ground, tensor: Tensor, flat: Tensor, source: Tensor, what: Reduction
) -> Steps[Tensor]:
    """Show all ranks everything; each reduces all of it.

    This is written for the time it takes: a few microseconds in all.
    """
    wanted = what.call.signature
    views = ground.stage.views(ground.stage.take(), flat.dtype, flat.numel())
    own = views[ground.rank]
    own.copy_(source)
    if what.prescale != 1.0:
        scale_(own, what.prescale)
    turn = ground.announce(wanted)
    yield
    if ground.meet(turn, wanted) is None:
        raise (yield from ground.refusal(what.call))
    what.combiner.combine(views, flat)
    return tensor if flat is tensor else put_back(flat, tensor)


def _reduce_large(
    ground: Ground, tensor: Tensor, flat: Tensor, source: Tensor, what: Reduction
) -> Steps[Tensor]:
    wanted = what.call.signature
    location = ground.heap.locate(flat) if source is flat else 0
    slot = ground.stage.take()
    prescale, views, is_shown = what.prescale, [], False
    if not location:
        step = ground.stage.slot_bytes // flat.element_size()
        is_shown = flat.numel() <= step
        views = _show(ground, slot, source if is_shown else source[:step], prescale)
    turn = ground.announce(wanted, location)
    yield
    locations = ground.meet(turn, wanted)
    if locations is None:
        raise (yield from ground.refusal(what.call))
    plan = ground.heap.plans.get((wanted, *locations))
    if plan is None and is_same_region(locations):
        plan = _plan(ground, flat, what, locations)
    if plan is not None:
        _reduce_in_place(ground, what, plan)
        yield
        return tensor
    # What was shown already is of use if all ranks have shown something.
    is_of_use = not any(locations)
    if is_of_use and is_shown and ground.size == 2:
        what.combiner.combine(views, flat)
    else:
        reduce = _reduce_by_pairs if ground.size == 2 else _reduce_by_shares
        shown = slot if is_of_use else -1
        lane = Lane(source, flat, what.combiner, prescale)
        yield from reduce(ground, lane, shown)
    return put_back(flat, tensor)


def _show(
    ground: Ground, slot: int, piece: Tensor, prescale: float, offset: int = 0
) -> list[Tensor]:
    """Copy a piece into this rank's slot; return all ranks' pieces."""
    views = ground.stage.views(slot, piece.dtype, piece.numel(), offset)
    own = views[ground.rank]
    own.copy_(piece)
    if prescale != 1.0:
        scale_(own, prescale)
    return views


def _reduce_in_place(ground: Ground, what: Reduction, plan: list[Pieces]) -> None:
    """Reduce this rank's share of all ranks' tensors where they lie."""
    # One's own is the nearest, and two can be combined in place of either.
    at = ground.rank if ground.size == 2 else 0
    for pieces in plan:
        if what.prescale != 1.0:
            for piece in pieces:
                scale_(piece, what.prescale)
        result = pieces[at]
        what.combiner.combine(pieces, result)
        for piece in pieces:
            if piece is not result:
                piece.copy_(result)
    # The next time the other way round: what came last is still in the cache.
    plan.reverse()


def _plan(
    ground: Ground, flat: Tensor, what: Reduction, locations: Sequence[int]
) -> list[Pieces]:
    """Cut this rank's share of all ranks' tensors into pieces that a cache holds."""
    itemsize = flat.element_size()
    first, last = share(flat.numel(), itemsize, ground.size, ground.rank)
    step = _PIECE_BYTES // itemsize
    tensors = _tensors(ground, flat, locations)
    columns = [torch.split(tensor[first:last], step) for tensor in tensors]
    plan = list(zip(*columns, strict=True))
    key = (what.call.signature, *locations)
    ground.heap.plans.put(key, plan, len(plan) * ground.size)
    return plan


@dataclass(frozen=True, slots=True)
class Lane:
    """Elements on their way through the slots.

    Attributes:
        source: This rank's.
        target: Takes the result; may be ``source`` itself.
        combiner: Combines the ranks'.
        prescale: Multiplies this rank's.
    """

    source: Tensor
    target: Tensor
    combiner: Combiner
    prescale: float


def _reduce_by_pairs(ground: Ground, lane: Lane, shown: int) -> Steps[None]:
    """Show the other rank one slot after the other; both reduce each.

    Args:
        ground: All ranks' memory.
        lane: The elements.
        shown: The slot that has the first of them already, or -1.
    """
    stage, rank, dtype = ground.stage, ground.rank, lane.target.dtype
    step = ground.stage.slot_bytes // lane.target.element_size()
    pieces = zip(
        torch.split(lane.source, step), torch.split(lane.target, step), strict=True
    )
    for piece, target in pieces:
        if shown < 0:
            views = _show(ground, stage.take(), piece, lane.prescale)
            yield
        else:
            views = stage.views(shown, dtype, piece.numel())
            shown = -1
        if lane.prescale == 1.0:
            # The piece itself is nearer than what was shown of it.
            views = (piece, views[1]) if rank == 0 else (views[0], piece)
        lane.combiner.combine(views, target)


def _reduce_by_shares(ground: Ground, lane: Lane, shown: int) -> Steps[None]:
    """Show the others one slot after the other; each rank reduces its share of it.

    The arguments are those of ``_reduce_by_pairs``.
    """
    dtype, itemsize = lane.target.dtype, lane.target.element_size()
    stage = ground.stage
    step = stage.slot_bytes // itemsize
    for start in range(0, lane.target.numel(), step):
        target = lane.target[start : start + step]
        if start or shown < 0:
            shown = stage.take()
            _show(ground, shown, lane.source[start : start + step], lane.prescale)
            yield
        shares = [
            share(target.numel(), itemsize, ground.size, rank)
            for rank in range(ground.size)
        ]
        first, last = shares[ground.rank]
        if last > first:
            views = stage.views(shown, dtype, last - first, first * itemsize)
            lane.combiner.combine(views, views[ground.rank])
        yield
        for rank, (first, last) in enumerate(shares):
            if last > first:
                views = stage.views(shown, dtype, last - first, first * itemsize)
                target[first:last].copy_(views[rank])


def reduce_scatter(
    ground: Ground,
    tensor: Tensor,
    num_rows: Sequence[int],
    what: Reduction,
    out: Tensor | None,
) -> Steps[Tensor]:
    """Reduce ``num_rows[r]`` rows for each rank r.

    Args:
        ground: All ranks' memory.
        tensor: The rows of all ranks, one after the other.
        num_rows: How many of them each rank is to get.
        what: The reduction.
        out: Takes the result; it may be this rank's rows of ``tensor``.
    """
    shape = tensor.shape[1:]
    counts = [count * shape.numel() for count in num_rows]
    starts = [sum(counts[:rank]) for rank in range(ground.size)]
    result = out
    if result is None:
        result = tensor.new_empty((num_rows[ground.rank], *shape))
    target = result.detach().view(-1)
    flat = _apart_from(dense(tensor).view(-1), starts[ground.rank], target)
    # Scaling where it lies would change the caller's tensor.
    location = 0 if what.prescale != 1.0 else ground.heap.locate(flat)
    turn = ground.announce(what.call.signature, location)
    yield
    locations = ground.meet(turn, what.call.signature)
    if locations is None:
        raise (yield from ground.refusal(what.call))
    if is_same_region(locations):
        _reduce_part(ground, flat, target, starts[ground.rank], what, locations)
        yield
    else:
        yield from _reduce_shown(ground, flat, target, counts, what)
    return result


def _reduce_shown(
    ground: Ground, flat: Tensor, out: Tensor, counts: Sequence[int], what: Reduction
) -> Steps[None]:
    """Show all ranks their parts, one slot after the other."""
    parts = torch.split(flat, list(counts))
    room = ground.stage.slot_bytes // ground.size // _LINE_BYTES * _LINE_BYTES
    step = room // flat.element_size()
    for start in range(0, max(counts), step):
        slot = ground.stage.take()
        for to, part in enumerate(parts):
            piece = part[start : start + step]
            if piece.numel():
                _show(ground, slot, piece, what.prescale, to * room)
        yield
        target = out[start : start + step]
        if target.numel():
            at = ground.rank * room
            views = ground.stage.views(slot, flat.dtype, target.numel(), at)
            what.combiner.combine(views, target)


def _apart_from(flat: Tensor, start: int, out: Tensor) -> Tensor:
    """Return ``flat``, or a copy where writing ``out`` would spoil others' parts."""
    is_shared = flat.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    if not is_shared or not out.numel():
        return flat
    return flat if flat[start:].data_ptr() == out.data_ptr() else flat.clone()


def _reduce_part(
    ground: Ground,
    flat: Tensor,
    out: Tensor,
    start: int,
    what: Reduction,
    locations: Sequence[int],
) -> None:
    """Reduce from where all ranks' tensors lie."""
    tensors = _tensors(ground, flat, locations)
    step = max(1, _PIECE_BYTES // flat.element_size())
    for done in range(0, out.numel(), step):
        target = out[done : done + step]
        first = start + done
        pieces = [tensor[first : first + target.numel()] for tensor in tensors]
        what.combiner.combine(pieces, target)


def _tensors(ground: Ground, flat: Tensor, locations: Sequence[int]) -> list[Tensor]:
    """Return all ranks' tensors where they lie; ``flat`` is like them."""
    region = ground.heap.region(locations[ground.rank])
    return [
        region.view(rank, offset_of(location), flat.dtype, flat.numel())
        for rank, location in enumerate(locations)
    ]


def share(numel: int, itemsize: int, size: int, rank: int) -> tuple[int, int]:
    """Return first and end of the elements that ``rank`` reduces, in whole lines."""
    line = max(1, _LINE_BYTES // itemsize)
    num_lines = -(-numel // line)
    counts = rows(num_lines, size)
    first = sum(counts[:rank]) * line
    return min(first, numel), min(first + counts[rank] * line, numel)
