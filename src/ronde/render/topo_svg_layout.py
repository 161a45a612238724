"""Items -> boxes at their places.

What is at one switch hangs below it in a column; switches below a switch stand side by
side. So boxes never meet, and no lines cross.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from ronde.render.topo_svg_items import SvgItem, SvgPlace
from ronde.render.topo_svg_shapes import (
    Shape,
    Stroke,
    SvgBox,
    Words,
    clean,
    fit,
    width_of,
)
from ronde.topology.graph import UNKNOWN

ITEM_WIDTH = 190.0
MAX_WIDTH = 1860.0
GAP = 12.0
LINE = 15.0
PAD = 8.0

_SPINE = 14.0
_HEAD_LINES = 18.0
_SOCKET_HEAD = 20.0


class SvgBlock(NamedTuple):
    """Something drawn at the origin, and its size.

    Attributes:
        width: Of all of it.
        height: Of all of it.
        shapes: What it is made of.
        marks: What findings call its boxes, to those boxes.
    """

    width: float
    height: float
    shapes: tuple[Shape, ...] = ()
    marks: tuple[tuple[str, SvgBox], ...] = ()

    def moved(self, x: float, y: float) -> "SvgBlock":
        """Return it at another place."""
        shapes = tuple(_moved(shape, x, y) for shape in self.shapes)
        marks = tuple(
            (name, box._replace(x=box.x + x, y=box.y + y)) for name, box in self.marks
        )
        return SvgBlock(self.width, self.height, shapes, marks)


def lay_out_places(places: Sequence[SvgPlace]) -> SvgBlock:
    """Return NUMA nodes side by side, sockets around them, in rows."""
    blocks: list[SvgBlock] = []
    for package, group in groupby(places, key=lambda place: place.package):
        own = [_lay_out_place(place) for place in group]
        blocks += own if package == UNKNOWN else [_socket(package, own)]
    width = _even_width(blocks)
    even = [
        _stretched(block, max(other.height for other in row))
        for row in _rows(blocks, width)
        for block in row
    ]
    return flow(even, width)


def _stretched(block: SvgBlock, height: float) -> SvgBlock:
    """Return a block whose outermost box, its first shape, is higher."""
    box, *rest = block.shapes
    if not isinstance(box, SvgBox):
        return block
    higher = box._replace(height=height)
    marks = tuple((name, higher if own == box else own) for name, own in block.marks)
    return SvgBlock(block.width, height, (higher, *rest), marks)


def _even_width(blocks: Sequence[SvgBlock]) -> float:
    """Return the least width that needs no more rows than the most allowed."""
    num_rows = len(_rows(blocks, MAX_WIDTH))
    total = sum(block.width + GAP for block in blocks)
    width = max([total / max(1, num_rows), *(block.width for block in blocks)])
    while width < MAX_WIDTH and len(_rows(blocks, width)) > num_rows:
        width += ITEM_WIDTH / 4
    return min(width, MAX_WIDTH)


def _rows(blocks: Sequence[SvgBlock], max_width: float) -> list[list[SvgBlock]]:
    """Return blocks in rows, as many in each as fit."""
    rows: list[list[SvgBlock]] = []
    x = 0.0
    for block in blocks:
        if not rows or x + block.width > max_width:
            rows.append([])
            x = 0.0
        rows[-1].append(block)
        x += block.width + GAP
    return rows


def flow(blocks: Sequence[SvgBlock], max_width: float) -> SvgBlock:
    """Return blocks side by side, in a new row where they would be too wide."""
    y = width = 0.0
    placed: list[SvgBlock] = []
    for row in _rows(blocks, max_width):
        x = 0.0
        for block in row:
            placed.append(block.moved(x, y))
            x += block.width + GAP
        width = max(width, x - GAP)
        y += max(block.height for block in row) + GAP
    return _joined(placed, width, max(0.0, y - GAP))


def _socket(package: int, blocks: Sequence[SvgBlock]) -> SvgBlock:
    inner = flow(blocks, MAX_WIDTH - 2 * PAD).moved(PAD, _SOCKET_HEAD)
    width, height = inner.width + 2 * PAD, inner.height + _SOCKET_HEAD + PAD
    shapes = (
        SvgBox(0, 0, width, height, "socket"),
        Words(PAD, _SOCKET_HEAD - 6, f"Socket {package}", "dim"),
    )
    return SvgBlock(width, height, shapes + inner.shapes, inner.marks)


def _lay_out_place(place: SvgPlace) -> SvgBlock:
    body = flow([_lay_out_item(item) for item in place.items], MAX_WIDTH - 4 * PAD)
    width = max(body.width, ITEM_WIDTH) + 2 * PAD
    head = PAD + _HEAD_LINES + LINE * len(place.lines)
    height = head + (body.height + GAP if place.items else 0) + PAD
    whole = clean("\n".join((place.title, *place.lines)))
    box = SvgBox(0, 0, width, height, "numa", whole)
    shapes: list[Shape] = [
        box,
        Words(PAD, PAD + 12, fit(place.title, width - 2 * PAD, "head"), "head"),
    ]
    for number, line in enumerate(place.lines):
        y = PAD + _HEAD_LINES + LINE * number + 10
        shapes.append(Words(PAD, y, fit(line, width - 2 * PAD), "dim"))
    inner = body.moved(PAD, head + GAP)
    marks = tuple((name, box) for name in place.names)
    return SvgBlock(width, height, (*shapes, *inner.shapes), (*marks, *inner.marks))


def _lay_out_item(item: SvgItem) -> SvgBlock:
    """Return an item with what is below it."""
    columns = _columns(item.below)
    below = _joined_in_row(columns)
    width = max(ITEM_WIDTH, below.width + _SPINE if columns else 0.0)
    item = _with_room(item, width)
    height = 2 * PAD + LINE * (1 + len(item.lines)) - 4
    shapes, box = _draw_box(item, width, height)
    marks = [(name, box) for name in item.names]
    x = _SPINE
    for column, heads in columns:
        shapes += _spine(x, height, heads)
        moved = column.moved(x, height + GAP)
        shapes += moved.shapes
        marks += moved.marks
        x += column.width + GAP
    total = height + (below.height + GAP if columns else 0.0)
    return SvgBlock(width, total, tuple(shapes), tuple(marks))


def _columns(items: Sequence[SvgItem]) -> list[tuple[SvgBlock, tuple[float, ...]]]:
    """Return columns, each with where its boxes begin: one of ends, one a switch."""
    ends = [_lay_out_item(item) for item in items if not item.below]
    forks = [_lay_out_item(item) for item in items if item.below]
    columns: list[tuple[SvgBlock, tuple[float, ...]]] = []
    if ends:
        y = 0.0
        placed: list[SvgBlock] = []
        heads: list[float] = []
        for end in ends:
            placed.append(end.moved(0, y))
            heads.append(y + PAD + LINE / 2)
            y += end.height + GAP / 2
        columns.append((_joined(placed, ITEM_WIDTH, y - GAP / 2), tuple(heads)))
    columns += [(fork, (PAD + LINE / 2,)) for fork in forks]
    return columns


def _joined_in_row(columns: Sequence[tuple[SvgBlock, object]]) -> SvgBlock:
    width = sum(column.width + GAP for column, _ in columns) - GAP
    height = max((column.height for column, _ in columns), default=0.0)
    return SvgBlock(max(0.0, width), height)


def _spine(x: float, above: float, heads: Sequence[float]) -> list[Shape]:
    """Return lines from a box to those that hang in a column below it."""
    left = x - _SPINE / 2
    lines: list[Shape] = [Stroke(left, above, left, above + GAP + heads[-1])]
    lines += [Stroke(left, above + GAP + y, x, above + GAP + y) for y in heads]
    return lines


def _with_room(item: SvgItem, width: float) -> SvgItem:
    """Return an item whose first line fits: its end goes below where it does not."""
    first = width_of(item.title, "name") + width_of(item.aside)
    if not item.aside or first + 3 * PAD <= width:
        return item
    return item._replace(aside="", lines=(item.aside, *item.lines))


def _draw_box(item: SvgItem, width: float, height: float) -> tuple[list[Shape], SvgBox]:
    whole = clean("\n".join((f"{item.title} {item.aside}".strip(), *item.lines)))
    box = SvgBox(0, 0, width, height, item.kind, whole)
    inner = width - 2 * PAD
    shapes: list[Shape] = [box]
    shapes.append(Words(PAD, PAD + 10, fit(item.title, inner, "name"), "name"))
    if item.aside:
        aside = fit(item.aside, inner)
        shapes.append(Words(width - PAD, PAD + 10, aside, "dim", "end"))
    for number, line in enumerate(item.lines, 1):
        y = PAD + LINE * number + 9
        shapes.append(Words(PAD, y, fit(line, inner)))
    return shapes, box


def _joined(blocks: Sequence[SvgBlock], width: float, height: float) -> SvgBlock:
    return SvgBlock(
        width,
        height,
        tuple(shape for block in blocks for shape in block.shapes),
        tuple(mark for block in blocks for mark in block.marks),
    )


def _moved(shape: Shape, x: float, y: float) -> Shape:
    if isinstance(shape, Stroke):
        return Stroke(shape.x + x, shape.y + y, shape.to_x + x, shape.to_y + y)
    return shape._replace(x=shape.x + x, y=shape.y + y)
