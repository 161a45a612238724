"""A host -> what is to be drawn of it, without places."""

from collections.abc import Sequence
from typing import NamedTuple

from ronde.render.topo_words import (
    is_speed_told,
    rate_words,
    words_without_device,
)
from ronde.render.value_runs import format_runs
from ronde.topology.cpu_sets import format_list
from ronde.topology.graph import (
    UNKNOWN,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    NetPort,
    NumaNode,
    PciDevice,
)
from ronde.topology.paths.speeds import (
    is_link_known,
    is_pci_known,
    link_gb_per_s,
    pci_gb_per_s,
)
from ronde.topology.pci import is_nvswitch
from ronde.units import format_size

MAX_ITEMS = 24
"""At one place; the rest is counted only."""

_MAX_DEPTH = 24
_MAX_PLACES = 64
_MAX_CPUS_CHARACTERS = 22
_LINK_TITLES = {
    LinkKind.NVLINK: "NVLink",
    LinkKind.XGMI: "xGMI",
    LinkKind.C2C: "C2C",
}


class SvgItem(NamedTuple):
    """A box of a drawing, and what hangs below it.

    Attributes:
        kind: ``gpu``, ``nic``, ``switch`` or ``other``.
        names: What findings call it.
        title: Its first line.
        aside: What stands at the end of that line.
        lines: What follows.
        below: What hangs below it.
    """

    kind: str
    names: tuple[str, ...]
    title: str
    aside: str = ""
    lines: tuple[str, ...] = ()
    below: "tuple[SvgItem, ...]" = ()


class SvgPlace(NamedTuple):
    """A NUMA node, or where none is told, and what is at it.

    Attributes:
        names: What findings call it.
        package: Number of its socket; ``UNKNOWN``.
        title: Its first line.
        lines: What follows.
        items: What is at it.
    """

    names: tuple[str, ...]
    package: int
    title: str
    lines: tuple[str, ...]
    items: tuple[SvgItem, ...]


def find_places(host: HostTopology) -> tuple[tuple[SvgPlace, ...], int]:
    """Return the NUMA nodes with their devices, and how many devices are not drawn.

    GPUs, network adapters and NVSwitches are drawn, and bridges where they part.
    """
    tree = _Tree(host)
    nodes = sorted(host.numa_nodes, key=lambda n: (n.package, n.number))
    known = {node.number for node in nodes}
    places = [_place(node, tree.at({node.number}, is_known=True)) for node in nodes]
    if lost := tree.at(known, is_known=False):
        title = "NUMA node unknown" if nodes else "This host"
        places.append(SvgPlace((), UNKNOWN, title, (), lost))
    num_left = sum(tree.is_useless(device) for device in host.devices)
    return _join_alike(places), num_left


def _join_alike(places: Sequence[SvgPlace]) -> tuple[SvgPlace, ...]:
    """Return places, those at the end counted only where they are too many."""
    if len(places) <= _MAX_PLACES:
        return tuple(places)
    left = len(places) - _MAX_PLACES
    rest = SvgPlace((), UNKNOWN, f"{left} more nodes", (), ())
    return (*places[:_MAX_PLACES], rest)


def _place(node: NumaNode, items: tuple[SvgItem, ...]) -> SvgPlace:
    lines = [f"{node.vendor} {node.arch}".strip()] if node.vendor or node.arch else []
    if node.cpus:
        cores = len(node.cores)
        counted = f"{cores} cores, " if cores else ""
        lines += [f"{counted}{len(node.cpus)} CPUs", f"CPUs {_cpus_words(node.cpus)}"]
    else:
        lines.append("no CPUs")
    if node.memory_bytes > 0:
        lines.append(f"{format_size(node.memory_bytes)} of memory")
    title = f"NUMA node {node.number}" if node.number != UNKNOWN else "NUMA node"
    return SvgPlace((node.name,), node.package, title, tuple(lines), items)


def _cpus_words(cpus: Sequence[int]) -> str:
    listed = format_list(cpus)
    if len(listed) <= _MAX_CPUS_CHARACTERS:
        return listed
    return f"from {cpus[0]} to {cpus[-1]}"


class _Tree:
    """Looks up what is below what."""

    def __init__(self, host: HostTopology) -> None:
        self._host = host
        self._listed = {device.bus_id for device in host.devices}
        self._children: dict[str, list[PciDevice]] = {}
        self._gpus: dict[str, list[GpuDevice]] = {}
        self._ports: dict[str, list[NetPort]] = {}
        self._links: dict[tuple[LinkKind, str], list[Link]] = {}
        for link in host.links:
            self._links.setdefault((link.kind, link.source), []).append(link)
        for device in host.devices:
            above = device.parent if device.parent in self._listed else ""
            self._children.setdefault(above, []).append(device)
        for gpu in host.gpus:
            self._gpus.setdefault(gpu.bus_id, []).append(gpu)
        for port in host.ports:
            self._ports.setdefault(port.bus_id, []).append(port)

    def at(self, nodes: set[int], *, is_known: bool) -> tuple[SvgItem, ...]:
        """Return what is at some NUMA nodes, or at none of them."""
        tops = [d for d in self._children.get("", []) if (d.node in nodes) is is_known]
        items = [item for top in tops for item in self._items(top, 0)]
        items += [
            self._gpu(gpu, None)
            for gpu in self._host.gpus
            if gpu.bus_id not in self._listed and (gpu.node in nodes) is is_known
        ]
        items += [
            _nic([port], words_without_device(self._host, port))
            for port in self._host.ports
            if port.bus_id not in self._listed and (port.node in nodes) is is_known
        ]
        return _limited(items)

    def is_useless(self, device: PciDevice) -> bool:
        """Return whether a device is at the end of the tree, and not drawn."""
        return not self._children.get(device.bus_id) and not self._own(device)

    def _own(self, device: PciDevice) -> list[SvgItem]:
        """Return what a device is itself."""
        items = [self._gpu(gpu, device) for gpu in self._gpus.get(device.bus_id, [])]
        if ports := self._ports.get(device.bus_id):
            items.append(_nic(ports, _pci_words(device)))
        if is_nvswitch(device.class_code, device.vendor):
            lines = (_pci_words(device),) if is_speed_told(device) else ()
            title, aside = "NVSwitch", device.bus_id
            items.append(SvgItem("other", (device.bus_id,), title, aside, lines))
        return items

    def _items(self, device: PciDevice, depth: int) -> list[SvgItem]:
        """Return a device with what is below; bridges to one thing are left out."""
        below = [
            item
            for child in self._children.get(device.bus_id, [])
            for item in (self._items(child, depth + 1) if depth < _MAX_DEPTH else [])
        ]
        if own := self._own(device):
            return [*own[:-1], own[-1]._replace(below=_limited(below))]
        if len(below) == 1:
            return [self._behind(device, below[0])]
        if not below:
            return []
        lines = (_pci_words(device),)
        names, title = (device.bus_id,), "PCI switch"
        return [SvgItem("switch", names, title, device.bus_id, lines, _limited(below))]

    def _behind(self, bridge: PciDevice, item: SvgItem) -> SvgItem:
        """Return the one thing behind a bridge; said where the bridge is narrower."""
        children = self._children.get(bridge.bus_id, [])
        rates = [pci_gb_per_s(child) for child in children]
        names = (*item.names, bridge.bus_id)
        if max(rates) <= pci_gb_per_s(bridge):
            return item._replace(names=names)
        lines = (*item.lines, f"behind {bridge.bus_id}:", _pci_words(bridge))
        return item._replace(names=names, lines=lines)

    def _gpu(self, gpu: GpuDevice, device: PciDevice | None) -> SvgItem:
        kind = gpu.title or (f"gfx{gpu.gcn.removeprefix('gfx')}" if gpu.gcn else "")
        if not kind and gpu.sm > 0:
            kind = f"sm {gpu.sm}"
        lines = [kind, _pci_words(device) if device else ""]
        for link_kind, title in _LINK_TITLES.items():
            links = self._links.get((link_kind, gpu.name), [])
            if links:
                lines.append(f"{title} {_links_words(gpu, links)}")
        said = tuple(line for line in lines if line)
        return SvgItem("gpu", (gpu.name,), f"GPU {gpu.number}", gpu.bus_id, said)


def _links_words(gpu: GpuDevice, links: Sequence[Link]) -> str:
    count = sum(max(0, link.num_links) for link in links)
    if not all(is_link_known(link, gpu) for link in links):
        return f"{count} link{'' if count == 1 else 's'}"
    rate = sum(link_gb_per_s(link, gpu) for link in links)
    told = f"{count} links, " if count > 1 else ""
    return f"{told}{rate:.4g} GB/s"


def _nic(ports: Sequence[NetPort], pci_words: str) -> SvgItem:
    rates = [rate_words(port) for port in ports]
    kinds = sorted({port.kind for port in ports if port.kind})
    lines = [format_runs(rates), " ".join(kinds), pci_words]
    bus_id = ports[0].bus_id
    title = format_runs([port.title for port in ports])
    title = "NIC" if title == bus_id else title
    names = (*(port.name for port in ports), *([bus_id] if bus_id else []))
    said = tuple(line for line in lines if line)
    return SvgItem("nic", names, title, bus_id, said)


def _pci_words(device: PciDevice) -> str:
    gb_per_s = pci_gb_per_s(device)
    rate = f"{gb_per_s:.2g} GB/s" if gb_per_s < 1 else f"{gb_per_s:.4g} GB/s"
    if device.gb_per_s > 0 and not device.speed:
        return f"PCI {rate}"
    lanes = f"x{device.width} " if device.width > 0 else ""
    speed = device.speed.removesuffix(" PCIe").removesuffix(" GT/s").removesuffix(".0")
    if not is_pci_known(device):
        return "PCI unknown"
    if not speed:
        return f"PCI {lanes}unknown: {rate}"
    return f"PCI {lanes}{speed} GT/s: {rate}"


def _limited(items: Sequence[SvgItem]) -> tuple[SvgItem, ...]:
    if len(items) <= MAX_ITEMS:
        return tuple(items)
    rest = items[MAX_ITEMS - 1 :]
    names = tuple(name for item in rest for name in item.names)
    more = SvgItem("other", names, f"and {len(rest)} more")
    return (*items[: MAX_ITEMS - 1], more)
