"""Moving bytes, as steps between phases."""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from ronde.collectives.engine import PlaceExchange, PlaceRows, Plan
from ronde.collectives.engines.shared_memory.progress import Steps
from ronde.collectives.engines.shared_memory.shared_state import (
    Call,
    SharedState,
    is_same_region,
)
from ronde.collectives.shapes import (
    LAYOUT_BYTES,
    Layout,
    LayoutSummary,
    as_rows,
    disagreement,
    do_fit,
)

_LINE_BYTES = 64
_DIRECT_BYTES = 4 << 10
"""From here on one phase more costs less than a copy."""
_BYTE = torch.uint8
_EXCHANGE = Call.of("all_gather or all_to_all")
_BARRIER = Call.of("barrier")


def barrier(state: SharedState) -> Steps[None]:
    yield from state.synchronize(_BARRIER)


def broadcast(state: SharedState, elements: Tensor, root: int) -> Steps[None]:
    call = Call.of("broadcast", elements.dtype, elements.numel(), f" from {root}")
    data = elements.view(_BYTE)
    is_root = state.rank == root
    location = _locate(state, data)
    room = state.staging.slot_bytes
    slot = state.staging.take()
    if is_root and not location:
        _show(state, slot, data[:room])
    locations = yield from state.synchronize(call, location)
    if is_same_region(locations):
        if not is_root:
            data.copy_(state.heap.view(root, locations[root], _BYTE, data.numel()))
        yield
        return
    for start in range(0, data.numel(), room):
        piece = data[start : start + room]
        if start or locations[root]:
            slot = state.staging.take()
            if is_root:
                _show(state, slot, piece)
            yield
        if not is_root:
            piece.copy_(state.staging.views(slot, _BYTE, piece.numel())[root])


def refuse(state: SharedState, layout: Layout) -> Steps[None]:
    """Inform the others that this rank's arguments are wrong; raises on all ranks."""
    state.staging.take()
    yield from _exchange_layouts(state, layout, 0)


def gather_rows(
    state: SharedState, layout: Layout, data: Tensor, row_bytes: int, place: PlaceRows
) -> Steps[None]:
    """Concatenate every rank's rows; the first of them travel with the shapes."""
    location, slot = _locate(state, data), state.staging.take()
    if not location:
        _show(state, slot, data)
    layouts, locations = yield from _exchange_layouts(state, layout, location)
    counts = [each.num_rows * row_bytes for each in layouts]
    parts = place(layouts).split_with_sizes(counts)
    yield from _gather(state, data, parts, locations, slot)


def all_gather(
    state: SharedState, own: Tensor, out: Tensor, counts: Sequence[int]
) -> Steps[None]:
    location, slot = _locate(state, own), state.staging.take()
    if not location:
        _show(state, slot, own)
    call = Call.of("all_gather", _BYTE, out.numel())
    locations = yield from state.synchronize(call, location)
    parts = out.split_with_sizes(list(counts))
    yield from _gather(state, own, parts, locations, slot)


def _gather(
    state: SharedState,
    data: Tensor,
    parts: Sequence[Tensor],
    locations: Sequence[int],
    slot: int,
) -> Steps[None]:
    """Copy all ranks' bytes into ``parts``; ``data`` may lie in its part already.

    ``slot`` has the first bytes where no rank has a location.
    """
    own = parts[state.rank]
    if own.data_ptr() != data.data_ptr():
        own.copy_(data)
    if is_same_region(locations):
        for rank, part in enumerate(parts):
            if rank != state.rank:
                part.copy_(state.heap.view(rank, locations[rank], _BYTE, part.numel()))
        yield
        return
    room = state.staging.slot_bytes
    is_shown = not any(locations)
    for start in range(0, max([part.numel() for part in parts]), room):
        if start or not is_shown:
            slot = state.staging.take()
            _show(state, slot, data[start:])
            yield
        _copy_shown(state, slot, 0, parts, start, room)


def exchange_rows(
    state: SharedState,
    layout: Layout,
    data: Tensor,
    splits: Sequence[int],
    row_bytes: int,
    place: PlaceExchange,
) -> Steps[None]:
    """Send every rank its rows; the splits travel with the shapes."""
    location, slot = _locate(state, data), state.staging.take()
    _show(state, slot, torch.tensor(splits, device="cpu").view(_BYTE))
    layouts, locations = yield from _exchange_layouts(state, layout, location)
    plan = as_rows(torch.stack(state.staging.views(slot, torch.int64, state.size)))
    result = place(layouts, plan)
    sizes = [[count * row_bytes for count in row] for row in plan]
    yield from _send_to_all(state, data, result, sizes, locations)


def _send_to_all(
    state: SharedState,
    data: Tensor,
    result: Tensor,
    plan: Plan,
    locations: Sequence[int],
) -> Steps[None]:
    """Copy ``plan[r][s]`` bytes from each rank r to each rank s."""
    own = state.rank
    parts = torch.split(result, [row[own] for row in plan])
    pieces = torch.split(data, list(plan[own]))
    parts[own].copy_(pieces[own])
    if is_same_region(locations):
        for rank, part in enumerate(parts):
            if rank != own:
                before = sum(plan[rank][:own])
                location = locations[rank]
                part.copy_(state.heap.view(rank, location, _BYTE, part.numel(), before))
        yield
        return
    room = state.staging.slot_bytes // state.size // _LINE_BYTES * _LINE_BYTES
    for start in range(0, max(map(max, plan)), room):
        slot = state.staging.take()
        for to, piece in enumerate(pieces):
            if to != own:
                _show(state, slot, piece[start : start + room], to * room)
        yield
        _copy_shown(state, slot, own * room, parts, start, room)


def _exchange_layouts(
    state: SharedState, layout: Layout, location: int
) -> Generator[None, None, tuple[Sequence[LayoutSummary], list[int]]]:
    """Return all ranks' layouts, which fit together, and where their tensors are."""
    turn = state.announce(_EXCHANGE.signature, location, layout.summarize())
    yield
    if not state.is_agreed(turn, _EXCHANGE.signature):
        raise (yield from state.mismatch(_EXCHANGE))
    layouts = state.layouts(turn)
    locations = state.locations(turn)
    if not do_fit(layouts):
        slot = state.staging.take()
        _show(state, slot, layout.encode().view(_BYTE))
        yield
        views = state.staging.views(slot, torch.int64, LAYOUT_BYTES // 8)
        raise disagreement([Layout.decode(view) for view in views])
    return layouts, locations


def _show(state: SharedState, slot: int, data: Tensor, offset: int = 0) -> None:
    numel = data.numel()
    if numel > state.staging.slot_bytes:
        numel = state.staging.slot_bytes
        data = data[:numel]
    if numel:
        state.staging.views(slot, _BYTE, numel, offset)[state.rank].copy_(data)


def _copy_shown(
    state: SharedState,
    slot: int,
    offset: int,
    parts: Sequence[Tensor],
    start: int,
    room: int,
) -> None:
    """Copy what the others show at ``offset`` to ``start`` of each one's part."""
    for rank, part in enumerate(parts):
        if rank == state.rank or part.numel() <= start:
            continue
        piece = part if not start and part.numel() <= room else part[start:][:room]
        views = state.staging.views(slot, _BYTE, piece.numel(), offset)
        piece.copy_(views[rank])


def _locate(state: SharedState, data: Tensor) -> int:
    """Return where bytes are that are worth being looked at in their place."""
    return state.heap.locate(data) if data.numel() >= _DIRECT_BYTES else 0
