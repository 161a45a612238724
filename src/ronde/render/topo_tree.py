"""Draw a topology as a tree of NUMA nodes, bridges, GPUs and adapters."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ronde.render.text import format_runs
from ronde.topology.cpu_sets import format_list
from ronde.topology.graph import (
    NVSWITCH,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    NetPort,
    NetworkSwitch,
    NumaNode,
    PciDevice,
    Topology,
)
from ronde.topology.limits import find_ways, known_gb_per_s
from ronde.topology.paths import speeds
from ronde.topology.pci import is_nvswitch
from ronde.units import counted, format_size, grouped

_LINK_TITLES = {LinkKind.NVLINK: "NVLink", LinkKind.XGMI: "xGMI", LinkKind.C2C: "C2C"}
_NVSWITCH_CLASS = 0x0680
_MAX_CPUS_CHARACTERS = 40
_MAX_DRAWN_DEPTH = 24


class _Element(NamedTuple):
    title: str  # With its bus address.
    details: Sequence[str]  # Empty ones are left out.
    below: "Sequence[_Element]" = ()


class _ElementTree:
    """The GPUs, adapters, NVSwitches and PCI switches of a host, as a tree."""

    def __init__(self, host: HostTopology) -> None:
        self._host = host
        self._listed = {device.bus_id for device in host.devices}
        self._children = grouped(
            (each.parent if each.parent in self._listed else "", each)
            for each in host.devices
        )
        self._gpus = grouped((gpu.bus_id, gpu) for gpu in host.gpus)
        self._ports = grouped((port.bus_id, port) for port in host.ports)

    def at(self, nodes: set[int], *, is_known: bool) -> list[_Element]:
        """Return the elements at these nodes, or without ``is_known`` all others."""
        tops = [d for d in self._children.get("", []) if (d.node in nodes) is is_known]
        found = [element for top in tops for element in self._below(top, 0)]
        found += [
            _gpu(gpu, "")
            for gpu in self._host.gpus
            if gpu.bus_id not in self._listed and (gpu.node in nodes) is is_known
        ]
        for port in self._host.ports:
            if port.bus_id not in self._listed and (port.node in nodes) is is_known:
                # Hardware has a PCI device, but the source may list none.
                is_paired = port.name in self._host.paired
                is_hardware = port.bus_id or is_paired or not self._listed
                words = "PCI device unknown" if is_hardware else "no PCI device"
                found.append(_nic([port], words))
        return found

    def _own(self, device: PciDevice) -> list[_Element]:
        words, bus_id = _pci_words(device), device.bus_id
        found = [_gpu(gpu, words) for gpu in self._gpus.get(bus_id, [])]
        if ports := self._ports.get(bus_id):
            found.append(_nic(ports, words))
        if is_nvswitch(device.class_code, device.vendor):
            shown = "" if "unknown" in words else words
            found.append(_Element(f"NVSwitch {bus_id}", [shown]))
        return found

    def _below(self, device: PciDevice, depth: int) -> list[_Element]:
        """Return a device with its children; a bridge to one device is left out."""
        children = self._children.get(device.bus_id, [])
        children = children if depth < _MAX_DRAWN_DEPTH else []
        below = [each for child in children for each in self._below(child, depth + 1)]
        if own := self._own(device):
            return [*own[:-1], own[-1]._replace(below=(*own[-1].below, *below))]
        words = _pci_words(device)
        if len(below) != 1:
            switch = _Element(f"PCI switch {device.bus_id}", [words], below)
            return [switch] if below else []
        # Show the bridge if it is slower than the devices behind it.
        if max(map(speeds.pci_gb_per_s, children)) > speeds.pci_gb_per_s(device):
            details = [*below[0].details, f"behind {device.bus_id}", words]
            below = [below[0]._replace(details=details)]
        return below


def _gpu(gpu: GpuDevice, pci_words: str) -> _Element:
    kind = f"sm {gpu.sm}" if gpu.sm > 0 else ""
    kind = f"gfx{gpu.gcn.removeprefix('gfx')}" if gpu.gcn else kind
    title = f"GPU {gpu.number}  {gpu.bus_id}"
    return _Element(title, [gpu.title, kind, pci_words])


def _nic(ports: Sequence[NetPort], pci_words: str) -> _Element:
    title, bus_id = format_runs([port.title for port in ports]), ports[0].bus_id
    name = bus_id if title == bus_id else f"{title}  {bus_id}"
    rates = format_runs([_port_rate(port) for port in ports])
    return _Element(f"NIC {name}", [rates, pci_words])


def _port_rate(port: NetPort) -> str:
    if not port.is_up:
        return "down"
    rate = port.mbit_per_s / 1000
    return f"{rate:g} Gb/s" if rate > 0 else "rate unknown"


def _pci_words(device: PciDevice) -> str:
    if device.is_lost:
        return "does not answer: it has fallen off the PCI bus"
    gb_per_s = speeds.pci_gb_per_s(device)
    rate = f"{gb_per_s:.2g} GB/s" if gb_per_s < 1 else f"{gb_per_s:.4g} GB/s"
    if device.gb_per_s > 0 and not device.speed:
        return f"PCI {rate}"
    if not device.speed and device.width <= 0:
        counted_as = f", counted as {rate}" if speeds.is_pci_known(device) else ""
        return f"PCI link speed unknown{counted_as}"
    now, able = (
        speeds.link_words(each).replace(" PCIe", "")
        for each in (speeds.as_running(device), device)
    )
    ends = "both ends can do" if device.parent else "its most is"
    return f"PCI {now}, {rate}" + (f" ({ends} {able})" if now != able else "")


def draw_tree(topology: Topology) -> str:
    """Return a topology as text; hosts with equal text are drawn once."""
    # Bandwidths are of one direction in GB/s, as NCCL counts.
    names = grouped(
        (_draw_host(host), host.name or f"host {number}")
        for number, host in enumerate(topology.hosts)
    )
    blocks: list[str] = []
    for body, own in names.items():
        alike = f"{len(own)} hosts alike ({format_runs(own)})"
        blocks.append(f"{own[0] if len(own) == 1 else alike}: {body}")
    if topology.switches:
        blocks.append(_draw_switches(topology.switches))
    return "\n".join(blocks)


def _draw_host(host: HostTopology) -> str:
    tree = _ElementTree(host)
    elements = [
        _numa(host, node, tree.at({node.number}, is_known=True))
        for node in host.numa_nodes
    ]
    known = {node.number for node in host.numa_nodes}
    if lost := tree.at(known, is_known=False):
        elements.append(_Element("NUMA node unknown", [], lost))
    lines = [_summary(host), *_lines(elements), *_fabric_lines(host)]
    ways = find_ways(host)
    for each in host.interfaces:
        # The rate of all ports of a bond.
        if each.bonding and each.title in ways:
            name, ports = ways[each.title]
            lines.append(f"{name}: {each.bonding}, {known_gb_per_s(ports) * 8:g} Gb/s")
    lines += [f"note: {remark}" for remark in host.remarks]
    return "\n".join(lines) + "\n"


def _joined(*words: str) -> str:
    return ", ".join(word for word in words if word)


def _summary(host: HostTopology) -> str:
    num_cores = sum(len(node.cores) for node in host.numa_nodes)
    num_cpus = sum(len(node.cpus) for node in host.numa_nodes)
    memory = sum(max(0, node.memory_bytes) for node in host.numa_nodes)
    cores = counted(num_cpus, "hardware thread") if num_cpus else ""
    return _joined(
        counted(len(host.numa_nodes), "NUMA node"),
        counted(num_cores, "core") if num_cores else cores,
        f"{format_size(memory)} of memory" if memory else "",
        counted(len(host.gpus), "GPU"),
        counted(len(host.ports), "network port"),
    )


def _numa(host: HostTopology, node: NumaNode, below: Sequence[_Element]) -> _Element:
    # rocm-smi does not show the nodes' CPUs.
    none = "no CPUs" if any(each.cpus for each in host.numa_nodes) else ""
    cpus = f"CPUs {format_list(node.cpus)}" if node.cpus else none
    if len(cpus) > _MAX_CPUS_CHARACTERS:
        cpus = f"{len(node.cpus)} CPUs from {node.cpus[0]} to {node.cpus[-1]}"
    others = [other for other in host.numa_nodes if other != node and other.cpus]
    rates = {f"{speeds.smp_gb_per_s(node, other):g}" for other in others}
    # Without the processor's name NCCL's figure means no limit.
    is_known = node.vendor and node.cpus and len(rates) == 1
    details = [
        counted(len(node.cores), "core") if node.cores else "",
        cpus,
        format_size(node.memory_bytes) if node.memory_bytes > 0 else "",
        f"{rates.pop()} GB/s to other nodes" if is_known else "",
    ]
    return _Element(f"NUMA node {node.number}", details, below)


def _fabric_lines(host: HostTopology) -> Iterator[str]:
    titles = {gpu.name: str(gpu.number) for gpu in host.gpus}
    for kind, title in _LINK_TITLES.items():
        links = grouped((k.source, k) for k in host.links if k.kind == kind)
        by_words = grouped(
            (_links_words(gpu, links.get(gpu.name, ()), titles), titles[gpu.name])
            for gpu in host.gpus
        )
        is_counted = kind == LinkKind.NVLINK and any(g.nvlinks == 0 for g in host.gpus)
        if list(by_words) == [""] and not is_counted:
            continue
        for words, own in by_words.items():
            is_all = len(own) == len(titles) > 1
            yield f"{title}: {'every GPU' if is_all else _gpus(own)}: {words or 'none'}"


def _links_words(gpu: GpuDevice, links: Sequence[Link], titles: dict[str, str]) -> str:
    """Describe a GPU's links: ``4 each to the other GPUs, 80 GB/s``."""
    by_target: dict[str, list[Link]] = {}
    for link in links:
        is_switch = link.target_class >> 8 == _NVSWITCH_CLASS or link.target == NVSWITCH
        target = "NVSwitch" if is_switch else link.target or "unknown ends"
        by_target.setdefault(target, []).append(link)

    def figures(own: Sequence[Link]) -> tuple[int, str]:
        rate = sum(round(speeds.link_gb_per_s(link, gpu), 3) for link in own)
        is_known = all(speeds.is_link_known(link, gpu) for link in own)
        count = sum(link.num_links for link in own)
        return count, f", {rate:g} GB/s" if is_known else ""

    alike = grouped((figures(own), target) for target, own in by_target.items())
    return "; ".join(
        f"{count} {'each ' if len(targets) > 1 else ''}to "
        f"{_targets(gpu, targets, titles)}{rate}"
        for (count, rate), targets in alike.items()
    )


def _targets(gpu: GpuDevice, targets: Sequence[str], titles: dict[str, str]) -> str:
    if list(targets) == [gpu.name]:
        return "itself"
    if len(targets) > 1 and {*targets, gpu.name} == titles.keys():
        return "the other GPUs"
    near = [titles[target] for target in targets if target in titles]
    far = [each for each in targets if each not in titles]
    return " and ".join([*([_gpus(near)] if near else []), *far])


def _gpus(numbers: Sequence[str]) -> str:
    noun = "GPU" if len(numbers) == 1 else "GPUs"
    return f"{noun} {format_list(int(number) for number in numbers)}"


def _draw_switches(switches: Sequence[NetworkSwitch]) -> str:
    by_name = {switch.name: switch for switch in switches}
    below = {name for switch in switches for name in switch.switches}

    def element(switch: NetworkSwitch) -> _Element:
        nodes = f"{counted(len(switch.hosts), 'host')}: {format_runs(switch.hosts)}"
        children = [by_name[name] for name in switch.switches if name in by_name]
        details = [switch.speed, nodes if switch.hosts else ""]
        return _Element(switch.name, details, [element(each) for each in children])

    tops = [element(switch) for switch in switches if switch.name not in below]
    lines = [f"{counted(len(switches), 'switch')} between hosts", *_lines(tops)]
    return "\n".join(lines) + "\n"


def _lines(elements: Sequence[_Element]) -> list[str]:
    rows = list(_rows(elements))
    width = max((len(text) for text, _ in rows), default=0)
    return [f"{text:{width}}  {details}".rstrip() for text, details in rows]


def _rows(elements: Sequence[_Element], indent: str = "") -> Iterator[tuple[str, str]]:
    for number, each in enumerate(elements, 1):
        is_last = number == len(elements)
        title = f"{indent}{'└─ ' if is_last else '├─ '}{each.title}"
        yield title.rstrip(), _joined(*each.details)
        yield from _rows(each.below, indent + ("   " if is_last else "│  "))
