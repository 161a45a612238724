"""Which GPUs of a host direct links join, and what the slowest one's carry."""

from collections.abc import Sequence
from typing import NamedTuple

from ronde.topology.graph import GpuDevice, HostTopology, Link, LinkKind
from ronde.topology.limits.link_rates import count_links, direct_figures
from ronde.topology.limits.world import Rate

_NAMES = {LinkKind.NVLINK: "NVLinks", LinkKind.XGMI: "xGMI links"}
_SWITCHES = ""
"""Stands for all switches of a host, which are one to GPUs."""


class Mesh(NamedTuple):
    """Direct links among some GPUs.

    Attributes:
        islands: Names of GPUs that are joined, over any number of hops; each GPU is in
            one, alone where nothing joins it.
        slowest: The way out of the GPU with the least; 0 GB/s where a source does not
            tell.
        has_switches: Links lead to switches.
    """

    islands: tuple[frozenset[str], ...]
    slowest: Rate
    has_switches: bool


def mesh_of(host: HostTopology, gpus: Sequence[GpuDevice]) -> Mesh:
    """Return what joins GPUs of a host; links to its other GPUs do not count.

    A GPU has direct links of one kind.

    Args:
        host: Where they are.
        gpus: At least one.
    """
    known = {gpu.name for gpu in host.gpus}
    used = {gpu.name for gpu in gpus}
    links = [
        link._replace(target=link.target if link.target in known else _SWITCHES)
        for link in host.links
        if link.kind in _NAMES and link.source in used and link.source != link.target
    ]
    links = [link for link in links if link.target in {*used, _SWITCHES}]
    ways = [_way_out(gpu, links) for gpu in gpus]
    slowest = min(ways, key=lambda way: way.gb_per_s)
    has_switches = any(link.target == _SWITCHES for link in links)
    return Mesh(_islands(used, links), slowest, has_switches)


def _way_out(gpu: GpuDevice, links: Sequence[Link]) -> Rate:
    # Some sources tell of a link at one of its ends.
    own = [link for link in links if link.source == gpu.name]
    own = own or [link for link in links if link.target == gpu.name]
    if not own:
        return Rate("no direct links", 0.0)
    figures = direct_figures(gpu, own)
    name = f"{count_links(gpu, own)} {_NAMES[own[0].kind]}"
    return Rate(f"{name}, {figures.theory:.4g} GB/s a GPU", *figures)


def _islands(gpus: set[str], links: Sequence[Link]) -> tuple[frozenset[str], ...]:
    islands = [{gpu} for gpu in gpus]
    for link in links:
        ends = {link.source, link.target}
        joined = [island for island in islands if island & ends]
        islands = [island for island in islands if not island & ends]
        islands.append(ends.union(*joined))
    return tuple(frozenset(island - {_SWITCHES}) for island in islands)
