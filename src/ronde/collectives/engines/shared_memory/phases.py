"""Shared-memory collectives as generators that yield once per phase."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ronde.collectives.arithmetic import HALVES, KERNELS, reduce_stack, scale_
from ronde.collectives.engine import (
    AllocateExchange,
    AllocateRows,
    Plan,
    ReduceOp,
    Reduction,
)
from ronde.collectives.engines.shared_memory.progress import Steps
from ronde.collectives.engines.shared_memory.shared_state import (
    Call,
    Pieces,
    SharedState,
    is_same_region,
)
from ronde.collectives.shapes import (
    LAYOUT_BYTES,
    CallLayout,
    LayoutSummary,
    as_rows,
    disagreement,
    do_fit,
    rows,
)

_LINE_BYTES = 64
_DIRECT_BYTES = 4 << 10  # from this size on a phase costs less than a copy
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


def refuse(state: SharedState, layout: CallLayout) -> Steps[None]:
    state.staging.take()
    yield from _exchange_layouts(state, layout, 0)


def gather_rows(
    state: SharedState,
    layout: CallLayout,
    data: Tensor,
    row_bytes: int,
    allocate: AllocateRows,
) -> Steps[None]:
    """Concatenate all ranks' rows; the first rows are sent with the shapes."""
    location, slot = _locate(state, data), state.staging.take()
    if not location:
        _show(state, slot, data)
    layouts, locations = yield from _exchange_layouts(state, layout, location)
    counts = [each.num_rows * row_bytes for each in layouts]
    parts = allocate(layouts).split_with_sizes(counts)
    own = parts[state.rank]  # ``data`` may be this part
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
    layout: CallLayout,
    data: Tensor,
    splits: Sequence[int],
    row_bytes: int,
    allocate: AllocateExchange,
) -> Steps[None]:
    location, slot = _locate(state, data), state.staging.take()
    _show(state, slot, torch.tensor(splits, device="cpu").view(_BYTE))
    layouts, locations = yield from _exchange_layouts(state, layout, location)
    plan = as_rows(torch.stack(state.staging.views(slot, torch.int64, state.size)))
    result = allocate(layouts, plan)
    sizes = [[count * row_bytes for count in row] for row in plan]
    yield from _send_to_all(state, data, result, sizes, locations)


def _send_to_all(
    state: SharedState,
    data: Tensor,
    result: Tensor,
    plan: Plan,
    locations: Sequence[int],
) -> Steps[None]:
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
    state: SharedState, layout: CallLayout, location: int
) -> Generator[None, None, tuple[Sequence[LayoutSummary], list[int]]]:
    """Return all tensors' layouts and locations; raise if layouts are incompatible."""
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
        raise disagreement([CallLayout.decode(view) for view in views])
    return layouts, locations


def _show(
    state: SharedState, slot: int, data: Tensor, offset: int = 0, prescale: float = 1.0
) -> list[Tensor]:
    """Fill this rank's slot from the start of ``data``; return views of all slots."""
    room = state.staging.slot_bytes // data.element_size()
    if data.numel() > room:
        data = data[:room]
    views = state.staging.views(slot, data.dtype, data.numel(), offset)
    own = views[state.rank]
    own.copy_(data)
    if prescale != 1.0:
        scale_(own, prescale)
    return views


def _copy_shown(
    state: SharedState,
    slot: int,
    offset: int,
    parts: Sequence[Tensor],
    start: int,
    room: int,
) -> None:
    """Copy the other ranks' slots into ``parts`` of the result, from ``start`` on."""
    for rank, part in enumerate(parts):
        if rank == state.rank or part.numel() <= start:
            continue
        piece = part if not start and part.numel() <= room else part[start:][:room]
        views = state.staging.views(slot, _BYTE, piece.numel(), offset)
        piece.copy_(views[rank])


def _locate(state: SharedState, data: Tensor) -> int:
    """Return the location of bytes in shared memory; 0 if they must be copied."""
    return state.heap.locate(data) if data.numel() >= _DIRECT_BYTES else 0


WHOLE_BYTES = 4 << 10  # up to this size every rank reduces all, saving a phase
_PIECE_BYTES = 512 << 10
_MAX_KNOWN = 1024
_FLOATS = frozenset({torch.float32, torch.float64})
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})


class Scratch:
    """A reusable buffer for float32 sums of 16-bit floats."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32, device="cpu")

    def get(self, numel: int) -> Tensor:
        if self._memory.numel() < numel:
            with torch.inference_mode(mode=False):
                self._memory = torch.empty(numel, dtype=torch.float32, device="cpu")
        return self._memory[:numel]


class ReduceKernel:
    """Kernel for one operation and dtype that combines one tensor of each rank."""

    # ``combine`` reduces one flat tensor of each rank into ``out``, which may be one of
    # these tensors. It combines in rank order, so the result is bitwise equal on every
    # rank. 16-bit floats are rounded once.

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
        self._kernel = KERNELS[op]
        self._divisor = size if op is ReduceOp.AVERAGE else 1
        self._scratch = scratch
        is_whole = dtype in _INTEGERS and op is not ReduceOp.AVERAGE
        self._is_direct = dtype in _FLOATS or is_whole
        is_plain = size == 2 and self._divisor == 1 and postscale == 1.0
        self._is_plain = self._is_direct and is_plain
        self._is_half = dtype in HALVES

    def combine(self, sources: Sequence[Tensor], out: Tensor) -> None:
        if self._is_plain:
            self._kernel(sources[0], sources[1], out=out)
        elif self._is_direct:
            self._combine_directly(sources, out)
        elif self._is_half:
            self._combine_widened(sources, out)
        else:
            self._combine_stacked(sources, out)

    def _combine_directly(self, sources: Sequence[Tensor], out: Tensor) -> None:
        kernel = self._kernel
        if self._size > 2:
            address = out.data_ptr()
            if any(source.data_ptr() == address for source in sources[2:]):
                # ``out`` would be overwritten before it is read.
                sources = [s.clone() if s.data_ptr() == address else s for s in sources]
        kernel(sources[0], sources[1], out=out)
        for source in sources[2:]:
            kernel(out, source, out=out)
        if self._divisor != 1:
            out.div_(self._divisor)
        if self._postscale != 1.0:
            scale_(out, self._postscale)

    def _combine_widened(self, sources: Sequence[Tensor], out: Tensor) -> None:
        wide = self._scratch.get(out.numel())
        wide.copy_(sources[0])
        for source in sources[1:]:
            self._kernel(wide, source, out=wide)
        if self._divisor != 1:
            wide.div_(self._divisor)
        if self._postscale != 1.0:
            wide.mul_(self._postscale)
        out.copy_(wide)

    def _combine_stacked(self, sources: Sequence[Tensor], out: Tensor) -> None:
        # As bytes: torch cannot stack every dtype.
        stack = torch.stack([source.view(torch.uint8) for source in sources])
        out.copy_(reduce_stack(stack.view(out.dtype), self._op, self._postscale))


@dataclass(frozen=True, slots=True)
class KnownReduction:
    """A reduction of vectors of one length and dtype, prepared for reuse."""

    call: Call
    prescale: float
    kernel: ReduceKernel
    all_reduce: "Callable[[SharedState, Tensor, Tensor, KnownReduction], Steps[None]]"


class KnownReductions:
    """A cache of prepared reductions, since most calls are repeated."""

    def __init__(self, size: int) -> None:
        self._size = size
        # Equal reductions of a dtype are the same object: see ``Reduction``.
        self._known: dict[tuple[Reduction, int], KnownReduction] = {}
        self._scratch = Scratch()

    def find(self, name: str, vector: Tensor, reduction: Reduction) -> KnownReduction:
        numel, dtype = vector.numel(), vector.dtype
        known = self._known.get((reduction, numel))
        if known is None:
            op, postscale = reduction.op, reduction.postscale
            known = KnownReduction(
                Call.of(name, dtype, numel, f" by {op}"),
                reduction.prescale,
                ReduceKernel(dtype, op, self._size, postscale, self._scratch),
                _reduce_small if vector.nbytes <= WHOLE_BYTES else _reduce_large,
            )
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[reduction, numel] = known
        return known


def _reduce_small(
    state: SharedState, source: Tensor, out: Tensor, known: KnownReduction
) -> Steps[None]:
    """Reduce short tensors: every rank fills its slot, then reduces all slots."""
    staging, signature = state.staging, known.call.signature
    views = staging.views(staging.take(), out.dtype, out.numel())
    own = views[state.rank]
    own.copy_(source)
    if known.prescale != 1.0:
        scale_(own, known.prescale)
    turn = state.announce(signature)
    yield
    if not state.is_agreed(turn, signature):
        raise (yield from state.mismatch(known.call))
    known.kernel.combine(views, out)


def _reduce_large(
    state: SharedState, source: Tensor, out: Tensor, known: KnownReduction
) -> Steps[None]:
    location = state.heap.locate(out) if source is out else 0
    staging = state.staging
    slot = staging.take()
    step = staging.slot_bytes // out.element_size()
    is_whole = out.numel() <= step
    views: list[Tensor] = []
    if not location:
        views = _show(state, slot, source, prescale=known.prescale)
    locations = yield from state.synchronize(known.call, location)
    plan = (
        state.heap.plans.get((known.call.signature, *locations)) if location else None
    )
    if plan is None and is_same_region(locations):
        plan = _plan(state, out, known, locations)
    if plan is not None:
        _reduce_in_place(state, known, plan)
        yield
    elif any(locations):
        # Only some ranks have filled the first slot, so all fill it again.
        yield from _reduce_shown(state, source, out, known, -1)
    elif is_whole and state.size == 2:
        known.kernel.combine(views, out)
    else:
        yield from _reduce_shown(state, source, out, known, slot)


def _reduce_in_place(
    state: SharedState, known: KnownReduction, plan: list[Pieces]
) -> None:
    # Two pieces can be combined into either; this rank's own is nearer.
    at = state.rank if state.size == 2 else 0
    for pieces in plan:
        if known.prescale != 1.0:
            for piece in pieces:
                scale_(piece, known.prescale)
        result = pieces[at]
        known.kernel.combine(pieces, result)
        for piece in pieces:
            if piece is not result:
                piece.copy_(result)
    # The next call goes in the other direction, as the last pieces are still cached.
    plan.reverse()


def _plan(
    state: SharedState, out: Tensor, known: KnownReduction, locations: Sequence[int]
) -> list[Pieces]:
    itemsize = out.element_size()
    first, last = _share(out.numel(), itemsize, state.size, state.rank)
    columns = [
        torch.split(tensor[first:last], _PIECE_BYTES // itemsize)
        for tensor in state.heap.views(locations, out)
    ]
    plan = list(zip(*columns, strict=True))
    state.heap.cache((known.call.signature, *locations), plan)
    return plan


def _reduce_shown(
    state: SharedState, source: Tensor, out: Tensor, known: KnownReduction, shown: int
) -> Steps[None]:
    """Reduce through alternating slots; ``shown`` is an already filled one, or -1."""
    # Each of two ranks reduces everything. More ranks reduce a share each and copy the
    # others' shares.
    staging, combine = state.staging, known.kernel.combine
    dtype, itemsize, rank = out.dtype, out.element_size(), state.rank
    step = staging.slot_bytes // itemsize
    pieces = zip(torch.split(source, step), torch.split(out, step), strict=True)
    for piece, target in pieces:
        if shown < 0:
            shown = staging.take()
            _show(state, shown, piece, prescale=known.prescale)
            yield
        slot, shown = shown, -1
        if state.size == 2:
            views: Sequence[Tensor] = staging.views(slot, dtype, piece.numel())
            if known.prescale == 1.0:
                # The piece itself is more likely cached than its copy in the slot.
                views = (piece, views[1]) if rank == 0 else (views[0], piece)
            combine(views, target)
            continue
        shares = [
            _share(target.numel(), itemsize, state.size, each)
            for each in range(state.size)
        ]
        first, last = shares[rank]
        if last > first:
            views = staging.views(slot, dtype, last - first, first * itemsize)
            combine(views, views[rank])
        yield
        for each, (first, last) in enumerate(shares):
            if last > first:
                views = staging.views(slot, dtype, last - first, first * itemsize)
                target[first:last].copy_(views[each])


def reduce_scatter(
    state: SharedState,
    source: Tensor,
    out: Tensor,
    counts: Sequence[int],
    known: KnownReduction,
) -> Steps[None]:
    # Scaling in place would change the caller's tensor.
    location = 0 if known.prescale != 1.0 else state.heap.locate(source)
    locations = yield from state.synchronize(known.call, location)
    itemsize = source.element_size()
    if is_same_region(locations):
        first = sum(counts[: state.rank])
        tensors = state.heap.views(locations, source)
        step = max(1, _PIECE_BYTES // itemsize)
        for start in range(0, out.numel(), step):
            target = out[start : start + step]
            at = first + start
            pieces = [tensor[at : at + target.numel()] for tensor in tensors]
            known.kernel.combine(pieces, target)
        yield
        return
    # Copy all ranks' parts through alternating slots.
    parts = torch.split(source, list(counts))
    room = state.staging.slot_bytes // state.size // _LINE_BYTES * _LINE_BYTES
    step = room // itemsize
    for start in range(0, max(counts), step):
        slot = state.staging.take()
        for to, part in enumerate(parts):
            piece = part[start : start + step]
            if piece.numel():
                _show(state, slot, piece, to * room, known.prescale)
        yield
        target = out[start : start + step]
        if target.numel():
            at = state.rank * room
            views = state.staging.views(slot, source.dtype, target.numel(), at)
            known.kernel.combine(views, target)


def _share(numel: int, itemsize: int, size: int, rank: int) -> tuple[int, int]:
    """Return the range of elements that ``rank`` reduces: whole cache lines."""
    line = max(1, _LINE_BYTES // itemsize)
    counts = rows(-(-numel // line), size)
    first = sum(counts[:rank]) * line
    return min(first, numel), min(first + counts[rank] * line, numel)
