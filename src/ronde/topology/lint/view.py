"""What a rule is, and a host as rules ask for it."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ronde.topology.graph import (
    UNKNOWN,
    Diagnostic,
    GpuDevice,
    HostTopology,
    Level,
    Link,
    LinkKind,
    NetPort,
    PciDevice,
)
from ronde.topology.paths.network import Paths, find_paths
from ronde.topology.paths.speeds import pci_gb_per_s


class HostView(NamedTuple):
    """One host with what its elements are to each other."""

    host: HostTopology
    devices: dict[str, PciDevice]  # By bus address.
    gpus: dict[str, GpuDevice]  # Those with a PCI device, by bus address.
    ports: dict[str, list[NetPort]]  # By the bus address of the adapter.
    ends: dict[str, list[PciDevice]]  # GPUs and adapters below each bridge.
    direct_links: dict[str, list[Link]]  # NVLink and xGMI, by the GPU they leave.
    paths: Paths  # Between all GPUs and ports.

    def node_of(self, bus_id: str) -> int:
        """Return the NUMA node of a device, its bridges' where it has none."""
        nodes = (device.node for device in _chain(self.devices, bus_id))
        return next((node for node in nodes if node != UNKNOWN), UNKNOWN)


class Hit(NamedTuple):
    """One element that a rule found to be wrong."""

    element: str
    severity: Level
    what: str
    consequence: str
    has_gb_per_s: float = 0.0
    should_gb_per_s: float = 0.0
    remedy: str = ""  # In place of the rule's.


class Rule(NamedTuple):
    """One thing that may be wrong with a host."""

    name: str  # In findings and options.
    meaning: str  # What it looks for, one line.
    remedy: str
    hits: Callable[[HostView], Iterator[Hit]]

    def find(self, view: HostView) -> Iterator[Diagnostic]:
        for hit in self.hits(view):
            yield Diagnostic(
                self.name,
                hit.severity,
                hit.element,
                hit.what,
                hit.consequence,
                hit.remedy or self.remedy,
                hit.has_gb_per_s,
                hit.should_gb_per_s,
            )


def rule(
    name: str, meaning: str, remedy: str
) -> Callable[[Callable[[HostView], Iterator[Hit]]], Rule]:
    """Make a rule of a function that yields its hits."""
    return lambda hits: Rule(name, meaning, remedy, hits)


def rate_loss(has_gb_per_s: float, should_gb_per_s: float) -> Level:
    """Return how bad it is that bandwidth is lost: an error where most of it is."""
    return Level.ERROR if has_gb_per_s < should_gb_per_s / 2 else Level.WARNING


def view_of(host: HostTopology) -> HostView:
    """Return a host as rules ask for it."""
    devices = {device.bus_id: device for device in host.devices}
    gpus = {gpu.bus_id: gpu for gpu in host.gpus if gpu.bus_id}
    ports: defaultdict[str, list[NetPort]] = defaultdict(list)
    for port in host.ports:
        if port.bus_id:
            ports[port.bus_id].append(port)
    links: defaultdict[str, list[Link]] = defaultdict(list)
    for link in host.links:
        if link.kind in (LinkKind.NVLINK, LinkKind.XGMI):
            links[link.source].append(link)
    ends: defaultdict[str, list[PciDevice]] = defaultdict(list)
    for bus_id in dict.fromkeys([*gpus, *ports]):
        for bridge in _chain(devices, bus_id)[1:]:
            ends[bridge.bus_id].append(devices[bus_id])
    paths = find_paths(host)
    return HostView(host, devices, gpus, dict(ports), dict(ends), dict(links), paths)


def _chain(devices: dict[str, PciDevice], bus_id: str) -> list[PciDevice]:
    chain: list[PciDevice] = []
    device = devices.get(bus_id)
    while device and device not in chain:
        chain.append(device)
        device = devices.get(device.parent)
    return chain


def known_gb_per_s(device: PciDevice) -> float:
    """Return NCCL's figure for the link above a device; 0 if no source has one."""
    is_known = bool(device.speed and device.width > 0) or device.gb_per_s > 0
    return pci_gb_per_s(device) if is_known else 0.0


def gt_per_s(speed: str) -> float:
    """Return the number in front of GT/s; 0 where there is none."""
    match = re.match(r"(\d{1,3}(?:\.\d{1,3})?) ?GT/s", speed)
    return float(match[1]) if match else 0.0
