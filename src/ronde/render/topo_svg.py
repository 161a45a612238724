"""A host's topology -> a drawing that stands alone, as SVG.

NUMA nodes stand side by side; PCI switches below, and GPUs and
network adapters below these. What is at one switch hangs below it in a column. So boxes
never meet, and no lines cross. Rates are of one direction in GB/s, as NCCL counts.
"""

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from ronde.render.topo_tree import (
    ElementTree,
    TreeElement,
    fabric_lines,
    numa_element,
    summary,
)
from ronde.topology.graph import UNKNOWN, HostTopology
from ronde.units import counted

_ITEM_WIDTH = 190.0
_MAX_WIDTH = 1860.0
_GAP = 12.0
_LINE = 15.0
_PAD = 8.0

_MAX_LETTERS = 400
_MARGIN = 16.0
_MIN_WIDTH = 560.0
_MAX_ITEMS = 64  # at one place; the rest is counted only
_MAX_PLACES = 64
_SPINE = 14.0

_STYLE = """\
text{font-family:Helvetica,Arial,"Liberation Sans",sans-serif;font-size:11px;fill:#222}
.title{font-size:18px;font-weight:bold}
.name{font-size:12px;font-weight:bold}
.dim{fill:#555}.page{fill:#fff}
.numa{fill:#f4f6f8;stroke:#9aa3ad}.switch{fill:#e3e0f3;stroke:#7b6fc0}
.gpu{fill:#e2f2d5;stroke:#5a9a2c}.nic{fill:#d9ebfa;stroke:#2f7fc1}
.other{fill:#eee;stroke:#999}.fabric{fill:#fdebc8;stroke:#d08a1d}
.line{stroke:#7a828a;stroke-width:1.2}"""


class SvgBlock(NamedTuple):
    """Something drawn at the origin, and its size."""

    width: float
    height: float
    shapes: Sequence[str]  # Elements of SVG.

    def moved(self, x: float, y: float) -> list[str]:
        # What is too long for its place is cut there.
        place = f'x="{x:g}" y="{y:g}" {_size(self.width, self.height)}'
        return [f"<svg {place}>", *self.shapes, "</svg>"]


def draw_svg(host: HostTopology) -> str:
    """Return a host as SVG."""
    # Devices that are no GPU, network adapter or NVSwitch are counted only.
    places, num_left_out = _find_places(host)
    body = _flow([_lay_out_place(place) for place in places])
    width = max(_MIN_WIDTH, body.width)
    title = host.name or next(iter(host.sources), "one host")
    counts = [summary(host)]
    if num_left_out:
        counts.append(f"{counted(num_left_out, 'other PCI device')} not drawn")
    counts.append("GB/s of one direction, as NCCL counts")
    heading = (
        _words(0, 18, title, "title"),
        _words(0, 38, ", ".join(counts), "dim"),
    )
    fabrics = _flow([_bar(line, width) for line in _links(host)])
    shapes: list[str] = []
    y = _MARGIN
    for block in (SvgBlock(width, 44, heading), body, fabrics):
        if block.shapes:
            shapes += block.moved(_MARGIN, y)
            y += block.height + _GAP
    width = max(width, fabrics.width) + 2 * _MARGIN
    return _to_svg(shapes, width, y - _GAP + _MARGIN, title)


def _find_places(host: HostTopology) -> tuple[list[TreeElement], int]:
    """Return the NUMA nodes with their devices, and how many devices are not drawn."""
    # GPUs, network adapters and NVSwitches are drawn, and bridges where they part.
    tree = ElementTree(host)
    nodes = sorted(host.numa_nodes, key=lambda n: (n.package, n.number))
    known = {node.number for node in nodes}
    places: list[TreeElement] = []
    for node in nodes:
        place = numa_element(host, node, tree.at({node.number}, is_known=True))
        socket = (f"socket {node.package}",) if node.package != UNKNOWN else ()
        places.append(place._replace(details=(*socket, *place.details)))
    if lost := tree.at(known, is_known=False):
        title = "NUMA node unknown" if nodes else "This host"
        places.append(TreeElement("numa", title, below=lost))
    if (left := len(places) - _MAX_PLACES) > 0:
        places[_MAX_PLACES:] = [TreeElement("numa", f"{left} more nodes")]
    return places, sum(tree.is_left_out(device) for device in host.devices)


def _limited(items: Sequence[TreeElement]) -> tuple[TreeElement, ...]:
    if len(items) <= _MAX_ITEMS:
        return tuple(items)
    more = TreeElement("other", f"and {len(items) - _MAX_ITEMS + 1} more")
    return (*items[: _MAX_ITEMS - 1], more)


def _lay_out_place(place: TreeElement) -> SvgBlock:
    """Return a NUMA node with what is at it side by side."""
    body = _flow(list(map(_lay_out_item, _limited(place.below))), _MAX_WIDTH - 4 * _PAD)
    width = max(body.width, _ITEM_WIDTH) + 2 * _PAD
    head = _height_of(place) + _PAD
    height = head + body.height + _PAD if place.below else head
    shapes = _draw_box(place, width, height) + body.moved(_PAD, head)
    return SvgBlock(width, height, shapes)


def _lines_of(element: TreeElement) -> list[str]:
    return [element.title, *filter(None, (element.bus_id, *element.details))]


def _height_of(element: TreeElement) -> float:
    return 2 * _PAD + _LINE * len(_lines_of(element)) - 4


def _lay_out_item(item: TreeElement) -> SvgBlock:
    """Return a box, and below it in a column what hangs at it."""
    below = [_lay_out_item(each) for each in _limited(item.below)]
    width = max([_ITEM_WIDTH, *(block.width + _SPINE for block in below)])
    height = y = _height_of(item)
    shapes = _draw_box(item, width, height)
    for block in below:
        y += _GAP / 2
        head = y + _PAD + _LINE / 2
        shapes.append(_stroke(_SPINE / 2, height, 0, head - height))
        shapes.append(_stroke(_SPINE / 2, head, _SPINE / 2, 0))
        shapes += block.moved(_SPINE, y)
        y += block.height
    return SvgBlock(width, y, shapes)


def _draw_box(item: TreeElement, width: float, height: float) -> list[str]:
    lines = _lines_of(item)
    texts = [
        _words(_PAD, _PAD + _LINE * number + 10, line, "" if number else "name")
        for number, line in enumerate(lines)
    ]
    return [_box(width, height, item.kind, "\n".join(lines)), *texts]


def _links(host: HostTopology) -> list[str]:
    lines = list(fabric_lines(host))
    if (left := len(lines) - _MAX_ITEMS) > 0:
        lines[_MAX_ITEMS:] = [f"and {left} more"]
    return lines


def _bar(text: str, width: float) -> SvgBlock:
    height = _LINE + _PAD
    words = _words(_PAD, _PAD + 8, text, "name")
    return SvgBlock(width, height, (_box(width, height, "fabric", text), words))


def _clean(text: str) -> str:
    """Return the beginning of a text, without what XML forbids or what reverses it."""
    shown = text[:_MAX_LETTERS]
    return "".join(c for c in shown if unicodedata.category(c)[0] != "C" or c == "\n")


def _to_svg(shapes: list[str], width: float, height: float, title: str) -> str:
    body = "\n".join(shapes)
    size = _size(width, height)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {width:g} {height:g}" {size} role="img">\n'
        f"<title>{escape(_clean(title))}</title>\n<style>{escape(_STYLE)}</style>\n"
        f'<rect class="page" {size} rx="6"/>\n{body}\n</svg>\n'
    )


def _box(width: float, height: float, kind: str, title: str = "") -> str:
    """Return a rectangle at the origin; the title shows when somebody points at it."""
    return (
        f'<rect class="{kind}" x=".5" y=".5" {_size(width - 1, height - 1)} rx="4">'
        f"<title>{escape(_clean(title))}</title></rect>"
    )


def _size(width: float, height: float) -> str:
    return f'width="{width:g}" height="{height:g}"'


def _words(x: float, y: float, text: str, kind: str) -> str:
    """Return a line of text; ``y`` is of the line that the letters stand on."""
    text = escape(_clean(text).replace("\n", " "))
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{text}</text>'


def _stroke(x: float, y: float, right: float, down: float) -> str:
    """Return a straight line from a place to another, so far right and down of it."""
    return (
        f'<line class="line" x1="{x:g}" y1="{y:g}" x2="{x + right:g}" '
        f'y2="{y + down:g}"/>'
    )


def _flow(blocks: Sequence[SvgBlock], max_width: float = _MAX_WIDTH) -> SvgBlock:
    """Return blocks side by side, in as many rows as they need."""
    shapes: list[str] = []
    x = y = width = row_height = 0.0
    for block in blocks:
        if x and x + block.width > max_width:
            x, y, row_height = 0.0, y + row_height + _GAP, 0.0
        shapes += block.moved(x, y)
        x += block.width + _GAP
        width = max(width, x - _GAP)
        row_height = max(row_height, block.height)
    return SvgBlock(width, y + row_height, shapes)
