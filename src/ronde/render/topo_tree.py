"""A topology as a tree of text: NUMA nodes, bridges, GPUs and adapters at them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ronde.render.topo_words import (
    is_speed_told,
    rate_words,
    words_without_device,
)
from ronde.render.value_runs import format_runs
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
from ronde.topology.limits.host import find_ways, known_gb_per_s
from ronde.topology.paths.speeds import (
    is_link_known,
    is_pci_known,
    link_gb_per_s,
    pci_gb_per_s,
    smp_gb_per_s,
)
from ronde.topology.pci import is_nvswitch
from ronde.units import format_size

_NVSWITCH_CLASS = 0x0680
_MAX_CPUS_CHARACTERS = 40
_LINK_TITLES = {
    LinkKind.NVLINK: "NVLink",
    LinkKind.XGMI: "xGMI",
    LinkKind.C2C: "C2C",
}


class _Branch(NamedTuple):
    """A line of the tree: what it is, what there is to say of it, what is below."""

    title: str
    details: str
    below: "tuple[_Branch, ...]" = ()


def draw_tree(topology: Topology) -> str:
    """Return a topology as text for people; hosts that look alike are drawn once.

    Bandwidths are of one direction in GB/s, as NCCL counts.
    """
    names: dict[str, list[str]] = {}
    for number, host in enumerate(topology.hosts):
        names.setdefault(_draw_host(host), []).append(host.name or f"host {number}")
    blocks = [
        f"{_title(own)}: {body}" if body else _title(own) for body, own in names.items()
    ]
    if topology.switches:
        blocks.append(_draw_switches(topology.switches))
    return "\n".join(blocks)


def _title(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{len(names)} hosts alike ({format_runs(names)})"


def _draw_host(host: HostTopology) -> str:
    branches = [_numa_branch(host, node) for node in host.numa_nodes]
    known = {node.number for node in host.numa_nodes}
    lost = _below_node(host, known, is_known=False)
    if lost:
        branches.append(_Branch("NUMA node unknown", "", lost))
    lines = [_summary(host), *_lines(branches), *_fabric(host), *_bonds(host)]
    lines += [f"note: {remark}" for remark in host.remarks]
    return "\n".join(lines) + "\n"


def _summary(host: HostTopology) -> str:
    cores = sum(len(node.cores) for node in host.numa_nodes)
    cpus = sum(len(node.cpus) for node in host.numa_nodes)
    memory = sum(max(0, node.memory_bytes) for node in host.numa_nodes)
    words = [
        _counted(len(host.numa_nodes), "NUMA node"),
        _cores_words(cores, cpus),
        f"{format_size(memory)} of memory" if memory else "",
        _counted(len(host.gpus), "GPU"),
        _counted(len(host.ports), "network port"),
    ]
    return ", ".join(word for word in words if word)


def _cores_words(num_cores: int, num_cpus: int) -> str:
    if num_cores:
        return _counted(num_cores, "core")
    return _counted(num_cpus, "hardware thread") if num_cpus else ""


def _numa_branch(host: HostTopology, node: NumaNode) -> _Branch:
    cores = len(node.cores)
    memory = node.memory_bytes
    words = [
        _counted(cores, "core") if cores else "",
        _cpus_words(node.cpus),
        format_size(memory) if memory > 0 else "",
        _between_nodes(host, node),
    ]
    below = _below_node(host, {node.number}, is_known=True)
    title = f"NUMA node {node.number}"
    return _Branch(title, ", ".join(word for word in words if word), below)


def _cpus_words(cpus: Sequence[int]) -> str:
    if not cpus:
        return "no CPUs"
    listed = f"CPUs {format_list(cpus)}"
    if len(listed) <= _MAX_CPUS_CHARACTERS:
        return listed
    return f"{len(cpus)} CPUs from {cpus[0]} to {cpus[-1]}"


def _between_nodes(host: HostTopology, node: NumaNode) -> str:
    others = [other for other in host.numa_nodes if other != node and other.cpus]
    rates = {f"{smp_gb_per_s(node, other):g}" for other in others}
    # Without the processor's name there is no figure, but NCCL's word for no limit.
    if not node.vendor or not node.cpus or len(rates) != 1:
        return ""
    return f"{rates.pop()} GB/s to other nodes"


def _below_node(
    host: HostTopology, nodes: set[int], *, is_known: bool
) -> tuple[_Branch, ...]:
    """Return what hangs at some NUMA nodes, or at none of them."""
    listed = {device.bus_id for device in host.devices}
    tops = [
        device
        for device in host.devices
        if device.parent not in listed and (device.node in nodes) is is_known
    ]
    found = [branch for device in tops for branch in _device_branches(host, device)]
    found += [
        _Branch(f"GPU {gpu.number}", _gpu_details(gpu, None))
        for gpu in host.gpus
        if gpu.bus_id not in listed and (gpu.node in nodes) is is_known
    ]
    found += [
        _Branch(port.title, _port_details([port], words_without_device(host, port)))
        for port in host.ports
        if port.bus_id not in listed and (port.node in nodes) is is_known
    ]
    return tuple(found)


def _device_branches(host: HostTopology, device: PciDevice) -> list[_Branch]:
    """Return a device with what is below; a bridge to one thing only is left out."""
    children = [each for each in host.devices if each.parent == device.bus_id]
    own = _own_branches(host, device)
    below = [branch for child in children for branch in _device_branches(host, child)]
    if own:
        return [branch._replace(below=(*branch.below, *below)) for branch in own]
    if len(below) == 1:
        narrow = _pci_words(device)
        tight = [child for child in children if _rate(child) > _rate(device)]
        if tight:
            details = f"{below[0].details}, behind {device.bus_id} {narrow}"
            return [below[0]._replace(details=details)]
        return below
    if not below and children:
        return []
    title, details = "PCI device", _pci_words(device)
    if is_nvswitch(device.class_code, device.vendor):
        title, details = "NVSwitch", details if is_speed_told(device) else ""
    elif below or _is_bridge(device):
        title = "PCI switch"
    return [_Branch(f"{title} {device.bus_id}", details, tuple(below))]


def _own_branches(host: HostTopology, device: PciDevice) -> list[_Branch]:
    """Return what a device is itself: GPUs, or an adapter with its ports."""
    gpus = [gpu for gpu in host.gpus if gpu.bus_id == device.bus_id]
    ports = [port for port in host.ports if port.bus_id == device.bus_id]
    branches = [
        _Branch(f"GPU {gpu.number}  {device.bus_id}", _gpu_details(gpu, device))
        for gpu in gpus
    ]
    if ports:
        names = format_runs([port.title for port in ports])
        names = "" if names == device.bus_id else f"{names}  "
        title = f"NIC {names}{device.bus_id}"
        branches.append(_Branch(title, _port_details(ports, _pci_words(device))))
    return branches


def _gpu_details(gpu: GpuDevice, device: PciDevice | None) -> str:
    kind = f"gfx{gpu.gcn.removeprefix('gfx')}" if gpu.gcn else ""
    if not kind and gpu.sm > 0:
        kind = f"sm {gpu.sm}"
    words = [gpu.title, kind, _pci_words(device) if device else ""]
    return ", ".join(word for word in words if word)


def _port_details(ports: Sequence[NetPort], pci_words: str) -> str:
    rates = [rate_words(port) for port in ports]
    words = [format_runs(rates)] if any(rates) else []
    return ", ".join([*words, pci_words])


def _pci_words(device: PciDevice) -> str:
    rate = f"{_rate(device):.4g} GB/s"
    if device.gb_per_s > 0 and not device.speed:
        return f"PCI {rate}"
    if not is_pci_known(device):
        return "PCI link speed unknown"
    if not is_speed_told(device):
        return f"PCI link speed unknown, counted as {rate}"
    lanes = f" x{device.width}" if device.width > 0 else ""
    speed = device.speed.removesuffix(" PCIe") or "speed unknown"
    return f"PCI {speed}{lanes}, {rate}"


def _rate(device: PciDevice) -> float:
    return pci_gb_per_s(device)


def _is_bridge(device: PciDevice) -> bool:
    return device.class_code >> 16 == 0x06


def _fabric(host: HostTopology) -> Iterator[str]:
    """Yield a line for each kind of direct links, or one a GPU where they differ."""
    titles = {gpu.name: str(gpu.number) for gpu in host.gpus}
    for kind, title in _LINK_TITLES.items():
        told: dict[str, list[str]] = {}
        for gpu in host.gpus:
            links = [k for k in host.links if (k.kind, k.source) == (kind, gpu.name)]
            words = _links_words(gpu, links, titles)
            told.setdefault(words, []).append(titles[gpu.name])
        if list(told) == [""]:
            continue
        for words, own in told.items():
            is_all = len(own) == len(titles) > 1
            yield f"{title}: {'every GPU' if is_all else _gpus(own)}: {words or 'none'}"


def _bonds(host: HostTopology) -> Iterator[str]:
    """Yield a line for each bond, with what its ports carry together."""
    ways = find_ways(host)
    for each in host.interfaces:
        if each.bonding and each.title in ways:
            name, ports = ways[each.title]
            yield f"{name}: {each.bonding}, {known_gb_per_s(ports) * 8:g} Gb/s"


def _links_words(gpu: GpuDevice, links: Sequence[Link], titles: dict[str, str]) -> str:
    """Return to what a GPU's links lead, alike for GPUs in like places."""
    counts: dict[str, int] = defaultdict(int)
    rates: dict[str, float] = defaultdict(float)
    untold: set[str] = set()
    for link in links:
        is_switch = link.target == NVSWITCH or link.target_class >> 8 == _NVSWITCH_CLASS
        target = "NVSwitch" if is_switch else link.target
        counts[target] += link.num_links
        rates[target] += _link_rate(gpu, link)
        untold |= set() if is_link_known(link, gpu) else {target}
    alike: dict[tuple[int, str], list[str]] = {}
    for target, count in counts.items():
        rate = "" if target in untold else f", {rates[target]:g} GB/s"
        alike.setdefault((count, rate), []).append(target)
    return "; ".join(
        f"{count} {'each ' if len(targets) > 1 else ''}to "
        f"{_targets(gpu, targets, titles)}{rate}"
        for (count, rate), targets in alike.items()
    )


def _targets(gpu: GpuDevice, targets: Sequence[str], titles: dict[str, str]) -> str:
    if len(targets) > 1 and {*targets, gpu.name} == titles.keys():
        return "the other GPUs"
    near = [titles[target] for target in targets if target in titles]
    words = [_gpus(near)] if near else []
    words += [target for target in targets if target not in titles]
    if list(targets) == [gpu.name]:
        words = ["itself"]
    return " and ".join(words)


def _gpus(numbers: Sequence[str]) -> str:
    noun = "GPU" if len(numbers) == 1 else "GPUs"
    return f"{noun} {format_list(int(number) for number in numbers)}"


def _link_rate(gpu: GpuDevice, link: Link) -> float:
    return round(link_gb_per_s(link, gpu), 3)


def _draw_switches(switches: Sequence[NetworkSwitch]) -> str:
    by_name = {switch.name: switch for switch in switches}
    below = {name for switch in switches for name in switch.switches}

    def branch(switch: NetworkSwitch) -> _Branch:
        nodes = f"{_counted(len(switch.hosts), 'host')}: {format_runs(switch.hosts)}"
        words = [switch.speed, nodes if switch.hosts else ""]
        children = [by_name[name] for name in switch.switches if name in by_name]
        details = ", ".join(word for word in words if word)
        return _Branch(switch.name, details, tuple(branch(each) for each in children))

    tops = [branch(switch) for switch in switches if switch.name not in below]
    lines = [f"{_counted(len(switches), 'switch')} between hosts", *_lines(tops)]
    return "\n".join(lines) + "\n"


def _lines(branches: Sequence[_Branch]) -> list[str]:
    """Return the lines of a tree, the details in one column."""
    rows = list(_rows(branches))
    width = max((len(text) for text, _ in rows), default=0)
    return [f"{text:{width}}  {details}".rstrip() for text, details in rows]


def _rows(branches: Sequence[_Branch], indent: str = "") -> Iterator[tuple[str, str]]:
    for number, branch in enumerate(branches, 1):
        is_last = number == len(branches)
        yield f"{indent}{'└─ ' if is_last else '├─ '}{branch.title}", branch.details
        yield from _rows(branch.below, indent + ("   " if is_last else "│  "))


def _counted(count: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count or 'no'} {noun}{'' if count == 1 else plural}"
