"""What NCCL's search for rings and trees has found, from its graph file.

NCCL writes one for ``NCCL_GRAPH_DUMP_FILE`` and follows one that ``NCCL_GRAPH_FILE``
names, without a look at whether it can be. What is checked is how NCCL 2.30 reads one.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.plain_values import shorten
from ronde.topology.findings import Finding, Severity
from ronde.topology.probes.probe import Saved
from ronde.topology.xml_tree import Element, outermost_tag, parse_xml

PATTERNS = {
    1: "balanced tree",
    2: "split tree",
    3: "tree",
    4: "ring",
    5: "NVLS",
    6: "direct to the network's switches",
}
"""NCCL's numbers of the shapes that it searches for."""
_RING = 4
_NVLS = 5
_KINDS = ("LOC", "NVL", "NVB", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
"""The path types that NCCL reads there; it has no word for C2C."""
_MAX_CHANNELS = 64
_HOST_SHIFT = 56
_INTEGER = re.compile(r"[+-]?[0-9]{1,9}")
_DEVICE = re.compile(r"(?:0[xX])?([0-9a-fA-F]{1,16})")
_SPEED = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?")


class SearchGraph(NamedTuple):
    """One shape with its channels.

    Attributes:
        id: 0 ring, 1 tree, 2 CollNet chain, 3 NVLS, 4 CollNet direct.
        pattern: NCCL's number of the shape.
        pattern_name: The shape in words.
        is_crossing_nics: Whether a channel may leave by one adapter and come back by
            another.
        num_channels: As declared; NCCL may use twice as many.
        intra_gb_per_s: Of a channel, inside the host.
        inter_gb_per_s: Of a channel, to other hosts.
        intra_type: The farthest path type between its GPUs.
        inter_type: The farthest path type between a GPU and its adapter.
        has_same_channels: Whether all channels have one order.
        channels: Names of the elements of each, in order: ``net/0``, ``gpu/7``.
        line: Where it begins in its file.
    """

    id: int
    pattern: int
    pattern_name: str
    is_crossing_nics: bool
    num_channels: int
    intra_gb_per_s: float
    inter_gb_per_s: float
    intra_type: str
    inter_type: str
    has_same_channels: bool
    channels: tuple[tuple[str, ...], ...]
    line: int = 0

    @property
    def gb_per_s(self) -> float:
        """What NCCL takes all channels inside the host for: its estimate of a ring."""
        return self.num_channels * self.intra_gb_per_s


def recognises_search_graph(saved: Saved) -> bool:
    """Return whether a file is NCCL's graph file; quick, and true for damaged ones."""
    return outermost_tag(saved.data) == "graphs"


def read_search_graphs(saved: Saved) -> tuple[SearchGraph, ...]:
    """Return the graphs of a file, in its order.

    Raises:
        UsageError: It is no such file, or a value is missing or cannot be read.
    """
    root = parse_xml(saved.data, saved.name)
    if root.tag != "graphs":
        raise UsageError(
            f"{saved.name} must begin with the element graphs, got {root.tag} at line "
            f"{root.line}. Is it what NCCL wrote for NCCL_GRAPH_DUMP_FILE?"
        )
    return tuple(_read_graph(graph, saved.name) for graph in root.named("graph"))


def check_search_graphs(graphs: tuple[SearchGraph, ...]) -> tuple[Finding, ...]:
    """Return what NCCL would follow into an error, or what contradicts itself."""
    gpus = {name for graph in graphs for name in _gpus_of(graph)}
    return tuple(
        finding
        for graph in graphs
        for check in (_check_count, _check_types, _check_speeds)
        for finding in check(graph)
    ) + tuple(finding for graph in graphs for finding in _check_channels(graph, gpus))


def _read_graph(element: Element, origin: str) -> SearchGraph:
    def integer(name: str) -> int:
        return int(_told(element, name, _INTEGER, "a whole number", origin)[0])

    def speed(name: str) -> float:
        return float(_told(element, name, _SPEED, "a number of GB/s", origin)[0])

    pattern = integer("pattern")
    return SearchGraph(
        id=integer("id"),
        pattern=pattern,
        pattern_name=PATTERNS.get(pattern, f"pattern {pattern}"),
        is_crossing_nics=integer("crossnic") != 0,
        num_channels=integer("nchannels"),
        intra_gb_per_s=speed("speedintra"),
        inter_gb_per_s=speed("speedinter"),
        intra_type=element.attributes.get("typeintra", ""),
        inter_type=element.attributes.get("typeinter", ""),
        has_same_channels=integer("samechannels") != 0,
        channels=tuple(
            tuple(_device(each, origin) for each in channel.named("gpu", "net"))
            for channel in element.named("channel")
        ),
        line=element.line,
    )


def _device(element: Element, origin: str) -> str:
    """Return ``gpu/7``; of another host than the file's first, ``gpu/1-7``."""
    found = _told(element, "dev", _DEVICE, "a hexadecimal number", origin)
    host, number = divmod(int(found[1], 16), 1 << _HOST_SHIFT)
    return f"{element.tag}/{host}-{number}" if host else f"{element.tag}/{number}"


def _told(
    element: Element, name: str, form: re.Pattern[str], what: str, origin: str
) -> re.Match[str]:
    text = element.attributes.get(name)
    found = form.fullmatch(text.strip()) if text is not None else None
    if not found:
        raise UsageError(
            f"{name} of {element.tag} must be {what}, got "
            f"{'none' if text is None else shorten(text)} at line {element.line} of "
            f"{origin}. Write the file anew with NCCL_GRAPH_DUMP_FILE."
        )
    return found


def _gpus_of(graph: SearchGraph) -> list[str]:
    return [
        name
        for channel in graph.channels
        for name in channel
        if name.startswith("gpu/")
    ]


def _check_count(graph: SearchGraph) -> Iterator[Finding]:
    has = len(graph.channels)
    if graph.num_channels > _MAX_CHANNELS:
        yield _finding(
            graph,
            "many-channels",
            f"nchannels is {graph.num_channels}, above NCCL's {_MAX_CHANNELS}.",
            "NCCL writes past the end of its list of channels.",
        )
    elif has != graph.num_channels:
        yield _finding(
            graph,
            "channel-count",
            f"nchannels is {graph.num_channels}, and {has} channels are listed.",
            "NCCL takes the number for granted: channels that are missing all begin at "
            "rank 0, and those beyond it are not used.",
        )


def _check_types(graph: SearchGraph) -> Iterator[Finding]:
    for name, told in (
        ("typeintra", graph.intra_type),
        ("typeinter", graph.inter_type),
    ):
        # NCCL compares beginnings.
        if not told.startswith(_KINDS):
            yield _finding(
                graph,
                "unknown-path-type",
                f"{name} is {shorten(told)}, which NCCL does not read.",
                "NCCL takes it for LOC, the nearest." if told else "NCCL fails at it.",
            )


def _check_speeds(graph: SearchGraph) -> Iterator[Finding]:
    if graph.num_channels > 0 and graph.intra_gb_per_s == 0:
        yield _finding(
            graph,
            "no-speed",
            "speedintra is 0.",
            "NCCL takes it for an algorithm without bandwidth, and chooses another.",
        )


def _check_channels(graph: SearchGraph, gpus: set[str]) -> Iterator[Finding]:
    """Yield what is wrong with the first channel that is not as it must be."""
    for number, channel in enumerate(graph.channels):
        counts = Counter(name for name in channel if name.startswith("gpu/"))
        twice = sorted(name for name, count in counts.items() if count > 1)
        # In a graph of NVLS, all GPUs meet at the switch, and one is named.
        missing = sorted(gpus - counts.keys()) if graph.pattern != _NVLS else []
        nets = [name for name in channel if name.startswith("net/")]
        wrong = [
            *(f"has {name} twice" for name in twice[:1]),
            *(f"lacks {name}" for name in missing[:1]),
            *(
                [f"has {len(nets)} network adapters, not 0 or 2"]
                if len(nets) > 2
                else ()
            ),
        ]
        if wrong:
            yield _finding(
                graph,
                "broken-ring" if graph.pattern == _RING else "broken-channel",
                f"Channel {number} {' and '.join(wrong)}.",
                "NCCL follows it as it stands: it hangs, or fails at the connections.",
            )
            return


def _finding(graph: SearchGraph, rule: str, what: str, consequence: str) -> Finding:
    return Finding(
        rule=rule,
        severity=Severity.ERROR,
        element=f"line {graph.line}",
        what=f"Graph {graph.id} ({graph.pattern_name}): {what}",
        consequence=consequence,
        remedy="Write it anew with NCCL_GRAPH_DUMP_FILE, by the release of NCCL that "
        "is to follow it, or leave out NCCL_GRAPH_FILE.",
    )
