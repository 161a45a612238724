"""A host's topology -> a drawing that stands alone, as SVG.

NUMA nodes stand side by side, sockets around them; PCI switches below, and GPUs and
network adapters below these. What is at one switch hangs below it in a column; switches
below a switch stand side by side. So boxes never meet, and no lines cross. Rates are of
one direction in GB/s, as NCCL counts.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from ronde.render.svg import (
    GAP,
    ITEM_WIDTH,
    LINE,
    MAX_WIDTH,
    PAD,
    Shape,
    Stroke,
    SvgBlock,
    SvgBox,
    Words,
    clean,
    fit,
    flow,
    join_blocks,
    rows_of,
    to_svg,
    width_of,
)
from ronde.render.text import counted, grouped, list_some
from ronde.render.topo_tree import (
    LINK_TITLES,
    ElementTree,
    TreeElement,
    is_nvlink_switch,
)
from ronde.topology.cpu_sets import format_list
from ronde.topology.graph import (
    NVSWITCH,
    UNKNOWN,
    Diagnostic,
    HostTopology,
    Level,
    LinkKind,
    NumaNode,
)
from ronde.topology.paths.speeds import (
    is_link_known,
    link_gb_per_s,
    smp_gb_per_s,
)
from ronde.units import format_size

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
_MAX_ITEMS = 24  # at one place; the rest is counted only
_MAX_PLACES = 64
_MAX_CPUS_CHARACTERS = 22
_SPINE = 14.0
_HEAD_LINES = 18.0
_SOCKET_HEAD = 20.0
_FABRICS = (LinkKind.NVLINK, LinkKind.XGMI)
_MAX_GPUS = 32
_CELL_WIDTH = 64.0
_CELL_HEIGHT = 22.0
# A GPU and what its links lead to -> how many links, and GB/s together; 0 for unknown.
_Pairs = dict[tuple[str, str], tuple[int, float]]


class _Place(NamedTuple):
    """A NUMA node, or an unknown one, and what is at it."""

    names: tuple[str, ...]  # its names in findings
    package: int  # number of its socket; ``UNKNOWN``
    title: str  # its first line
    lines: tuple[str, ...]  # what follows
    elements: tuple[TreeElement, ...]


def draw_svg(host: HostTopology, findings: Sequence[Diagnostic] = ()) -> str:
    """Return a host as SVG; findings are marked at its elements and shown below.

    Devices that are no GPU, network adapter or NVSwitch are counted only.
    """
    places, num_left_out = _find_places(host)
    body = _lay_out_places(places)
    folded = _fold(findings)
    width = max(_MIN_WIDTH, body.width)
    title = host.name or next(iter(host.sources), "one host")
    fabrics = _draw_fabrics(host, width)
    counts = [
        counted(len(host.numa_nodes), "NUMA node"),
        counted(len(host.gpus), "GPU"),
        counted(len(host.ports), "network port"),
    ]
    if num_left_out:
        counts.append(f"{counted(num_left_out, 'other PCI device')} not drawn")
    heading = (
        Words(0, 18, fit(title, width, "title"), "title"),
        Words(0, 38, fit(", ".join(counts), width, "subtitle"), "subtitle"),
    )
    blocks = [
        SvgBlock(width, 44, heading),
        _marked(body, folded),
        flow(fabrics, width),
        *([_list(folded, width)] if folded else []),
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


_Finding = tuple[Diagnostic, tuple[str, ...]]
"""A finding, and the elements that have it."""


def _fold(findings: Sequence[Diagnostic]) -> list[_Finding]:
    """Return findings, the most severe first, those that are the same as one."""
    order = list(Level)
    ordered = sorted(findings, key=lambda f: order.index(f.severity))
    elements = grouped((each._replace(element=""), each.element) for each in ordered)
    return [(each, tuple(own)) for each, own in elements.items()][:_MAX_FINDINGS]


def _marked(body: SvgBlock, folded: Sequence[_Finding]) -> SvgBlock:
    """Return the places with a frame and a number at what findings are about."""
    shapes = list(body.shapes)
    boxes = dict(body.marks)
    num_marks: dict[SvgBox, int] = {}
    for number, (finding, elements) in enumerate(folded, 1):
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


def _list(folded: Sequence[_Finding], width: float) -> SvgBlock:
    shapes: list[Shape] = []
    for place, (finding, elements) in enumerate(folded):
        y = place * (LINE + 3)
        shapes += _badge(0, y, place + 1, finding.severity)
        text = f"{finding.rule}, {list_some(elements, 4)}: {finding.what}"
        shapes.append(Words(_BADGE + PAD, y + 11, fit(text, width - _BADGE - PAD)))
    return SvgBlock(width, len(folded) * (LINE + 3), tuple(shapes))


def _legend(places: Sequence[_Place], width: float, *, has_fabric: bool) -> SvgBlock:
    kinds = {"numa", "fabric"} if has_fabric else {"numa"}
    stack = [item for place in places for item in place.elements]
    while stack:
        item = stack.pop()
        kinds.add(item.kind)
        stack += item.below
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


def _find_places(host: HostTopology) -> tuple[tuple[_Place, ...], int]:
    """Return the NUMA nodes with their devices, and how many devices are not drawn.

    GPUs, network adapters and NVSwitches are drawn, and bridges where they part.
    """
    tree = ElementTree(host, is_drawn=True)
    nodes = sorted(host.numa_nodes, key=lambda n: (n.package, n.number))
    known = {node.number for node in nodes}
    places = [_place(node, tree.at({node.number}, is_known=True)) for node in nodes]
    if lost := tree.at(known, is_known=False):
        title = "NUMA node unknown" if nodes else "This host"
        places.append(_Place((), UNKNOWN, title, (), lost))
    if (left := len(places) - _MAX_PLACES) > 0:
        places[_MAX_PLACES:] = [_Place((), UNKNOWN, f"{left} more nodes", (), ())]
    return tuple(places), sum(tree.is_left_out(device) for device in host.devices)


def _place(node: NumaNode, elements: tuple[TreeElement, ...]) -> _Place:
    lines = [f"{node.vendor} {node.arch}".strip()] if node.vendor or node.arch else []
    if node.cpus:
        cores = len(node.cores)
        known_cores = f"{cores} cores, " if cores else ""
        listed = format_list(node.cpus)
        if len(listed) > _MAX_CPUS_CHARACTERS:
            listed = f"from {node.cpus[0]} to {node.cpus[-1]}"
        lines += [f"{known_cores}{len(node.cpus)} CPUs", f"CPUs {listed}"]
    else:
        lines.append("no CPUs")
    if node.memory_bytes > 0:
        lines.append(f"{format_size(node.memory_bytes)} of memory")
    title = f"NUMA node {node.number}" if node.number != UNKNOWN else "NUMA node"
    return _Place((node.name,), node.package, title, tuple(lines), elements)


def _limited(items: Sequence[TreeElement]) -> tuple[TreeElement, ...]:
    if len(items) <= _MAX_ITEMS:
        return tuple(items)
    rest = items[_MAX_ITEMS - 1 :]
    names = tuple(name for item in rest for name in item.names)
    more = TreeElement("other", names, f"and {len(rest)} more")
    return (*items[: _MAX_ITEMS - 1], more)


def _lay_out_places(places: Sequence[_Place]) -> SvgBlock:
    blocks: list[SvgBlock] = []
    for package, group in groupby(places, key=lambda place: place.package):
        own = [_lay_out_place(place) for place in group]
        blocks += own if package == UNKNOWN else [_socket(package, own)]
    width = _even_width(blocks)
    even = [
        _stretched(block, max(other.height for other in row))
        for row in rows_of(blocks, width)
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
    num_rows = len(rows_of(blocks, MAX_WIDTH))
    total = sum(block.width + GAP for block in blocks)
    width = max([total / max(1, num_rows), *(block.width for block in blocks)])
    while width < MAX_WIDTH and len(rows_of(blocks, width)) > num_rows:
        width += ITEM_WIDTH / 4
    return min(width, MAX_WIDTH)


def _socket(package: int, blocks: Sequence[SvgBlock]) -> SvgBlock:
    inner = flow(blocks, MAX_WIDTH - 2 * PAD).moved(PAD, _SOCKET_HEAD)
    width, height = inner.width + 2 * PAD, inner.height + _SOCKET_HEAD + PAD
    shapes = (
        SvgBox(0, 0, width, height, "socket"),
        Words(PAD, _SOCKET_HEAD - 6, f"Socket {package}", "dim"),
    )
    return SvgBlock(width, height, shapes + inner.shapes, inner.marks)


def _lay_out_place(place: _Place) -> SvgBlock:
    body = flow(
        [_lay_out_item(item) for item in _limited(place.elements)], MAX_WIDTH - 4 * PAD
    )
    width = max(body.width, ITEM_WIDTH) + 2 * PAD
    head = PAD + _HEAD_LINES + LINE * len(place.lines)
    height = head + (body.height + GAP if place.elements else 0) + PAD
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


def _lay_out_item(item: TreeElement) -> SvgBlock:
    columns = _columns(item.below)
    row_width = sum(column.width + GAP for column, _ in columns) - GAP
    row_height = max((column.height for column, _ in columns), default=0.0)
    width = max(ITEM_WIDTH, row_width + _SPINE)
    item = _with_room(item, width)
    height = 2 * PAD + LINE * (1 + len(item.details)) - 4
    shapes, box = _draw_box(item, width, height)
    marks = [(name, box) for name in item.names]
    x = _SPINE
    for column, heads in columns:
        # Lines from this box to those that hang in a column below it.
        left, top = x - _SPINE / 2, height + GAP
        shapes.append(Stroke(left, height, left, top + heads[-1]))
        shapes += [Stroke(left, top + y, x, top + y) for y in heads]
        moved = column.moved(x, height + GAP)
        shapes += moved.shapes
        marks += moved.marks
        x += column.width + GAP
    total = height + (row_height + GAP if columns else 0.0)
    return SvgBlock(width, total, tuple(shapes), tuple(marks))


def _columns(items: Sequence[TreeElement]) -> list[tuple[SvgBlock, tuple[float, ...]]]:
    """Return columns, each with where its boxes begin: one of ends, one a switch."""
    items = _limited(items)
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
        columns.append((join_blocks(placed, ITEM_WIDTH, y - GAP / 2), tuple(heads)))
    columns += [(fork, (PAD + LINE / 2,)) for fork in forks]
    return columns


def _with_room(item: TreeElement, width: float) -> TreeElement:
    """Return an item whose first line fits: its end goes below where it does not."""
    first = width_of(item.title, "name") + width_of(item.bus_id)
    if not item.bus_id or first + 3 * PAD <= width:
        return item
    return item._replace(bus_id="", details=(item.bus_id, *item.details))


def _draw_box(
    item: TreeElement, width: float, height: float
) -> tuple[list[Shape], SvgBox]:
    whole = clean("\n".join((f"{item.title} {item.bus_id}".strip(), *item.details)))
    box = SvgBox(0, 0, width, height, item.kind, whole)
    inner = width - 2 * PAD
    shapes: list[Shape] = [box]
    shapes.append(Words(PAD, PAD + 10, fit(item.title, inner, "name"), "name"))
    if item.bus_id:
        aside = fit(item.bus_id, inner)
        shapes.append(Words(width - PAD, PAD + 10, aside, "dim", "end"))
    for number, line in enumerate(item.details, 1):
        y = PAD + LINE * number + 9
        shapes.append(Words(PAD, y, fit(line, inner)))
    return shapes, box


def _draw_fabrics(host: HostTopology, width: float) -> list[SvgBlock]:
    blocks: list[SvgBlock] = []
    nodes = [node for node in host.numa_nodes if node.cpus and node.vendor]
    rates = {smp_gb_per_s(a, b) for a in nodes for b in nodes if a.number != b.number}
    if len(rates) == 1:
        blocks.append(_bar(f"Between NUMA nodes: {rates.pop():g} GB/s", width))
    for kind in _FABRICS:
        if pairs := _pairs(host, kind):
            title, words = LINK_TITLES[kind], _uniform(host, pairs)
            block = _bar(f"{title}: {words}", width) if words else None
            blocks.append(block or _table(host, title, pairs))
    # A source may know of pairs alone, and nothing of links.
    words = {each.path for each in host.relations if each.path[:2] == "NV"}
    if words and not any(link.kind in _FABRICS for link in host.links):
        kinds = ", ".join(sorted(words)[:8])
        blocks.append(_bar(f"NVLink: between GPUs by nvidia-smi: {kinds}", width))
    return blocks


def _pairs(host: HostTopology, kind: LinkKind) -> _Pairs:
    gpus = {gpu.name: gpu for gpu in host.gpus}
    pairs: _Pairs = {}
    unknown: set[tuple[str, str]] = set()
    for link in host.links:
        if link.kind == kind and link.source in gpus:
            is_switch = link.target not in gpus and is_nvlink_switch(link)
            key = (link.source, NVSWITCH if is_switch else link.target)
            count, rate = pairs.get(key, (0, 0.0))
            more = link_gb_per_s(link, gpus[link.source])
            # Rounded, for the order of the links is to make no difference.
            rate = round(rate + more, 3)
            pairs[key] = (count + max(0, link.num_links), rate)
            unknown |= set() if is_link_known(link, gpus[link.source]) else {key}
    return {key: (n, 0.0 if key in unknown else r) for key, (n, r) in pairs.items()}


def _uniform(host: HostTopology, pairs: _Pairs) -> str:
    """Return what holds for all GPUs alike; empty where they differ."""
    values = set(pairs.values())
    if len(values) != 1:
        return ""
    count, rate = values.pop()
    words = [f"{count} links" if count else "", f"{rate:.4g} GB/s" if rate else ""]
    what = ", ".join(word for word in words if word)
    names = {gpu.name for gpu in host.gpus}
    numbers = format_list(sorted({gpu.number for gpu in host.gpus}))
    all_gpus = f"every GPU ({numbers})"
    if pairs.keys() == {(name, NVSWITCH) for name in names}:
        return f"{all_gpus} to the NVLink switches, {what}"
    if pairs.keys() == {(a, b) for a in names for b in names if a != b}:
        return f"{all_gpus} to every other, {what} each"
    return ""


def _bar(text: str, width: float) -> SvgBlock:
    height = LINE + PAD
    shapes = (
        SvgBox(0, 0, width, height, "fabric", text),
        Words(PAD, PAD + 8, fit(text, width - 2 * PAD, "name"), "name"),
    )
    return SvgBlock(width, height, shapes)


def _table(host: HostTopology, title: str, pairs: _Pairs) -> SvgBlock:
    gpus = host.gpus[:_MAX_GPUS]
    others = sorted({b for _, b in pairs} - {gpu.name for gpu in host.gpus})[:4]
    columns = [(gpu.name, f"GPU {gpu.number}") for gpu in gpus]
    columns += [(name, "switches" if name == NVSWITCH else name) for name in others]
    most = max(rate for _, rate in pairs.values())
    head = f"{title} from GPU to GPU: links"
    head += ", and GB/s together" if most else ""
    left, top = PAD + _CELL_WIDTH, PAD + LINE + GAP
    width = left + _CELL_WIDTH * len(columns) + PAD
    width = max(width, width_of(head, "name") + 2 * PAD)
    height = top + _CELL_HEIGHT * (len(gpus) + 1) + PAD
    shapes: list[Shape] = [
        SvgBox(0, 0, width, height, "fabric", head),
        Words(PAD, PAD + 9, head, "name"),
    ]
    for place, (_, name) in enumerate(columns):
        x = left + _CELL_WIDTH * (place + 0.5)
        shapes.append(Words(x, top + 14, fit(name, _CELL_WIDTH - 4), "", "middle"))
    for row, gpu in enumerate(gpus):
        y = top + _CELL_HEIGHT * (row + 1)
        shapes.append(Words(PAD, y + 15, f"GPU {gpu.number}"))
        for place, (name, _) in enumerate(columns):
            cell = pairs.get((gpu.name, name))
            is_own = name == gpu.name and cell is None
            x = left + _CELL_WIDTH * place
            shapes += _cell(x, y, cell, most) if not is_own else []
    return SvgBlock(width, height, tuple(shapes))


def _cell(
    x: float, y: float, value: tuple[int, float] | None, most: float
) -> list[Shape]:
    if value is None:
        return [SvgBox(x, y, _CELL_WIDTH, _CELL_HEIGHT, "cell")]
    count, rate = value
    shade = 1 + min(2, int(3 * rate / most)) if most > 0 else 1
    text = fit(f"{count} · {rate:.4g}" if rate else f"{count}", _CELL_WIDTH - 4)
    return [
        SvgBox(x, y, _CELL_WIDTH, _CELL_HEIGHT, f"cell{shade}"),
        Words(x + _CELL_WIDTH / 2, y + 15, text, "", "middle"),
    ]
