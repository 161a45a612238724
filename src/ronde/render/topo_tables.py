"""Tables of how near elements are: as ``nvidia-smi topo -m``'s, and as NCCL's log's."""

import re
from collections.abc import Iterable, Sequence

from ronde.topology.graph import UNKNOWN
from ronde.topology.paths.classes import UNKNOWN_WORD, ClassTable
from ronde.topology.paths.network import Path, Paths, VertexKind

DEFAULT_CHARS = 80
# A list of CPUs in many pieces is as long as it likes; a table is not.
_MOST_LIST_CHARS = 23
_LEGEND = {
    "X": "itself",
    "SYS": "over PCIe and the links between processors",
    "NODE": "over PCIe and the links between host bridges of one NUMA node",
    "PHB": "over PCIe and a host bridge, within one NUMA node",
    "PXB": "over several PCIe switches and no host bridge",
    "PIX": "over one PCIe switch at most",
    "NV#": "over so many NVLinks",
    "XGMI": "over xGMI",
    UNKNOWN_WORD: "unknown",
}
_LOCAL_BITS = (1 << 56) - 1
_NOTHING = "no GPU and no network adapter\n"
# What NCCL's lines lead from, and what to, in its order.
_SOURCES = (VertexKind.GPU, VertexKind.NET)
_TARGETS = (
    VertexKind.GPU,
    VertexKind.NVS,
    VertexKind.CPU,
    VertexKind.NET,
    VertexKind.DEV,
)


def tabulate_classes(table: ClassTable, num_chars: int = DEFAULT_CHARS) -> str:
    """Return a table that looks and reads like that of ``nvidia-smi topo -m``.

    It ends with what its words mean, of those that occur.

    Args:
        table: The words.
        num_chars: Of a line; what is wider goes on below, under the rows' names again.
    """
    if not table.names:
        return _NOTHING
    cells = [list(row) for row in table.words]
    headings = list(table.labels)
    for heading, column in (
        ("CPU Affinity", [_shorten(text) for text in table.cpus]),
        ("NUMA Affinity", list(table.nodes)),
    ):
        if any(column):
            headings.append(heading)
            for row, text in zip(cells, column, strict=True):
                row.append(text)
    return "\n".join(
        part
        for part in (
            _fold(headings, table.labels, cells, num_chars),
            _tell_titles(table.labels, table.titles),
            _tell_words(word for row in table.words for word in row),
        )
        if part
    )


def tabulate_speeds(
    paths: Paths, table: ClassTable, num_chars: int = DEFAULT_CHARS
) -> str:
    """Return a table of kind and bandwidth of the paths from GPUs, or else from ports.

    Args:
        paths: The paths.
        table: Of the same host, for what is in it and what it is called.
        num_chars: Of a line; what is wider goes on below.
    """
    if not table.names:
        return _NOTHING
    num_gpus = len(table.names) - len(table.titles)
    rows = slice(0, num_gpus or None)
    cells = [
        [
            _tell_speed(paths, paths.between(one, other)) or word
            for other, word in zip(table.names, words, strict=True)
        ]
        for one, words in zip(table.names[rows], table.words[rows], strict=True)
    ]
    told = _fold(table.labels, table.labels[rows], cells, num_chars)
    figures = [cell for row in cells for cell in row if cell != "X"]
    is_lacking = any(" " not in cell for cell in figures)
    note = "; none where unknown" if is_lacking else ""
    return told + f"\nGB/s in one direction, as NCCL counts{note}\n"


def tabulate_paths(paths: Paths) -> str:
    """Return the paths as NCCL writes them to its log, a line a GPU and port.

    Each is told as hops, GB/s and kind: ``GPU/0-c1000 (1/80.0/NVL)``. NCCL itself cuts
    lines after 1023 characters.
    """
    ids = _number(paths)
    lines: list[str] = []
    for source in [n for kind in _SOURCES for n in paths.network.named(kind)]:
        entries = [
            f"{ids[target]} {_tell_hops(paths.between(source, target))}"
            for kind in _TARGETS
            for target in paths.network.named(kind)
        ]
        lines.append(f"{ids[source]} :{' '.join(entries)}\n")
    return "".join(lines)


def _fold(
    headings: Sequence[str],
    labels: Sequence[str],
    cells: Sequence[Sequence[str]],
    num_chars: int,
) -> str:
    """Return columns under headings, with as many beside one another as fit."""
    columns = [
        [heading, *(row[place] for row in cells)]
        for place, heading in enumerate(headings)
    ]
    first = ["", *labels]
    gap = 2 if _width([first, *columns], 2) <= num_chars else 1
    blocks: list[list[list[str]]] = [[first]]
    for column in columns:
        if len(blocks[-1]) > 1 and _width([*blocks[-1], column], gap) > num_chars:
            blocks.append([first])
        blocks[-1].append(column)
    return "\n".join(_align(block, " " * gap) for block in blocks)


def _width(columns: Sequence[Sequence[str]], gap: int) -> int:
    return sum(max(map(len, each)) + gap for each in columns) - gap


def _align(columns: Sequence[Sequence[str]], gap: str) -> str:
    widths = [max(map(len, each)) for each in columns]
    return "".join(
        gap.join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() + "\n"
        for row in zip(*columns, strict=True)
    )


def _shorten(text: str) -> str:
    if len(text) <= _MOST_LIST_CHARS:
        return text
    return text[: text.rfind(",", 0, _MOST_LIST_CHARS - 3) + 1] + "..."


def _tell_titles(labels: Sequence[str], titles: Sequence[str]) -> str:
    shown = zip(labels[len(labels) - len(titles) :], titles, strict=True)
    return "".join(f"  {label}: {title}\n" for label, title in shown)


def _tell_words(words: Iterable[str]) -> str:
    used = {"NV#" if word.startswith("NV") else word for word in words}
    return "".join(f"  {w:<4} = {text}\n" for w, text in _LEGEND.items() if w in used)


def _tell_speed(paths: Paths, path: Path | None) -> str:
    if path is None:
        return ""
    if path.num_hops == 0:
        return "X"
    return f"{path.kind} {path.gb_per_s:.1f}" if paths.is_known(path) else path.kind


def _tell_hops(path: Path | None) -> str:
    if path is None:
        return "(0/0.0/DIS)"
    return f"({path.num_hops}/{path.gb_per_s:.1f}/{path.kind})"


def _number(paths: Paths) -> dict[str, str]:
    """Return what NCCL calls each end of a path: ``GPU/0-3000``, ``NET/0-0``."""
    network = paths.network
    gpus = {each.name: each.number for each in reversed(network.host.gpus)}
    ports = {each.name: each.number for each in reversed(network.host.ports)}
    ids: dict[str, str] = {}
    for kind in _TARGETS:
        for place, name in enumerate(network.named(kind)):
            number = place
            if kind in (VertexKind.GPU, VertexKind.DEV):
                number = _address_number(name.removeprefix("dev/"), gpus)
            elif kind == VertexKind.CPU:
                number = int(name.removeprefix("numa/"))
            elif kind == VertexKind.NET and ports[name] != UNKNOWN:
                number = ports[name]
            ids[name] = f"{kind}/0-{number & _LOCAL_BITS:x}"
    return ids


def _address_number(name: str, numbers: dict[str, int]) -> int:
    """Return the digits of a bus address as one number, else the GPU's own."""
    digits = re.sub(r"[:.]", "", name)
    is_address = re.fullmatch(r"[0-9a-f]{8,16}", digits) is not None
    return int(digits, 16) if is_address else numbers[name]
