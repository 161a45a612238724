"""Boxes, lines and words of a drawing, and their SVG."""

import unicodedata
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

SMALL = 11
"""Size of most letters."""

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
    """A rectangle.

    Attributes:
        x: Of its left edge.
        y: Of its upper edge.
        width: Of it.
        height: Of it.
        kind: What is in it, a class of the style.
        title: What is shown when somebody points at it; may be empty.
    """

    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str = ""


class Words(NamedTuple):
    """A line of text.

    Attributes:
        x: Of its beginning, its middle or its end, as the anchor says.
        y: Of the line that the letters stand on.
        text: What is written.
        kind: ``title``, ``head``, ``name``, ``dim``, or empty.
        anchor: ``start``, ``middle`` or ``end``.
    """

    x: float
    y: float
    text: str
    kind: str = ""
    anchor: str = "start"


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
    return sum(map(_letters, text)) * _SIZES.get(kind, SMALL) * weight


def fit(text: str, width: float, kind: str = "") -> str:
    """Return a text, its end left out where it is wider than some width."""
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
    """Return a text without what XML forbids or what reverses its direction.

    Of a long one the beginning is enough.
    """
    shown = text[:_MAX_LETTERS]
    return "".join(c for c in shown if unicodedata.category(c)[0] != "C" or c == "\n")


def to_svg(shapes: list[Shape], width: float, height: float, title: str) -> str:
    """Return a drawing that stands alone, on a white page of its own."""
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
