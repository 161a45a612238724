"""Reductions, as steps between meetings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ronde.collectives.arithmetic import dense, scale_
from ronde.collectives.communicator import rows
from ronde.collectives.engines.shared_memory.combining import Combiner
from ronde.collectives.engines.shared_memory.executor import Steps
from ronde.collectives.engines.shared_memory.ground import Call, Ground
from ronde.collectives.engines.shared_memory.stage import (
    SLOT_BYTES,
    is_same_region,
    offset_of,
)

_WHOLE_BYTES = 32 << 10
"""Up to here every rank reduces everything: a meeting costs more."""
_PIECE_BYTES = 256 << 10
_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Reduction:
    """What is asked for.

    Attributes:
        call: What must be equal on all ranks.
        prescale: Multiplies this rank's input.
        combiner: Combines the ranks' elements and scales the result.
    """

    call: Call
    prescale: float
    combiner: Combiner


def all_reduce(
    ground: Ground, tensor: Tensor, flat: Tensor, what: Reduction
) -> Steps[Tensor]:
    """Reduce ``flat``, which holds the elements of ``tensor``, and put them back."""
    if flat.numel() * flat.element_size() <= _WHOLE_BYTES:
        yield from _reduce_small(ground, flat, what)
    else:
        yield from _reduce_large(ground, flat, what)
    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def _reduce_small(ground: Ground, flat: Tensor, what: Reduction) -> Steps[None]:
    """Show all ranks everything; each reduces all of it."""
    turn = ground.announce(what.call)
    slot = ground.stage.take()
    _stage(ground, slot, flat, what.prescale)
    yield
    if not ground.is_agreed(turn, what.call):
        yield from ground.refuse(what.call)
    views = ground.stage.views(slot, flat.dtype, flat.numel())
    what.combiner.combine(views, flat)


def _reduce_large(ground: Ground, flat: Tensor, what: Reduction) -> Steps[None]:
    location = ground.locate(flat)
    slot = ground.stage.take()
    if location:
        scale_(flat, what.prescale)
        what = replace(what, prescale=1.0)
    else:
        _stage(ground, slot, flat[: SLOT_BYTES // flat.element_size()], what.prescale)
    turn = ground.announce(what.call, location)
    yield
    if not ground.is_agreed(turn, what.call):
        yield from ground.refuse(what.call)
    locations = ground.locations(turn)
    if is_same_region(locations):
        _reduce_in_place(ground, flat, what, locations)
        yield
        return
    # What was shown already is of use if all ranks have shown something.
    shown = -1 if any(locations) else slot
    reduce = _reduce_by_pairs if ground.size == 2 else _reduce_by_shares
    yield from reduce(ground, flat, what, shown)


def _stage(
    ground: Ground, slot: int, piece: Tensor, prescale: float, offset: int = 0
) -> None:
    """Copy a piece into this rank's slot."""
    target = ground.stage.views(slot, piece.dtype, piece.numel(), offset)[ground.rank]
    target.copy_(piece)
    if prescale != 1.0:
        scale_(target, prescale)


def _reduce_in_place(
    ground: Ground, flat: Tensor, what: Reduction, locations: Sequence[int]
) -> None:
    """Reduce this rank's share of all ranks' tensors where they lie."""
    region = ground.heap.region(locations[ground.rank])
    first, last = share(flat.numel(), flat.element_size(), ground.size, ground.rank)
    step = _PIECE_BYTES // flat.element_size()
    key = (*locations, flat.dtype, flat.numel())
    columns = region.plans.get(key)
    if columns is None:
        tensors = _tensors(ground, flat, locations)
        columns = [_pieces(tensor[first:last], step) for tensor in tensors]
        # Kept, this rank's own part would keep its region from ever being given back.
        columns[ground.rank] = ()
        region.plans[key] = columns
    columns = list(columns)
    columns[ground.rank] = _pieces(flat[first:last], step)
    for pieces in zip(*columns, strict=True):
        what.combiner.combine(pieces, pieces[0])
        for piece in pieces[1:]:
            piece.copy_(pieces[0])


def _pieces(flat: Tensor, step: int) -> tuple[Tensor, ...]:
    return tuple(torch.split(flat, step))


def _reduce_by_pairs(
    ground: Ground, flat: Tensor, what: Reduction, shown: int
) -> Steps[None]:
    """Show the other rank one slot after the other; both reduce each.

    Args:
        ground: All ranks' memory.
        flat: The elements.
        what: The reduction.
        shown: The slot that has the first of them already, or -1.
    """
    stage, step = ground.stage, SLOT_BYTES // flat.element_size()
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        if start or shown < 0:
            shown = stage.take()
            _stage(ground, shown, piece, what.prescale)
            yield
        what.combiner.combine(stage.views(shown, flat.dtype, piece.numel()), piece)


def _reduce_by_shares(
    ground: Ground, flat: Tensor, what: Reduction, shown: int
) -> Steps[None]:
    """Show the others one slot after the other; each rank reduces its share of it.

    The arguments are those of ``_reduce_by_pairs``.
    """
    stage, dtype, itemsize = ground.stage, flat.dtype, flat.element_size()
    step = SLOT_BYTES // itemsize
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        if start or shown < 0:
            shown = stage.take()
            _stage(ground, shown, piece, what.prescale)
            yield
        shares = [
            share(piece.numel(), itemsize, ground.size, rank)
            for rank in range(ground.size)
        ]
        first, last = shares[ground.rank]
        if last > first:
            views = stage.views(shown, dtype, last - first, first * itemsize)
            what.combiner.combine(views, views[ground.rank])
        yield
        for rank, (first, last) in enumerate(shares):
            if last > first:
                views = stage.views(shown, dtype, last - first, first * itemsize)
                piece[first:last].copy_(views[rank])


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
    location = 0 if what.prescale != 1.0 else ground.locate(flat)
    turn = ground.announce(what.call, location)
    yield
    if not ground.is_agreed(turn, what.call):
        yield from ground.refuse(what.call)
    locations = ground.locations(turn)
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
    room = SLOT_BYTES // ground.size // _LINE_BYTES * _LINE_BYTES
    step = room // flat.element_size()
    for start in range(0, max(counts), step):
        slot = ground.stage.take()
        for to, part in enumerate(parts):
            piece = part[start : start + step]
            if piece.numel():
                _stage(ground, slot, piece, what.prescale, to * room)
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
    """Return all ranks' tensors where they lie; ``flat`` is this rank's."""
    region = ground.heap.region(locations[ground.rank])
    return [
        flat
        if rank == ground.rank
        else region.view(rank, offset_of(location), flat.dtype, flat.numel())
        for rank, location in enumerate(locations)
    ]


def share(numel: int, itemsize: int, size: int, rank: int) -> tuple[int, int]:
    """Return first and end of the elements that ``rank`` reduces, in whole lines."""
    line = max(1, _LINE_BYTES // itemsize)
    num_lines = -(-numel // line)
    counts = rows(num_lines, size)
    first = sum(counts[:rank]) * line
    return min(first, numel), min(first + counts[rank] * line, numel)
