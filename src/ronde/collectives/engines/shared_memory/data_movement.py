"""Moving bytes, as steps between meetings."""

import functools
import struct
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from ronde.collectives.engine import Exchange, Gather
from ronde.collectives.engines.shared_memory.progress import Steps
from ronde.collectives.engines.shared_memory.shared_state import (
    Call,
    SharedState,
    is_same_region,
)
from ronde.collectives.shapes import (
    NUM_NUMBERS,
    NUM_SUMMARY,
    Layout,
    LayoutSummary,
    disagreement,
    do_fit,
)

_LINE_BYTES = 64
_DIRECT_BYTES = 4 << 10
"""From here on one meeting more costs less than a copy."""
_BYTE = torch.uint8
_SUMMARY = struct.Struct(f"={NUM_SUMMARY}q")
_LAYOUT_AT = _LINE_BYTES
"""Behind the summary, in a slot; the splits follow."""
_HEAD_BYTES = _LAYOUT_AT + -(-8 * NUM_NUMBERS // _LINE_BYTES) * _LINE_BYTES
_EXCHANGE = Call("all_gather or all_to_all")
_BARRIER = Call("barrier")


def barrier(state: SharedState) -> Steps[None]:
    """Meet."""
    yield from _meet(state, _BARRIER, 0)


def broadcast(state: SharedState, elements: Tensor, root: int) -> Steps[None]:
    """Copy ``root``'s elements into everybody's."""
    call = _broadcast_call(str(elements.dtype), elements.numel(), root)
    data = elements.view(_BYTE)
    is_root = state.rank == root
    location = _locate(state, data)
    slot = state.staging.take()
    if is_root and not location:
        _show(state, slot, data[: state.staging.slot_bytes])
    locations = yield from _meet(state, call, location)
    if is_same_region(locations):
        if not is_root:
            data.copy_(_other(state, locations, root, data.numel()))
        yield
    else:
        shown = -1 if locations[root] else slot
        yield from _broadcast_staged(state, data, root, shown)


@functools.lru_cache(maxsize=1024)
def _broadcast_call(dtype: str, numel: int, root: int) -> Call:
    return Call("broadcast", dtype, numel, f" from {root}")


def _meet(
    state: SharedState, call: Call, location: int
) -> Generator[None, None, list[int]]:
    """Meet; return where the ranks' tensors lie.

    Raises:
        CollectiveError: Ranks were called for other things.
    """
    turn = state.announce(call.signature, location)
    yield
    locations = state.locations(turn, call.signature)
    if locations is None:
        raise (yield from state.mismatch(call))
    return locations


def _broadcast_staged(
    state: SharedState, data: Tensor, root: int, slot: int
) -> Steps[None]:
    """Show one slot after the other; ``slot`` has the first bytes, or is -1."""
    for start in range(0, data.numel(), state.staging.slot_bytes):
        piece = data[start : start + state.staging.slot_bytes]
        if start or slot < 0:
            slot = state.staging.take()
            if state.rank == root:
                _show(state, slot, piece)
            yield
        if state.rank != root:
            piece.copy_(state.staging.views(slot, _BYTE, piece.numel())[root])


def refuse(state: SharedState, layout: Layout) -> Steps[None]:
    """Tell the others that this rank's arguments are wrong.

    Raises:
        CollectiveError: Always, as on the other ranks.
    """
    yield from _exchange(state, layout, state.staging.take(), 0)


def gather_rows(state: SharedState, what: Gather) -> Steps[None]:
    """Concatenate every rank's rows; the first of them travel with the shapes."""
    location, slot = _locate(state, what.data), state.staging.take()
    if not location:
        room = state.staging.slot_bytes - _HEAD_BYTES
        _show(state, slot, what.data[:room], _HEAD_BYTES)
    summaries, locations = yield from _exchange(state, what.layout, slot, location)
    result = what.place(summaries)
    parts = torch.split(result, [each.num_rows * what.row_bytes for each in summaries])
    yield from _gather(state, what.data, parts, locations, slot, _HEAD_BYTES)


def all_gather(
    state: SharedState, own: Tensor, out: Tensor, counts: Sequence[int]
) -> Steps[None]:
    """Concatenate every rank's bytes, whose numbers are known."""
    location, slot = _locate(state, own), state.staging.take()
    if not location:
        _show(state, slot, own[: state.staging.slot_bytes])
    call = Call("all_gather", "torch.uint8", out.numel())
    locations = yield from _meet(state, call, location)
    parts = torch.split(out, list(counts))
    yield from _gather(state, own, parts, locations, slot, 0)


def _gather(
    state: SharedState,
    data: Tensor,
    parts: Sequence[Tensor],
    locations: Sequence[int],
    slot: int,
    offset: int,
) -> Steps[None]:
    """Copy all ranks' bytes into ``parts``.

    Args:
        state: All ranks' memory.
        data: This rank's; it may lie in its part already.
        parts: One for each rank.
        locations: Where the ranks' bytes lie.
        slot: Has the first bytes, behind ``offset``, where no rank has a location.
        offset: Bytes of every slot that are left free.
    """
    if is_same_region(locations):
        for rank, part in enumerate(parts):
            if rank != state.rank:
                part.copy_(_other(state, locations, rank, part.numel()))
            elif part.data_ptr() != data.data_ptr():
                part.copy_(data)
        yield
        return
    room = state.staging.slot_bytes - offset
    shown = -1 if any(locations) else slot
    for start in range(0, max(part.numel() for part in parts), room):
        if start or shown < 0:
            shown = state.staging.take()
            _show(state, shown, data[start : start + room], offset)
            yield
        _copy_shown(state, shown, offset, parts, start, room)


def exchange_rows(state: SharedState, what: Exchange) -> Steps[None]:
    """Send every rank its rows; the splits travel with the shapes."""
    location, slot = _locate(state, what.data), state.staging.take()
    splits = torch.tensor(what.splits, device="cpu").view(_BYTE)
    _show(state, slot, splits, _HEAD_BYTES)
    summaries, locations = yield from _exchange(state, what.layout, slot, location)
    views = state.staging.views(slot, torch.int64, state.size, _HEAD_BYTES)
    plan: list[list[int]] = [view.tolist() for view in views]
    result = what.place(summaries, plan)
    sizes = [[count * what.row_bytes for count in row] for row in plan]
    yield from _send_to_all(state, what.data, result, sizes, locations)


def all_to_all(
    state: SharedState, sent: Tensor, received: Tensor, plan: Sequence[Sequence[int]]
) -> Steps[None]:
    """Send every rank its bytes, whose numbers are known."""
    location = _locate(state, sent)
    call = Call("all_to_all", "torch.uint8", sum(map(sum, plan)))
    locations = yield from _meet(state, call, location)
    yield from _send_to_all(state, sent, received, plan, locations)


def _send_to_all(
    state: SharedState,
    data: Tensor,
    result: Tensor,
    plan: Sequence[Sequence[int]],
    locations: Sequence[int],
) -> Steps[None]:
    """Copy ``plan[r][s]`` bytes from each rank r to each rank s."""
    own = state.rank
    parts = torch.split(result, [row[own] for row in plan])
    if is_same_region(locations):
        for rank, part in enumerate(parts):
            before = sum(plan[rank][:own])
            if rank == own:
                part.copy_(data[before : before + part.numel()])
            else:
                part.copy_(_other(state, locations, rank, part.numel(), before))
        yield
        return
    room = state.staging.slot_bytes // state.size // _LINE_BYTES * _LINE_BYTES
    pieces = torch.split(data, list(plan[own]))
    for start in range(0, max(map(max, plan)), room):
        slot = state.staging.take()
        for to, piece in enumerate(pieces):
            _show(state, slot, piece[start : start + room], to * room)
        yield
        _copy_shown(state, slot, own * room, parts, start, room)


def _exchange(
    state: SharedState, layout: Layout, slot: int, location: int
) -> Generator[None, None, tuple[Sequence[LayoutSummary], list[int]]]:
    """Return all ranks' layouts, once they fit together, and where their tensors are.

    Raises:
        CollectiveError: They do not; or ranks were called for other things.
    """
    staging = state.staging
    _show(state, slot, _encoded(layout))
    locations = yield from _meet(state, _EXCHANGE, location)
    told = staging.views(slot, _BYTE, _SUMMARY.size)
    summaries = _decoded(tuple([view.numpy().tobytes() for view in told]))
    if not do_fit(summaries):
        views = staging.views(slot, torch.int64, NUM_NUMBERS, _LAYOUT_AT)
        raise disagreement([Layout.decode(view) for view in views])
    return summaries, locations


@functools.lru_cache(maxsize=1024)
def _encoded(layout: Layout) -> Tensor:
    """Return what a rank shows of its layout."""
    summary = torch.tensor(layout.summarize(), device="cpu").view(_BYTE)
    padding = torch.zeros(_LAYOUT_AT - _SUMMARY.size, dtype=_BYTE, device="cpu")
    return torch.cat([summary, padding, layout.encode().view(_BYTE)])


@functools.lru_cache(maxsize=256)
def _decoded(told: tuple[bytes, ...]) -> Sequence[LayoutSummary]:
    return [LayoutSummary(*_SUMMARY.unpack(text)) for text in told]


def _show(state: SharedState, slot: int, piece: Tensor, offset: int = 0) -> None:
    """Copy bytes into this rank's slot."""
    if piece.numel():
        views = state.staging.views(slot, _BYTE, piece.numel(), offset)
        views[state.rank].copy_(piece)


def _copy_shown(
    state: SharedState,
    slot: int,
    offset: int,
    parts: Sequence[Tensor],
    start: int,
    room: int,
) -> None:
    """Copy what the ranks show at ``offset`` to ``start`` of each one's part."""
    for rank, part in enumerate(parts):
        piece = part[start : start + room]
        if piece.numel():
            views = state.staging.views(slot, _BYTE, piece.numel(), offset)
            piece.copy_(views[rank])


def _locate(state: SharedState, data: Tensor) -> int:
    """Return where bytes are that are worth being looked at in their place."""
    return state.heap.locate(data) if data.numel() >= _DIRECT_BYTES else 0


def _other(
    state: SharedState,
    locations: Sequence[int],
    rank: int,
    num_bytes: int,
    start: int = 0,
) -> Tensor:
    """Return another rank's bytes where they lie, from ``start`` on."""
    return state.heap.view(rank, locations[rank], _BYTE, num_bytes, start)
