"""PCI devices, GPUs and network ports from hwloc's XML."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ronde.topology.graph import UNKNOWN, GpuDevice, NetPort, PciDevice
from ronde.topology.probes.hwloc_objects import (
    HwlocObject,
    cpus_of,
    decimal_of,
)
from ronde.topology.probes.nvidia_models import compute_capability
from ronde.topology.probes.pci_kinds import is_gpu, plain_address
from ronde.topology.probes.refusals import bad_value
from ronde.topology.xml_tree import Element

_GPU_BACKENDS = ("CUDA", "NVML", "RSMI", "LevelZero")
_UUIDS = ("NVIDIAUUID", "AMDUUID", "LevelZeroUUID")
_TYPE = re.compile(
    r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]"
    r"(?: \[([0-9a-f]{4}):([0-9a-f]{4})\])?(?: [0-9a-f]{2})?(?: ([0-9a-f]{2}))?",
    re.IGNORECASE,
)
_PORT_STATE = re.compile(r"Port([0-9]{1,3})State")
_ACTIVE = "4"


class Locality(NamedTuple):
    """Some buses and the CPUs near them.

    Attributes:
        domain: Of the buses.
        first: Number of the first bus.
        last: Number of the last.
        cpus: As bits.
    """

    domain: int
    first: int
    last: int
    cpus: int


def read_localities(root: Element, origin: str) -> tuple[Locality, ...]:
    """Return which CPUs are near which buses, where it is told apart from the tree.

    Raises:
        UsageError: A number or a set of CPUs cannot be read.
    """
    found: list[Locality] = []
    for each in root.named("pci_locality"):
        words = [each.attributes.get(n, "") for n in ("domain", "bus_min", "bus_max")]
        try:
            domain, first, last = (int(word[:10], 16) for word in words)
        except ValueError:
            raise bad_value(
                origin, each.line, "pci_locality must be of numbered buses", words
            ) from None
        found.append(Locality(domain, first, last, cpus_of(each, origin)))
    return tuple(found)


def read_devices(
    objects: Iterable[HwlocObject],
    near: Callable[[int], int],
    localities: Sequence[Locality],
) -> tuple[PciDevice, ...]:
    """Return all PCI devices and bridges, parents before children.

    Args:
        objects: All of the machine.
        near: Returns the NUMA node of CPUs.
        localities: Asked where the tree does not tell.

    Raises:
        UsageError: Two have the same address, or one's numbers cannot be read.
    """
    found: dict[str, PciDevice] = {}
    for each in objects:
        address = plain_address(each.text("pci_busid"))
        if each.kind not in ("PCIDev", "Bridge") or not address:
            continue
        if address in found:
            raise bad_value(
                each.origin, each.element.line, "pci_busid must be listed once", address
            )
        node = near(each.cpus)
        if node == UNKNOWN:
            node = near(_cpus_near(address, localities))
        found[address] = _device(each, address, node)
    return tuple(found.values())


def read_gpus(
    objects: Iterable[HwlocObject], devices: Sequence[PciDevice]
) -> tuple[GpuDevice, ...]:
    """Return GPUs in the order of the devices, with what their drivers tell."""
    told: dict[str, dict[str, str]] = {}
    for each in objects:
        infos = each.infos() if each.kind == "OSDev" else {}
        if each.bus_id and _backend(each, infos) in _GPU_BACKENDS:
            told.setdefault(each.bus_id, {}).update(infos)
    found: list[GpuDevice] = []
    for device in devices:
        if device.bus_id in told or is_gpu(device.class_code, device.vendor):
            infos = told.get(device.bus_id, {})
            title = infos.get("GPUModel", "")
            found.append(
                GpuDevice(
                    bus_id=device.bus_id,
                    number=len(found),
                    sm=compute_capability(title),
                    title=title,
                    uuid=next((infos[name] for name in _UUIDS if name in infos), ""),
                )
            )
    return tuple(found)


def read_ports(
    objects: Iterable[HwlocObject], near: Callable[[int], int], version: float
) -> tuple[NetPort, ...]:
    """Return network interfaces and each port of RDMA adapters.

    Args:
        objects: All of the machine.
        near: Returns the NUMA node of CPUs.
        version: Of the form, which changed its numbers for sorts of devices with 3.
    """
    found: list[NetPort] = []
    for each in objects:
        if each.kind != "OSDev" or not each.text("name"):
            continue
        is_net, is_rdma = _network_sorts(each, version)
        if is_net or is_rdma:
            port = NetPort(
                title=each.text("name"),
                bus_id=each.bus_id,
                node=UNKNOWN if each.bus_id else near(each.cpus),
                kind="infiniband" if is_rdma else "ethernet",
            )
            found += _rdma_ports(port, each.infos()) if is_rdma else [port]
    return tuple(found)


def _rdma_ports(port: NetPort, infos: dict[str, str]) -> list[NetPort]:
    port = port._replace(guid=infos.get("NodeGUID", ""))
    states = {
        int(match[1]): state
        for name, state in infos.items()
        if (match := _PORT_STATE.fullmatch(name))
    }
    return [
        port._replace(port=number, is_up=state.startswith(_ACTIVE))
        for number, state in sorted(states.items())
    ] or [port]


def _network_sorts(each: HwlocObject, version: float) -> tuple[bool, bool]:
    """Return whether a device is a network interface, and whether an RDMA adapter."""
    sort = each.number("osdev_type")
    if version < 3:
        return sort == 2, sort == 3
    return sort != UNKNOWN and bool(sort & 16), sort != UNKNOWN and bool(sort & 32)


def _backend(each: HwlocObject, infos: dict[str, str]) -> str:
    """Return the library that found a device; each version tells it elsewhere."""
    subtype = each.text("subtype")
    return subtype or infos.get("CoProcType", "") or infos.get("Backend", "")


def _cpus_near(address: str, localities: Sequence[Locality]) -> int:
    domain, bus, _ = address.split(":")
    for each in localities:
        if each.domain == int(domain, 16) and each.first <= int(bus, 16) <= each.last:
            return each.cpus
    return 0


def _device(each: HwlocObject, address: str, node: int) -> PciDevice:
    kind = _TYPE.fullmatch(each.text("pci_type"))
    speed = decimal_of(each.text("pci_link_speed") or "0")
    if kind is None or math.isnan(speed):
        raise bad_value(
            each.origin,
            each.element.line,
            "pci_type must be such as '0302 [10de:20b0] [10de:134f] a1' and "
            "pci_link_speed a number of GB/s",
            [each.text("pci_type"), each.text("pci_link_speed")],
        )
    code, vendor, device, board_vendor, board, interface = kind.groups()
    # Bridges have no board, and zeros stand in its place.
    has_board = int(board_vendor or "0", 16) > 0
    return PciDevice(
        bus_id=address,
        parent=each.bus_id,
        node=node,
        class_code=int(code + (interface or "00"), 16),
        vendor=int(vendor, 16),
        device=int(device, 16),
        subsystem_vendor=int(board_vendor, 16) if has_board else UNKNOWN,
        subsystem_device=int(board, 16) if has_board else UNKNOWN,
        gb_per_s=speed,
    )
