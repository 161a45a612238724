"""A host's topology -> a drawing that stands alone, as SVG.

NUMA nodes stand side by side, sockets around them; PCI switches below, and GPUs and
network adapters below these. Rates are of one direction in GB/s, as NCCL counts.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ronde.render.topo_svg_fabric import draw_fabrics
from ronde.render.topo_svg_items import SvgItem, SvgPlace, find_places
from ronde.render.topo_svg_layout import GAP, LINE, PAD, SvgBlock, flow, lay_out_places
from ronde.render.topo_svg_shapes import Shape, SvgBox, Words, fit, to_svg, width_of
from ronde.render.wrapping import list_some
from ronde.topology.graph import Diagnostic, HostTopology, Level

_MARGIN = 16.0
_MIN_WIDTH = 560.0
_MAX_FINDINGS = 20
_BADGE = 16.0
_LEGEND = (
    ("numa", "NUMA node"),
    ("switch", "PCI switch or bridge"),
    ("gpu", "GPU"),
    ("nic", "network adapter"),
    ("other", "other device"),
    ("fabric", "direct links"),
)


def draw_svg(host: HostTopology, findings: Sequence[Diagnostic] = ()) -> str:
    """Return a host as SVG for people.

    Args:
        host: What to draw. Devices that are no GPU, network adapter or NVSwitch are
            counted only.
        findings: What is wrong with it; marked at its elements, and told below.
    """
    places, num_left_out = find_places(host)
    body = lay_out_places(places)
    told = _fold(findings)
    width = max(_MIN_WIDTH, body.width)
    title = host.name or next(iter(host.sources), "one host")
    fabrics = draw_fabrics(host, width)
    blocks = [
        _heading(title, _counts(host, num_left_out), width),
        _marked(body, told),
        flow(fabrics, width),
        *([_list(told, width)] if told else []),
        _legend(places, width, has_fabric=bool(fabrics)),
    ]
    shapes: list[Shape] = []
    y = _MARGIN
    for block in blocks:
        if block.shapes:
            shapes += block.moved(_MARGIN, y).shapes
            y += block.height + GAP
    width = max(width, *(block.width for block in blocks))
    return to_svg(shapes, width + 2 * _MARGIN, y - GAP + _MARGIN, title)


def _heading(title: str, counts: str, width: float) -> SvgBlock:
    shapes = (
        Words(0, 18, fit(title, width, "title"), "title"),
        Words(0, 38, fit(counts, width, "subtitle"), "subtitle"),
    )
    return SvgBlock(width, 44, shapes)


def _counts(host: HostTopology, num_left_out: int) -> str:
    words = [
        _counted(len(host.numa_nodes), "NUMA node"),
        _counted(len(host.gpus), "GPU"),
        _counted(len(host.ports), "network port"),
    ]
    if num_left_out:
        words.append(f"{_counted(num_left_out, 'other PCI device')} not drawn")
    return ", ".join(words)


class _Told(NamedTuple):
    """What is said of one element or of several."""

    finding: Diagnostic
    elements: tuple[str, ...]


def _fold(findings: Sequence[Diagnostic]) -> list[_Told]:
    """Return findings, the most severe first, those that say the same as one."""
    order = list(Level)
    elements: dict[Diagnostic, list[str]] = {}
    for finding in sorted(findings, key=lambda f: order.index(f.severity)):
        elements.setdefault(finding._replace(element=""), []).append(finding.element)
    folded = [_Told(each, tuple(own)) for each, own in elements.items()]
    return folded[:_MAX_FINDINGS]


def _marked(body: SvgBlock, told: Sequence[_Told]) -> SvgBlock:
    """Return the places with a frame and a number at what findings are about."""
    shapes = list(body.shapes)
    boxes = dict(body.marks)
    num_marks: dict[SvgBox, int] = {}
    for number, (finding, elements) in enumerate(told, 1):
        words = [word for e in elements for word in e.replace(",", " ").split()]
        for box in dict.fromkeys(boxes[word] for word in words if word in boxes):
            if box not in num_marks:
                shapes.append(box._replace(kind=str(finding.severity), title=""))
            # Numbers of several findings stand side by side on the upper edge.
            right = box.x + box.width - PAD - num_marks.get(box, 0) * (_BADGE + 2)
            num_marks[box] = num_marks.get(box, 0) + 1
            if right - _BADGE > box.x:
                shapes += _badge(right - _BADGE, box.y - 10, number, finding.severity)
    return body._replace(shapes=tuple(shapes))


def _badge(x: float, y: float, number: int, severity: Level) -> list[Shape]:
    return [
        SvgBox(x, y, _BADGE, 14, f"{severity}badge"),
        Words(x + _BADGE / 2, y + 11, str(number), "badgetext", "middle"),
    ]


def _list(told: Sequence[_Told], width: float) -> SvgBlock:
    shapes: list[Shape] = []
    for place, (finding, elements) in enumerate(told):
        y = place * (LINE + 3)
        shapes += _badge(0, y, place + 1, finding.severity)
        text = f"{finding.rule}, {list_some(elements, 4)}: {finding.what}"
        shapes.append(Words(_BADGE + PAD, y + 11, fit(text, width - _BADGE - PAD)))
    return SvgBlock(width, len(told) * (LINE + 3), tuple(shapes))


def _legend(places: Sequence[SvgPlace], width: float, *, has_fabric: bool) -> SvgBlock:
    kinds = {"numa"} | {kind for place in places for kind in _kinds(place.items)}
    if has_fabric:
        kinds.add("fabric")
    blocks = [
        SvgBlock(
            22 + width_of(text),
            LINE,
            (SvgBox(0, 1, 14, 12, f"{kind} key"), Words(20, 11, text, "dim")),
        )
        for kind, text in _LEGEND
        if kind in kinds
    ]
    note = "GB/s of one direction, as NCCL counts"
    blocks.append(SvgBlock(width_of(note), LINE, (Words(0, 11, note, "dim"),)))
    return flow(blocks, width)


def _kinds(items: Sequence[SvgItem]) -> set[str]:
    found: set[str] = set()
    stack = list(items)
    while stack:
        item = stack.pop()
        found.add(item.kind)
        stack += item.below
    return found


def _counted(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"
