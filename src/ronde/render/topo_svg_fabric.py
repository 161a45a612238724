"""Direct links between GPUs -> one bar, or a table where they are not all alike."""

from collections.abc import Sequence

from ronde.render.topo_svg_layout import GAP, LINE, PAD, SvgBlock
from ronde.render.topo_svg_shapes import Shape, SvgBox, Words, fit, width_of
from ronde.topology.cpu_sets import format_list
from ronde.topology.graph import (
    NVSWITCH,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
)
from ronde.topology.paths.speeds import is_link_known, link_gb_per_s, smp_gb_per_s

_TITLES = {LinkKind.NVLINK: "NVLink", LinkKind.XGMI: "xGMI"}
_NVSWITCH_CLASS = 0x0680
_MAX_GPUS = 32
_CELL_WIDTH = 64.0
_CELL_HEIGHT = 22.0


def draw_fabrics(host: HostTopology, width: float) -> list[SvgBlock]:
    """Return what joins NUMA nodes, and what joins GPUs, a block each.

    Args:
        host: Whose links.
        width: Of the drawing.
    """
    blocks = [_bar(_between_nodes(host), width)] if _between_nodes(host) else []
    for kind, title in _TITLES.items():
        pairs = _pairs(host, kind)
        if pairs:
            words = _uniform(host, pairs)
            blocks += [_bar(f"{title}: {words}", width)] if words else []
            blocks += [] if words else [_table(host, title, pairs)]
    if not any(link.kind in _TITLES for link in host.links):
        blocks += [_bar(f"NVLink: {words}", width) for words in _told_pairs(host)]
    return blocks


Pairs = dict[tuple[str, str], tuple[int, float]]
"""Names of a GPU and of what its links lead to -> how many, and GB/s together.

0 GB/s where no source tells it.
"""


def _between_nodes(host: HostTopology) -> str:
    nodes = [node for node in host.numa_nodes if node.cpus and node.vendor]
    rates = {smp_gb_per_s(a, b) for a in nodes for b in nodes if a.number != b.number}
    if len(rates) != 1:
        return ""
    return f"Between NUMA nodes: {rates.pop():g} GB/s"


def _pairs(host: HostTopology, kind: LinkKind) -> Pairs:
    gpus = {gpu.name: gpu for gpu in host.gpus}
    pairs: Pairs = {}
    untold: set[tuple[str, str]] = set()
    for link in host.links:
        if link.kind == kind and link.source in gpus:
            is_switch = link.target not in gpus and _is_switch(link)
            key = (link.source, NVSWITCH if is_switch else link.target)
            count, rate = pairs.get(key, (0, 0.0))
            more = link_gb_per_s(link, gpus[link.source])
            # Rounded, for the order of the links is to make no difference.
            rate = round(rate + more, 3)
            pairs[key] = (count + max(0, link.num_links), rate)
            untold |= set() if is_link_known(link, gpus[link.source]) else {key}
    return {key: (n, 0.0 if key in untold else r) for key, (n, r) in pairs.items()}


def _is_switch(link: Link) -> bool:
    return link.target == NVSWITCH or link.target_class >> 8 == _NVSWITCH_CLASS


def _uniform(host: HostTopology, pairs: Pairs) -> str:
    """Return what holds for all GPUs alike; empty where they differ."""
    values = set(pairs.values())
    if len(values) != 1:
        return ""
    count, rate = values.pop()
    words = [f"{count} links" if count else "", f"{rate:.4g} GB/s" if rate else ""]
    what = ", ".join(word for word in words if word)
    names = {gpu.name for gpu in host.gpus}
    all_gpus = f"every GPU ({_numbers(host.gpus)})"
    if pairs.keys() == {(name, NVSWITCH) for name in names}:
        return f"{all_gpus} to the NVLink switches, {what}"
    if pairs.keys() == {(a, b) for a in names for b in names if a != b}:
        return f"{all_gpus} to every other, {what} each"
    return ""


def _told_pairs(host: HostTopology) -> list[str]:
    """Return what a source says of pairs that tells nothing of links."""
    words = {r.path for r in host.relations if r.path[:2] == "NV"}
    if not words:
        return []
    return [f"between GPUs by nvidia-smi: {', '.join(sorted(words)[:8])}"]


def _bar(text: str, width: float) -> SvgBlock:
    height = LINE + PAD
    shapes = (
        SvgBox(0, 0, width, height, "fabric", text),
        Words(PAD, PAD + 8, fit(text, width - 2 * PAD, "name"), "name"),
    )
    return SvgBlock(width, height, shapes)


def _table(host: HostTopology, title: str, pairs: Pairs) -> SvgBlock:
    """Return a table of GPUs: from those at the left to those above."""
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


def _numbers(gpus: Sequence[GpuDevice]) -> str:
    return format_list(sorted({gpu.number for gpu in gpus}))
