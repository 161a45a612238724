"""A host with what its elements are to each other, as rules ask for it."""

import re
from collections import defaultdict
from typing import NamedTuple

from ronde.topology.graph import (
    UNKNOWN,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    NetPort,
    PciDevice,
)
from ronde.topology.paths.search import Paths, find_paths
from ronde.topology.paths.speeds import pci_gb_per_s, pci_theory_gb_per_s


class HostView(NamedTuple):
    """One host.

    Attributes:
        host: As the sources have it.
        devices: By bus address.
        gpus: Those with a PCI device, by bus address.
        ports: Ports of network adapters, by the bus address of the adapter.
        ends: GPUs and network adapters below a bridge at any depth, by the bridge.
        direct_links: NVLink and xGMI, by the GPU that they leave.
        paths: Between all GPUs and ports.
    """

    host: HostTopology
    devices: dict[str, PciDevice]
    gpus: dict[str, GpuDevice]
    ports: dict[str, tuple[NetPort, ...]]
    ends: dict[str, tuple[PciDevice, ...]]
    direct_links: dict[str, tuple[Link, ...]]
    paths: Paths


def view_of(host: HostTopology) -> HostView:
    """Return a host as rules ask for it."""
    devices = {device.bus_id: device for device in host.devices}
    ports: defaultdict[str, list[NetPort]] = defaultdict(list)
    for port in host.ports:
        if port.bus_id:
            ports[port.bus_id].append(port)
    links: defaultdict[str, list[Link]] = defaultdict(list)
    for link in host.links:
        if link.kind in (LinkKind.NVLINK, LinkKind.XGMI):
            links[link.source].append(link)
    gpus = {gpu.bus_id: gpu for gpu in host.gpus if gpu.bus_id}
    ends: defaultdict[str, list[PciDevice]] = defaultdict(list)
    for bus_id in [*gpus, *(bus_id for bus_id in ports if bus_id not in gpus)]:
        for bridge in _bridges_above(devices, bus_id):
            ends[bridge].append(devices[bus_id])
    return HostView(
        host=host,
        devices=devices,
        gpus=gpus,
        ports={bus_id: tuple(found) for bus_id, found in ports.items()},
        ends={bus_id: tuple(found) for bus_id, found in ends.items()},
        direct_links={source: tuple(found) for source, found in links.items()},
        paths=find_paths(host),
    )


def told_gb_per_s(device: PciDevice) -> float:
    """Return what NCCL takes the link above a device for; 0 where none was told."""
    is_told = bool(device.speed and device.width > 0) or device.gb_per_s > 0
    return pci_gb_per_s(device) if is_told else 0.0


def physical_gb_per_s(device: PciDevice) -> float:
    """Return what the link above a device can carry; 0 where that was not told."""
    return pci_theory_gb_per_s(device.speed, device.width) or device.gb_per_s


def gt_per_s(speed: str) -> float:
    """Return the number in front of GT/s; 0 where there is none."""
    match = re.match(r"(\d{1,3}(?:\.\d{1,3})?) ?GT/s", speed)
    return float(match[1]) if match else 0.0


def _bridges_above(devices: dict[str, PciDevice], bus_id: str) -> list[str]:
    above: list[str] = []
    device = devices.get(bus_id)
    while device and device.parent and device.parent not in above:
        above.append(device.parent)
        device = devices.get(device.parent)
    return above if bus_id in devices else []


def is_many_noded(host: HostTopology) -> bool:
    """Return whether a host has more than one NUMA node with cores."""
    return sum(1 for node in host.numa_nodes if node.cpus) > 1


def node_of(view: HostView, device: PciDevice) -> int:
    """Return the NUMA node of a device, its bridges' where it has none told."""
    seen: set[str] = set()
    place: PciDevice | None = device
    while place and place.bus_id not in seen:
        if place.node != UNKNOWN:
            return place.node
        seen.add(place.bus_id)
        place = view.devices.get(place.parent)
    return UNKNOWN
