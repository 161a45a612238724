"""Moving bytes, as steps between meetings."""

import functools
import struct
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from ronde.collectives.arguments import apart_from
from ronde.collectives.arithmetic import as_bytes, dense, put_back
from ronde.collectives.engines.shared_memory.executor import Steps
from ronde.collectives.engines.shared_memory.ground import Call, Ground
from ronde.collectives.engines.shared_memory.stage import (
    is_same_region,
    offset_of,
)
from ronde.collectives.layouts import (
    NUM_NUMBERS,
    NUM_SUMMARY,
    Layout,
    Summary,
    disagreement,
    do_fit,
    require_out_rows,
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


def barrier(ground: Ground) -> Steps[None]:
    """Meet."""
    turn = ground.announce(_BARRIER.signature)
    yield
    if ground.meet(turn, _BARRIER.signature) is None:
        raise (yield from ground.refusal(_BARRIER))


def broadcast(ground: Ground, tensor: Tensor, root: int, call: Call) -> Steps[Tensor]:
    """Copy ``root``'s elements into everybody's."""
    values = dense(tensor)
    data = as_bytes(values)
    is_root = ground.rank == root
    location = _locate(ground, data)
    slot = ground.stage.take()
    if is_root and not location:
        _show(ground, slot, data[: ground.stage.slot_bytes])
    turn = ground.announce(call.signature, location)
    yield
    locations = ground.meet(turn, call.signature)
    if locations is None:
        raise (yield from ground.refusal(call))
    if is_same_region(locations):
        if not is_root:
            data.copy_(_other(ground, locations, root, data.numel()))
        yield
    else:
        shown = -1 if locations[root] else slot
        yield from _broadcast_staged(ground, data, root, shown)
    return tensor if is_root else put_back(values, tensor)


def _broadcast_staged(
    ground: Ground, data: Tensor, root: int, slot: int
) -> Steps[None]:
    """Show one slot after the other; ``slot`` has the first bytes, or is -1."""
    for start in range(0, data.numel(), ground.stage.slot_bytes):
        piece = data[start : start + ground.stage.slot_bytes]
        if start or slot < 0:
            slot = ground.stage.take()
            if ground.rank == root:
                _show(ground, slot, piece)
            yield
        if ground.rank != root:
            piece.copy_(ground.stage.views(slot, _BYTE, piece.numel())[root])


def refuse(ground: Ground, layout: Layout) -> Steps[None]:
    """Tell the others that this rank's arguments are wrong.

    Raises:
        CollectiveError: Always, as on the other ranks.
    """
    yield from _exchange(ground, layout, ground.stage.take(), 0)


def all_gather(ground: Ground, tensor: Tensor, out: Tensor | None) -> Steps[Tensor]:
    """Concatenate every rank's rows."""
    layout = Layout.of("all_gather", tensor, out)
    own_rows = ground.rank * tensor.shape[0] if tensor.ndim else 0
    data = as_bytes(dense(apart_from(tensor, out, own_rows)))
    location = _locate(ground, data)
    room, slot = ground.stage.slot_bytes - _HEAD_BYTES, ground.stage.take()
    if not location:
        _show(ground, slot, data[:room], _HEAD_BYTES)
    summaries, locations = yield from _exchange(ground, layout, slot, location)
    counts = [each.num_rows for each in summaries]
    require_out_rows(layout.call, summaries, ground.rank, [sum(counts)] * ground.size)
    result = _result(tensor, sum(counts), out)
    row_bytes = _row_bytes(tensor)
    parts = torch.split(as_bytes(result.detach()), [c * row_bytes for c in counts])
    if is_same_region(locations):
        for rank, part in enumerate(parts):
            if rank != ground.rank:
                part.copy_(_other(ground, locations, rank, part.numel()))
            elif part.data_ptr() != data.data_ptr():
                part.copy_(data)
        yield
        return result
    shown = -1 if any(locations) else slot
    for start in range(0, max(part.numel() for part in parts), room):
        if start or shown < 0:
            shown = ground.stage.take()
            _show(ground, shown, data[start : start + room], _HEAD_BYTES)
            yield
        _copy_shown(ground, shown, _HEAD_BYTES, parts, start, room)
    return result


def all_to_all(
    ground: Ground, tensor: Tensor, splits: Sequence[int], out: Tensor | None
) -> Steps[tuple[Tensor, list[int]]]:
    """Exchange rows."""
    layout = Layout.of("all_to_all", tensor, out)
    row_bytes = _row_bytes(tensor)
    source = apart_from(tensor[: sum(splits)], out)
    data = as_bytes(dense(source))
    location = _locate(ground, data)
    slot = ground.stage.take()
    _show(ground, slot, as_bytes(torch.tensor(splits, device="cpu")), _HEAD_BYTES)
    summaries, locations = yield from _exchange(ground, layout, slot, location)
    views = ground.stage.views(slot, torch.int64, ground.size, _HEAD_BYTES)
    plan: list[list[int]] = [view.tolist() for view in views]
    received = [sum(column) for column in zip(*plan, strict=True)]
    require_out_rows(layout.call, summaries, ground.rank, received)
    counts = [row[ground.rank] for row in plan]
    result = _result(tensor, sum(counts), out)
    parts = torch.split(as_bytes(result.detach()), [c * row_bytes for c in counts])
    if is_same_region(locations):
        for rank, part in enumerate(parts):
            before = sum(plan[rank][: ground.rank]) * row_bytes
            if rank == ground.rank:
                part.copy_(data[before : before + part.numel()])
            else:
                part.copy_(_other(ground, locations, rank, part.numel(), before))
        yield
        return result, counts
    room = ground.stage.slot_bytes // ground.size // _LINE_BYTES * _LINE_BYTES
    sent = torch.split(data, [count * row_bytes for count in splits])
    most = max(map(max, plan)) * row_bytes
    for start in range(0, most, room):
        slot = ground.stage.take()
        for to, piece in enumerate(sent):
            _show(ground, slot, piece[start : start + room], to * room)
        yield
        _copy_shown(ground, slot, ground.rank * room, parts, start, room)
    return result, counts


def _exchange(
    ground: Ground, layout: Layout, slot: int, location: int
) -> Generator[None, None, tuple[Sequence[Summary], list[int]]]:
    """Return all ranks' layouts, once they fit together, and where their tensors are.

    Raises:
        CollectiveError: They do not; or ranks were called for other things.
    """
    stage = ground.stage
    _show(ground, slot, _encoded(layout))
    turn = ground.announce(_EXCHANGE.signature, location)
    yield
    locations = ground.meet(turn, _EXCHANGE.signature)
    if locations is None:
        raise (yield from ground.refusal(_EXCHANGE))
    told = stage.views(slot, _BYTE, _SUMMARY.size)
    summaries = _decoded(tuple([view.numpy().tobytes() for view in told]))
    if not do_fit(summaries):
        views = stage.views(slot, torch.int64, NUM_NUMBERS, _LAYOUT_AT)
        raise disagreement([Layout.decode(view) for view in views])
    return summaries, locations


@functools.lru_cache(maxsize=1024)
def _encoded(layout: Layout) -> Tensor:
    """Return what a rank shows of its layout."""
    summary = torch.tensor(layout.summarize(), device="cpu").view(_BYTE)
    padding = torch.zeros(_LAYOUT_AT - _SUMMARY.size, dtype=_BYTE, device="cpu")
    return torch.cat([summary, padding, layout.encode().view(_BYTE)])


@functools.lru_cache(maxsize=256)
def _decoded(told: tuple[bytes, ...]) -> Sequence[Summary]:
    return [Summary(*_SUMMARY.unpack(text)) for text in told]


def _show(ground: Ground, slot: int, piece: Tensor, offset: int = 0) -> None:
    """Copy bytes into this rank's slot."""
    if piece.numel():
        views = ground.stage.views(slot, _BYTE, piece.numel(), offset)
        views[ground.rank].copy_(piece)


def _copy_shown(
    ground: Ground,
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
            views = ground.stage.views(slot, _BYTE, piece.numel(), offset)
            piece.copy_(views[rank])


def _locate(ground: Ground, data: Tensor) -> int:
    """Return where bytes are that are worth being looked at in their place."""
    return ground.heap.locate(data) if data.numel() >= _DIRECT_BYTES else 0


def _other(
    ground: Ground,
    locations: Sequence[int],
    rank: int,
    num_bytes: int,
    start: int = 0,
) -> Tensor:
    """Return another rank's bytes where they lie, from ``start`` on."""
    region = ground.heap.region(locations[rank])
    return region.view(rank, offset_of(locations[rank]) + start, _BYTE, num_bytes)


def _result(tensor: Tensor, num_rows: int, out: Tensor | None) -> Tensor:
    return tensor.new_empty((num_rows, *tensor.shape[1:])) if out is None else out


def _row_bytes(tensor: Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()
