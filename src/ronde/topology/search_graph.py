"""What NCCL's search for rings and trees has found, from its graph file.

NCCL writes one for ``NCCL_GRAPH_DUMP_FILE`` and follows one that ``NCCL_GRAPH_FILE``
names, without a look at whether it can be.
"""

import re
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.topology.probes.base import Element, Saved, outermost_tag, parse_xml

_PATTERNS = {
    1: "balanced tree",
    2: "split tree",
    3: "tree",
    4: "ring",
    5: "NVLS",
    6: "direct to the network's switches",
}
_HOST_SHIFT = 56
_INTEGER = re.compile(r"[+-]?[0-9]{1,9}"), "a whole number"
_DEVICE = re.compile(r"(?:0[xX])?([0-9a-fA-F]{1,16})"), "a hexadecimal number"
_SPEED = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?"), "a number of GB/s"


class SearchGraph(NamedTuple):
    """One shape with its channels."""

    id: int  # 0 ring, 1 tree, 2 CollNet chain, 3 NVLS, 4 CollNet direct.
    pattern: str  # The shape: ``ring``.
    num_channels: int  # As declared; NCCL may use twice as many.
    intra_gb_per_s: float  # Of a channel, inside the host.
    inter_gb_per_s: float  # Of a channel, to other hosts.
    intra_type: str  # The farthest path type between its GPUs.
    inter_type: str  # The farthest path type between a GPU and its adapter.
    channels: tuple[tuple[str, ...], ...]  # Of each, in order: ``net/0``, ``gpu/7``.


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
    pattern = int(_read(graph, "pattern", _INTEGER))
    return SearchGraph(
        id=int(_read(graph, "id", _INTEGER)),
        pattern=_PATTERNS.get(pattern, f"pattern {pattern}"),
        num_channels=int(_read(graph, "nchannels", _INTEGER)),
        intra_gb_per_s=float(_read(graph, "speedintra", _SPEED)),
        inter_gb_per_s=float(_read(graph, "speedinter", _SPEED)),
        intra_type=graph.get("typeintra"),
        inter_type=graph.get("typeinter"),
        channels=tuple(
            tuple(map(_device, channel.named("gpu", "net")))
            for channel in graph.named("channel")
        ),
    )


def _read(element: Element, name: str, form: tuple[re.Pattern[str], str]) -> str:
    text = element.attributes.get(name, "none")
    if form[0].fullmatch(text.strip()) is None:
        raise element.bad(f"{name} of {element.tag} must be {form[1]}", text)
    return text.strip()


def _device(element: Element) -> str:
    """Return ``gpu/7``; of another host than the file's first, ``gpu/1-7``."""
    host, number = divmod(int(_read(element, "dev", _DEVICE), 16), 1 << _HOST_SHIFT)
    return f"{element.tag}/{host}-{number}" if host else f"{element.tag}/{number}"
