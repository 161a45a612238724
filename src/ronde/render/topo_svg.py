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
)
from ronde.topology.graph import UNKNOWN, HostTopology
from ronde.units import counted

_ITEM_WIDTH = 190.0
_MAX_WIDTH = 1860.0
_GAP = 12.0
_LINE = 15.0
_PAD = 8.0

_SMALL = 11  # size of most letters
_SIZES = {"title": 18, "subtitle": 12, "name": 12}
_BOLD = frozenset({"title", "name"})
# Widths by those of DejaVu Sans, broader than Arial and its like.
_NARROW = frozenset(" .,:;/\\|!'`()[]{}ijlItfr-")
_BROAD = frozenset("mwMW@%\N{HORIZONTAL ELLIPSIS}")
_MAX_LETTERS = 400
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
_MARGIN = 16.0
_MIN_WIDTH = 560.0
_MAX_ITEMS = 64  # at one place; the rest is counted only
_MAX_PLACES = 64
_SPINE = 14.0

_STYLE = """\
text{font-family:Helvetica,Arial,"Liberation Sans",sans-serif;font-size:11px;fill:#222}
.title{font-size:18px;font-weight:bold}.subtitle{font-size:12px;fill:#555}
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
        return [f'<g transform="translate({x:g} {y:g})">', *self.shapes, "</g>"]


def draw_svg(host: HostTopology) -> str:
    """Return a host as SVG."""
    # Devices that are no GPU, network adapter or NVSwitch are counted only.
    places, num_left_out = _find_places(host)
    body = _flow([_lay_out_place(place) for place in places])
    width = max(_MIN_WIDTH, body.width)
    title = host.name or next(iter(host.sources), "one host")
    counts = [
        counted(len(host.numa_nodes), "NUMA node"),
        counted(len(host.gpus), "GPU"),
        counted(len(host.ports), "network port"),
    ]
    if num_left_out:
        counts.append(f"{counted(num_left_out, 'other PCI device')} not drawn")
    counts.append("GB/s of one direction, as NCCL counts")
    heading = (
        _words(0, 18, fit(title, width, "title"), "title"),
        _words(0, 38, fit(", ".join(counts), width, "subtitle"), "subtitle"),
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


def _height_of(element: TreeElement) -> float:
    return 2 * _PAD + _LINE * (1 + len(element.details)) - 4


def _lay_out_item(item: TreeElement) -> SvgBlock:
    """Return a box, and below it in a column what hangs at it."""
    below = [_lay_out_item(each) for each in _limited(item.below)]
    width = max([_ITEM_WIDTH, *(block.width + _SPINE for block in below)])
    first = width_of(item.title, "name") + width_of(item.bus_id)
    if item.bus_id and first + 3 * _PAD > width:
        item = item._replace(bus_id="", details=(item.bus_id, *item.details))
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
    whole = "\n".join((f"{item.title} {item.bus_id}".strip(), *item.details))
    inner = width - 2 * _PAD
    shapes = [
        _box(width, height, item.kind, whole),
        _words(_PAD, _PAD + 10, fit(item.title, inner, "name"), "name"),
    ]
    if item.bus_id:
        aside = fit(item.bus_id, inner)
        shapes.append(_words(width - _PAD, _PAD + 10, aside, "dim", "end"))
    for number, line in enumerate(item.details, 1):
        shapes.append(_words(_PAD, _PAD + _LINE * number + 9, fit(line, inner)))
    return shapes


def _links(host: HostTopology) -> list[str]:
    lines = list(fabric_lines(host))
    if (left := len(lines) - _MAX_ITEMS) > 0:
        lines[_MAX_ITEMS:] = [f"and {left} more"]
    return lines


def _bar(text: str, width: float) -> SvgBlock:
    height = _LINE + _PAD
    words = _words(_PAD, _PAD + 8, fit(text, width - 2 * _PAD, "name"), "name")
    return SvgBlock(width, height, (_box(width, height, "fabric", text), words))


def width_of(text: str, kind: str = "") -> float:
    """Return the most that a text takes, whatever sans-serif letters there are."""
    # Bold letters are a tenth broader.
    weight = 1.1 if kind in _BOLD else 1.0
    return sum(map(_letters, text)) * _SIZES.get(kind, _SMALL) * weight


def _letters(letter: str) -> float:
    """Return the most that a letter of size 1 takes in usual typefaces."""
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.2
    if letter in _NARROW:
        return 0.4
    if letter in _BROAD:
        return 1.0
    return 0.75 if letter.isupper() else 0.645


def fit(text: str, width: float, kind: str = "") -> str:
    text = _clean(text).replace("\n", " ")
    if width_of(text, kind) <= width:
        return text
    fitting = ""
    for letter in text:
        if width_of(fitting + letter + _ELLIPSIS, kind) > width:
            break
        fitting += letter
    return fitting + _ELLIPSIS


def _clean(text: str) -> str:
    """Return the beginning of a text, without what XML forbids or what reverses it."""
    shown = text[:_MAX_LETTERS]
    return "".join(c for c in shown if unicodedata.category(c)[0] != "C" or c == "\n")


def _to_svg(shapes: list[str], width: float, height: float, title: str) -> str:
    body = "\n".join(shapes)
    size = f'width="{width:g}" height="{height:g}"'
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {width:g} {height:g}" {size} role="img">\n'
        f"<title>{escape(_clean(title))}</title>\n<style>{escape(_STYLE)}</style>\n"
        f'<rect class="page" {size} rx="6"/>\n{body}\n</svg>\n'
    )


def _box(width: float, height: float, kind: str, title: str = "") -> str:
    """Return a rectangle at the origin; the title shows when somebody points at it."""
    return (
        f'<rect class="{kind}" width="{width:g}" height="{height:g}" rx="4">'
        f"<title>{escape(_clean(title))}</title></rect>"
    )


def _words(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text; ``y`` is of the line that the letters stand on."""
    return (
        f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


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
