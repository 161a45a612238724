"""What a host tells of each of its elements, as facts that can be compared."""

from collections import Counter
from typing import NamedTuple

from ronde.topology.cpu_sets import format_list
from ronde.topology.graph import (
    UNKNOWN,
    GpuDevice,
    HostTopology,
    LinkKind,
    NetPort,
    PciDevice,
)
from ronde.topology.paths.speeds import (
    is_link_told,
    link_gb_per_s,
    pci_gb_per_s,
    port_gb_per_s,
)

_GIB = 2**30
_NEARLY = 0.02
_GDR = {0: "off", 1: "on"}


class Fact(NamedTuple):
    """One fact on an element.

    Attributes:
        name: For people: ``PCI link``.
        value: Empty where nothing is told.
        gb_per_s: NCCL's figure where it is a bandwidth; else 0.
        amount: Of what is never quite alike; else 0.
    """

    name: str
    value: str
    gb_per_s: float = 0.0
    amount: float = 0.0

    def differs_from(self, other: "Fact") -> bool:
        """Return whether both are told, and not alike or nearly so."""
        if not self.value or not other.value:
            return False
        if self.amount and other.amount:
            return abs(self.amount - other.amount) > _NEARLY * self.amount
        return self.value != other.value


def gpu_facts(host: HostTopology) -> dict[str, tuple[Fact, ...]]:
    """Return what is told of each GPU, by name."""
    devices = {device.bus_id: device for device in host.devices}
    return {
        gpu.name: (
            Fact("chip", (gpu.gcn and f"gfx{gpu.gcn}") or _number("sm {}", gpu.sm)),
            *_place_facts(devices, gpu.bus_id, gpu.node),
            _direct_links(host, gpu),
            Fact("GPUDirect RDMA", _GDR.get(gpu.gdr, "")),
        )
        for gpu in host.gpus
    }


def port_facts(host: HostTopology) -> dict[str, tuple[Fact, ...]]:
    """Return what is told of each network port, by name."""
    devices = {device.bus_id: device for device in host.devices}
    return {
        port.name: (
            Fact("port", port.title),
            *_place_facts(devices, port.bus_id, port.node),
            Fact(
                "network speed",
                f"{port.mbit_per_s} Mb/s" if port.mbit_per_s else "",
                port_gb_per_s(port) if port.mbit_per_s else 0.0,
            ),
            Fact("state", _state(port)),
            Fact("GPUDirect RDMA", _GDR.get(port.gdr, "")),
        )
        for port in host.ports
    }


def node_facts(host: HostTopology) -> dict[str, tuple[Fact, ...]]:
    """Return what is told of each NUMA node, by name."""
    return {
        node.name: (
            Fact("CPUs", _cpus(node.cpus)),
            _memory(node.memory_bytes),
            Fact("processor", _processor(node.vendor, node.family, node.model)),
            Fact(
                "distances",
                " ".join(f"{other}:{far}" for other, far in node.distances),
            ),
        )
        for node in host.numa_nodes
    }


def _place_facts(
    devices: dict[str, PciDevice], bus_id: str, own_node: int
) -> tuple[Fact, ...]:
    """Return where a device sits, and by what links it is joined to the processor."""
    device = devices.get(bus_id)
    if device is None:
        return (
            Fact("bus address", bus_id),
            Fact("NUMA node", _number("{}", own_node)),
        )
    above: list[PciDevice] = []
    bridge = devices.get(device.parent)
    while bridge and bridge not in above:
        above.append(bridge)
        bridge = devices.get(bridge.parent)
    node = next((d.node for d in (device, *above) if d.node != UNKNOWN), own_node)
    links = [_link(each) for each in above]
    return (
        Fact("bus address", bus_id),
        Fact("NUMA node", _number("{}", node)),
        Fact("PCI link", _link(device), _told_rate(device)),
        Fact(
            "links above",
            ", ".join(link or "?" for link in links) or (_link(device) and "none"),
            min((rate for each in above if (rate := _told_rate(each))), default=0.0),
        ),
    )


def _direct_links(host: HostTopology, gpu: GpuDevice) -> Fact:
    counts: Counter[LinkKind] = Counter()
    own = [link for link in host.links if link.source == gpu.name]
    for link in own:
        counts[link.kind] += link.num_links
    is_told = all(is_link_told(link, gpu) for link in own)
    rate = sum(link_gb_per_s(link, gpu) for link in own) if is_told else 0.0
    value = ", ".join(f"{num} {kind}" for kind, num in sorted(counts.items()))
    # Where others have links, to have none is a fact as well.
    is_missing = not value and any(link.kind != LinkKind.PCI for link in host.links)
    return Fact("GPU links", "none" if is_missing else value, rate)


def _link(device: PciDevice) -> str:
    if device.speed or device.width >= 0:
        lanes = f" x{device.width}" if device.width >= 0 else ""
        return f"{device.speed or 'no speed'}{lanes}"
    return f"{device.gb_per_s:g} GB/s" if device.gb_per_s else ""


def _told_rate(device: PciDevice) -> float:
    return pci_gb_per_s(device) if _link(device) else 0.0


def _state(port: NetPort) -> str:
    # Where none is told, a port counts as up.
    is_told = port.mbit_per_s or not port.is_up
    return ("up" if port.is_up else "down") if is_told else ""


def _cpus(cpus: tuple[int, ...]) -> str:
    return f"{len(cpus)} ({format_list(cpus)})" if cpus else ""


def _memory(size_bytes: int) -> Fact:
    if size_bytes <= 0:
        return Fact("memory", "")
    return Fact("memory", f"{size_bytes / _GIB:.1f} GiB", amount=size_bytes)


def _processor(vendor: str, family: int, model: int) -> str:
    numbers = _number("family {}", family), _number("model {}", model)
    return " ".join(part for part in (vendor, *numbers) if part)


def _number(words: str, number: int) -> str:
    return words.format(number) if number != UNKNOWN else ""
