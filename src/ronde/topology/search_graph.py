"""What NCCL's search for rings and trees has found, from its graph file.

NCCL writes one for ``NCCL_GRAPH_DUMP_FILE`` and follows one that ``NCCL_GRAPH_FILE``
names, without a look at whether it can be. The checks follow how NCCL 2.30 reads one.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.plain_values import shorten
from ronde.topology.graph import Diagnostic, Level
from ronde.topology.probes.base import Element, Saved, outermost_tag, parse_xml

PATTERNS = {
    1: "balanced tree",
    2: "split tree",
    3: "tree",
    4: "ring",
    5: "NVLS",
    6: "direct to the network's switches",
}
"""NCCL's numbers of the shapes that it searches for."""

GRAPH_RULES = {
    "channel-count": "another number of channels than are listed",
    "broken-ring": "a ring that leaves a GPU out or has one twice",
    "broken-channel": "a channel of another pattern that does so",
}
"""What is checked: a rule's name and its meaning."""

_RING, _NVLS = 4, 5
_HOST_SHIFT = 56
_INTEGER = re.compile(r"[+-]?[0-9]{1,9}"), "a whole number"
_DEVICE = re.compile(r"(?:0[xX])?([0-9a-fA-F]{1,16})"), "a hexadecimal number"
_SPEED = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?"), "a number of GB/s"
_REMEDY = (
    "Write it anew with NCCL_GRAPH_DUMP_FILE, by the release of NCCL that is to follow "
    "it, or leave out NCCL_GRAPH_FILE."
)


class SearchGraph(NamedTuple):
    """One shape with its channels."""

    id: int  # 0 ring, 1 tree, 2 CollNet chain, 3 NVLS, 4 CollNet direct.
    pattern: int  # NCCL's number of the shape.
    pattern_name: str  # The shape in words.
    is_crossing_nics: bool  # Whether a channel may come back by another adapter.
    num_channels: int  # As declared; NCCL may use twice as many.
    intra_gb_per_s: float  # Of a channel, inside the host.
    inter_gb_per_s: float  # Of a channel, to other hosts.
    intra_type: str  # The farthest path type between its GPUs.
    inter_type: str  # The farthest path type between a GPU and its adapter.
    has_same_channels: bool  # Whether all channels have one order.
    channels: tuple[tuple[str, ...], ...]  # Of each, in order: ``net/0``, ``gpu/7``.
    line: int = 0  # Where it begins in its file.


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
    return tuple(map(_read_graph, root.named("graph")))


def _read_graph(graph: Element) -> SearchGraph:
    def read(element: Element, name: str, form: tuple[re.Pattern[str], str]) -> str:
        text = element.attributes.get(name)
        found = form[0].fullmatch(text.strip()) if text is not None else None
        if not found:
            raise UsageError(
                f"{name} of {element.tag} must be {form[1]}, got "
                f"{'none' if text is None else shorten(text)} at line {element.line} "
                f"of {element.origin}. Write the file anew with NCCL_GRAPH_DUMP_FILE."
            )
        return found[0]

    def device(element: Element) -> str:
        """Return ``gpu/7``; of another host than the file's first, ``gpu/1-7``."""
        host, number = divmod(int(read(element, "dev", _DEVICE), 16), 1 << _HOST_SHIFT)
        return f"{element.tag}/{host}-{number}" if host else f"{element.tag}/{number}"

    number = int(read(graph, "pattern", _INTEGER))
    return SearchGraph(
        id=int(read(graph, "id", _INTEGER)),
        pattern=number,
        pattern_name=PATTERNS.get(number, f"pattern {number}"),
        is_crossing_nics=int(read(graph, "crossnic", _INTEGER)) != 0,
        num_channels=int(read(graph, "nchannels", _INTEGER)),
        intra_gb_per_s=float(read(graph, "speedintra", _SPEED)),
        inter_gb_per_s=float(read(graph, "speedinter", _SPEED)),
        intra_type=graph.get("typeintra"),
        inter_type=graph.get("typeinter"),
        has_same_channels=int(read(graph, "samechannels", _INTEGER)) != 0,
        channels=tuple(
            tuple(map(device, channel.named("gpu", "net")))
            for channel in graph.named("channel")
        ),
        line=graph.line,
    )


def check_search_graphs(graphs: tuple[SearchGraph, ...]) -> tuple[Diagnostic, ...]:
    """Return what NCCL would follow into an error, or what contradicts itself."""
    names = {name for graph in graphs for channel in graph.channels for name in channel}
    gpus = {name for name in names if name.startswith("gpu/")}
    return tuple(
        Diagnostic(
            rule,
            Level.ERROR,
            f"line {graph.line}",
            f"Graph {graph.id} ({graph.pattern_name}): {what}",
            consequence,
            _REMEDY,
        )
        for graph in graphs
        for rule, what, consequence in _check(graph, gpus)
    )


def _check(graph: SearchGraph, gpus: set[str]) -> Iterator[tuple[str, str, str]]:
    num, has = graph.num_channels, len(graph.channels)
    if has != num:
        yield (
            "channel-count",
            f"nchannels is {num}, and {has} channels are listed.",
            "Missing channels all begin at rank 0, and those beyond it are not used.",
        )
    for number, channel in enumerate(graph.channels):
        if faults := _faults(graph, channel, gpus):
            yield (
                "broken-ring" if graph.pattern == _RING else "broken-channel",
                f"Channel {number} {faults}.",
                "NCCL follows it as it stands: it hangs, or fails at the connections.",
            )
            return  # The first one is enough.


def _faults(graph: SearchGraph, channel: tuple[str, ...], gpus: set[str]) -> str:
    counts = Counter(name for name in channel if name.startswith("gpu/"))
    twice = sorted(name for name, count in counts.items() if count > 1)
    # In a graph of NVLS, all GPUs meet at the switch, and one is named.
    missing = sorted(gpus - counts.keys()) if graph.pattern != _NVLS else []
    num_nets = sum(name.startswith("net/") for name in channel)
    faults = [f"has {name} twice" for name in twice[:1]]
    faults += [f"lacks {name}" for name in missing[:1]]
    faults += [f"has {num_nets} network adapters, not 0 or 2"] * (num_nets > 2)
    return " and ".join(faults)
