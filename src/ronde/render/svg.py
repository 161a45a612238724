"""Boxes, lines and words of a drawing, blocks of them side by side, and their SVG."""

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

ITEM_WIDTH = 190.0
MAX_WIDTH = 1860.0
GAP = 12.0
LINE = 15.0
PAD = 8.0

_SMALL = 11  # size of most letters
_SIZES = {"title": 18, "subtitle": 12, "head": 13, "name": 12}
_BOLD = frozenset({"title", "head", "name", "badgetext"})
# Widths by those of DejaVu Sans, broader than Arial and its like.
_NARROW = frozenset(" .,:;/\\|!'`()[]{}ijlItfr-")
_BROAD = frozenset("mwMW@%\N{HORIZONTAL ELLIPSIS}")
_MAX_LETTERS = 400
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"

_STYLE = """\
text{font-family:Helvetica,Arial,"Liberation Sans",sans-serif;font-size:11px;fill:#222}
.title{font-size:18px;font-weight:bold}.subtitle{font-size:12px;fill:#555}
.head{font-size:13px;font-weight:bold}.name{font-size:12px;font-weight:bold}
.dim{fill:#555}.page{fill:#fff}.socket{fill:none;stroke:#9aa3ad;stroke-dasharray:5 4}
.numa{fill:#f4f6f8;stroke:#9aa3ad}.switch{fill:#e3e0f3;stroke:#7b6fc0}
.gpu{fill:#e2f2d5;stroke:#5a9a2c}.nic{fill:#d9ebfa;stroke:#2f7fc1}
.other{fill:#eee;stroke:#999}.fabric{fill:#fdebc8;stroke:#d08a1d}
.cell{fill:#fff;stroke:#d8c9a8}.cell1{fill:#fdf3df;stroke:#d8c9a8}
.cell2{fill:#f9d99a;stroke:#d8c9a8}.cell3{fill:#eeb44f;stroke:#d8c9a8}
.line{stroke:#7a828a;stroke-width:1.2}
.error{fill:none;stroke:#c62828;stroke-width:2.5}
.warning{fill:none;stroke:#e07b00;stroke-width:2.5}
.note{fill:none;stroke:#6d7680;stroke-width:2;stroke-dasharray:3 2}
.errorbadge{fill:#c62828}.warningbadge{fill:#e07b00}.notebadge{fill:#6d7680}
.badgetext{fill:#fff;font-weight:bold}"""


class SvgBox(NamedTuple):
    """A rectangle; x and y are of its upper left corner."""

    x: float
    y: float
    width: float
    height: float
    kind: str  # a class of the style
    title: str = ""  # shown when somebody points at it


class Words(NamedTuple):
    """A line of text; y is of the line that the letters stand on."""

    x: float
    y: float
    text: str
    kind: str = ""  # ``title``, ``head``, ``name``, ``dim``, or empty
    anchor: str = "start"  # what is at x: ``start``, ``middle`` or ``end``


class Stroke(NamedTuple):
    """A straight line from one place to another."""

    x: float
    y: float
    to_x: float
    to_y: float


Shape = SvgBox | Words | Stroke


def width_of(text: str, kind: str = "") -> float:
    """Return the most that a text takes, whatever sans-serif letters there are."""
    # Bold letters are a tenth broader.
    weight = 1.1 if kind in _BOLD else 1.0
    return sum(map(_letters, text)) * _SIZES.get(kind, _SMALL) * weight


def fit(text: str, width: float, kind: str = "") -> str:
    text = clean(text).replace("\n", " ")
    if width_of(text, kind) <= width:
        return text
    fitting = ""
    for letter in text:
        if width_of(fitting + letter + _ELLIPSIS, kind) > width:
            break
        fitting += letter
    return fitting + _ELLIPSIS


def clean(text: str) -> str:
    """Return the beginning of a text, without what XML forbids or what reverses it."""
    shown = text[:_MAX_LETTERS]
    return "".join(c for c in shown if unicodedata.category(c)[0] != "C" or c == "\n")


def to_svg(shapes: list[Shape], width: float, height: float, title: str) -> str:
    size = f"{width:g} {height:g}"
    body = "\n".join(map(_shape, shapes))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
        f'width="{width:g}" height="{height:g}" role="img">\n'
        f"<title>{escape(clean(title))}</title>\n<style>{escape(_STYLE)}</style>\n"
        f'<rect class="page" width="{width:g}" height="{height:g}" rx="6"/>\n'
        f"{body}\n</svg>\n"
    )


def _shape(shape: Shape) -> str:
    match shape:
        case SvgBox():
            attributes = (
                f'class="{shape.kind}" x="{shape.x:g}" y="{shape.y:g}" '
                f'width="{shape.width:g}" height="{shape.height:g}" rx="4"'
            )
            if not shape.title:
                return f"<rect {attributes}/>"
            return f"<rect {attributes}><title>{escape(shape.title)}</title></rect>"
        case Words():
            kind = f"class={quoteattr(shape.kind)} " if shape.kind else ""
            anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
            return (
                f'<text {kind}x="{shape.x:g}" y="{shape.y:g}"{anchor}>'
                f"{escape(shape.text)}</text>"
            )
        case Stroke():
            return (
                f'<line class="line" x1="{shape.x:g}" y1="{shape.y:g}" '
                f'x2="{shape.to_x:g}" y2="{shape.to_y:g}"/>'
            )


def _letters(letter: str) -> float:
    """Return the most that a letter of size 1 takes in usual typefaces."""
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.2
    if letter in _NARROW:
        return 0.4
    if letter in _BROAD:
        return 1.0
    return 0.75 if letter.isupper() else 0.645


class SvgBlock(NamedTuple):
    """Something drawn at the origin, and its size."""

    width: float
    height: float
    shapes: tuple[Shape, ...] = ()
    marks: tuple[tuple[str, SvgBox], ...] = ()  # boxes by the names in findings

    def moved(self, x: float, y: float) -> "SvgBlock":
        shapes = tuple(_moved(shape, x, y) for shape in self.shapes)
        marks = tuple(
            (name, box._replace(x=box.x + x, y=box.y + y)) for name, box in self.marks
        )
        return SvgBlock(self.width, self.height, shapes, marks)


def rows_of(blocks: Sequence[SvgBlock], max_width: float) -> list[list[SvgBlock]]:
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
    y = width = 0.0
    placed: list[SvgBlock] = []
    for row in rows_of(blocks, max_width):
        x = 0.0
        for block in row:
            placed.append(block.moved(x, y))
            x += block.width + GAP
        width = max(width, x - GAP)
        y += max(block.height for block in row) + GAP
    return join_blocks(placed, width, max(0.0, y - GAP))


def join_blocks(blocks: Sequence[SvgBlock], width: float, height: float) -> SvgBlock:
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
