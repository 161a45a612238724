"""Read the XML of hwloc's ``lstopo``, versions 2 and 3.

hwloc gives the bandwidth of a PCI link, not its speed.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.topology.cpu_sets import MAX_CPU, members, parse_mask
from ronde.topology.graph import (
    UNKNOWN,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    NetPort,
    NumaNode,
    PciDevice,
    Topology,
    nccl_family,
)
from ronde.topology.pci import compute_capability, is_gpu, plain_address
from ronde.topology.probes.base import (
    Element,
    Probe,
    Saved,
    has_root,
    keep_lower_ends,
    parse_xml,
    small_number,
)
from ronde.units import grouped

_NUMBER = re.compile(r"[0-9]{1,18}")
_LINK_KINDS = {"NVLinkBandwidth": LinkKind.NVLINK, "XGMIBandwidth": LinkKind.XGMI}
_ARCHS = {"aarch64": "arm64", "ppc64le": "ppc64"}
_GPU_BACKENDS = ("CUDA", "NVML", "RSMI", "LevelZero")
_UUIDS = ("NVIDIAUUID", "AMDUUID", "LevelZeroUUID")
_TYPE = re.compile(
    r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]"
    r"(?: \[([0-9a-f]{4}):([0-9a-f]{4})\])?(?: [0-9a-f]{2})?(?: ([0-9a-f]{2}))?",
    re.IGNORECASE,
)
_PORT_STATE = re.compile(r"Port([0-9]{1,3})State")
# GB/s per NVLink in hwloc, by compute capability. Source: hwloc's
# ``hwloc/topology-nvml.c``.
_FIRST_NVLINK_SM, _FIRST_NVLINK_GB_PER_S, _NVLINK_GB_PER_S = 60, 20.0, 25.0


def _read(saved: Saved) -> Topology:
    root = parse_xml(saved.data, saved.name, "topology")
    machines = root.named("object")
    if not machines:
        raise UsageError(
            f"{saved.name} describes no machine: its topology has no objects. Write it "
            "with: lstopo file.xml"
        )
    version = _decimal(root.attributes.get("version", "1"))
    if not version >= 2:
        rule = "version must be a number from 2 (lstopo of hwloc 2 writes it)"
        raise root.bad(rule, root.attributes.get("version", "none"))
    # Infos of the whole machine are in it before version 3, then beside it.
    infos = {**_infos(root), **_infos(machines[0])}
    objects = list(_walk(machines[0]))
    nodes = _Nodes(objects, infos)
    devices = _read_devices(objects, nodes)
    gpus = _read_gpus(objects, devices)
    ports = _read_ports(objects, nodes, version)
    ends = {each.bus_id for each in (*gpus, *ports) if each.bus_id}
    host = HostTopology(
        name=infos.get("HostName", ""),
        sources=(f"hwloc XML {saved.name}",),
        numa_nodes=nodes.nodes,
        devices=keep_lower_ends(devices, filter(ends.__contains__, devices)),
        gpus=gpus,
        ports=ports,
        links=tuple(_read_links(root, _names(objects, nodes), gpus)),
    )
    return Topology((host,))


class _Object(NamedTuple):
    element: Element
    kind: str
    cpus: int  # Its CPUs as bits, else those of the nearest object around it.
    package: Element | None  # The package around it.
    bus_id: str  # Its own, else that of the nearest PCI device or bridge around it.
    parent: str  # Of one with an address of its own: the next one around it.


def _walk(machine: Element) -> Iterator[_Object]:
    waiting = [(machine, _Object(machine, "", 0, None, "", ""))]
    while waiting:
        element, around = waiting.pop()
        text, cpus = element.get("pci_busid"), around.cpus
        address = plain_address(text)
        if text and not address:
            rule = "pci_busid must be an address such as 0000:1b:00.0"
            raise element.bad(rule, text)
        if "cpuset" in element.attributes:
            try:
                cpus = parse_mask(element.get("cpuset"))
            except ValueError:
                rule = "cpuset must be words of hexadecimal digits for at most "
                rule += f"{MAX_CPU + 1} CPUs"
                raise element.bad(rule, element.get("cpuset")) from None
        each = _Object(
            element,
            element.get("type"),
            cpus,
            around.element if around.kind == "Package" else around.package,
            address or around.bus_id,
            around.bus_id,
        )
        yield each
        waiting += [(child, each) for child in reversed(element.named("object"))]


def _infos(element: Element) -> dict[str, str]:
    return {info.get("name"): info.get("value") for info in element.named("info")}


def _number(element: Element, name: str) -> int:
    text = element.attributes.get(name, str(UNKNOWN))
    if text != str(UNKNOWN) and not _NUMBER.fullmatch(text):
        raise element.bad(f"{name} must be a whole number", text)
    return int(text)


def _decimal(text: str) -> float:
    """Return a finite number of at least 0; ``nan`` for anything else."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if 0 <= value < math.inf else math.nan


class _Nodes:
    """The NUMA nodes of a machine, with each CPU in only one node.

    If several nodes list a CPU, a node of ordinary memory gets it; of several, the one
    with the fewest CPUs, then the one with the lowest number.
    """

    def __init__(self, objects: Sequence[_Object], infos: Mapping[str, str]) -> None:
        numbered: dict[int, _Object] = {}
        special: set[int] = set()
        for each in (each for each in objects if each.kind == "NUMANode"):
            number = _number(each.element, "os_index")
            if number in numbered or number == UNKNOWN:
                rule = "a NUMANode must have an os_index of its own"
                raise each.element.bad(rule, each.element.get("os_index"))
            numbered[number] = each
            if each.element.get("subtype") not in ("", "DRAM"):
                special.add(number)
        # Without any, all is one node.
        numbered = numbered or {0: objects[0]}
        self._own: dict[int, int] = {}  # CPUs of each that are of no other, as bits.
        taken = 0
        for number in sorted(
            numbered, key=lambda n: (n in special, numbered[n].cpus.bit_count(), n)
        ):
            self._own[number] = numbered[number].cpus & ~taken
            taken |= numbered[number].cpus
        self._owner = {cpu: n for n, own in self._own.items() for cpu in members(own)}
        cores = grouped(
            (self.near(each.cpus), tuple(members(each.cpus)))
            for each in objects
            if each.kind == "Core" and each.cpus
        )
        self.nodes = tuple(
            _node(number, each, infos)._replace(
                cpus=tuple(members(self._own[number])),
                cores=tuple(sorted(cores.get(number, ()))),
            )
            for number, each in sorted(numbered.items())
        )

    def near(self, cpus: int) -> int:
        """Return the node that contains all these CPUs, or ``UNKNOWN``."""
        first = (cpus & -cpus).bit_length() - 1
        number = self._owner.get(first, UNKNOWN)
        return number if cpus & ~self._own.get(number, 0) == 0 else UNKNOWN


def _node(number: int, each: _Object, machine: Mapping[str, str]) -> NumaNode:
    package = each.package
    infos = {**machine, **(_infos(package) if package else {})}
    arch = infos.get("Architecture", "")
    return NumaNode(
        number,
        memory_bytes=_number(each.element, "local_memory"),
        arch=_ARCHS.get(arch, arch),
        vendor=infos.get("CPUVendor", ""),
        family=nccl_family(small_number(infos.get("CPUFamilyNumber", ""))),
        model=small_number(infos.get("CPUModelNumber", "")),
    )


def _read_devices(objects: Iterable[_Object], nodes: _Nodes) -> dict[str, PciDevice]:
    found: dict[str, PciDevice] = {}
    for each in objects:
        address, element = each.bus_id, each.element
        if each.kind not in ("PCIDev", "Bridge") or not element.get("pci_busid"):
            continue
        if address in found:
            raise element.bad("pci_busid must be listed once", address)
        kind = _TYPE.fullmatch(element.get("pci_type"))
        speed = _decimal(element.get("pci_link_speed") or "0")
        if kind is None or math.isnan(speed):
            raise element.bad(
                "pci_type must look like '0302 [10de:20b0] [10de:134f] a1', and "
                "pci_link_speed must be a number of GB/s",
                [element.get("pci_type"), element.get("pci_link_speed")],
            )
        vendor, device, *board = (int(x or "0", 16) for x in kind.group(2, 3, 4, 5))
        # Bridges have no board, only zeros.
        maker, card = board if board[0] else (UNKNOWN, UNKNOWN)
        code, node = int(kind[1] + (kind[6] or "00"), 16), nodes.near(each.cpus)
        codes = code, vendor, device, maker, card
        found[address] = PciDevice(address, each.parent, node, *codes, gb_per_s=speed)
    return found


def _read_gpus(
    objects: Iterable[_Object], devices: Mapping[str, PciDevice]
) -> tuple[GpuDevice, ...]:
    known: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for each in objects:
        infos = _infos(each.element) if each.kind == "OSDev" else {}
        # The library that found it; its attribute depends on the version.
        backend = each.element.get("subtype") or infos.get("CoProcType", "")
        if each.bus_id and (backend or infos.get("Backend", "")) in _GPU_BACKENDS:
            known[each.bus_id] |= infos
    found: list[GpuDevice] = []
    for bus_id, device in devices.items():
        if bus_id in known or is_gpu(device.class_code, device.vendor):
            infos = known[bus_id]
            title = infos.get("GPUModel", "")
            uuid = next((infos[name] for name in _UUIDS if name in infos), "")
            sm = compute_capability(title)
            found.append(GpuDevice(bus_id, len(found), sm=sm, title=title, uuid=uuid))
    return tuple(found)


def _read_ports(
    objects: Iterable[_Object], nodes: _Nodes, version: float
) -> tuple[NetPort, ...]:
    # Version 3 changed the numbers for sorts of devices to bits.
    net, rdma = (16, 32) if version >= 3 else (2, 3)
    found: list[NetPort] = []
    for each in objects:
        sort = _number(each.element, "osdev_type") if each.kind == "OSDev" else UNKNOWN
        sort = sort & (net | rdma) if version >= 3 and sort != UNKNOWN else sort
        if not each.element.get("name") or sort not in (net, rdma, net | rdma):
            continue
        is_rdma = sort != net
        port = NetPort(
            title=each.element.get("name"),
            bus_id=each.bus_id,
            node=UNKNOWN if each.bus_id else nodes.near(each.cpus),
            kind="infiniband" if is_rdma else "ethernet",
        )
        states = sorted(
            (int(match[1]), state.startswith("4"))
            for name, state in (_infos(each.element) if is_rdma else {}).items()
            if (match := _PORT_STATE.fullmatch(name))
        )
        # Titles of second and later ports have a number.
        titles = [port.title, *(f"{port.title}:{number}" for number, _ in states[1:])]
        found += [
            port._replace(title=title, port=number, is_up=is_up)
            for title, (number, is_up) in zip(titles, states, strict=False)
        ] or [port]
    # Interfaces of an RDMA adapter repeat its ports.
    adapters = {port.bus_id for port in found if port.kind == "infiniband"} - {""}
    return tuple(p for p in found if p.kind != "ethernet" or p.bus_id not in adapters)


def _names(objects: Iterable[_Object], nodes: _Nodes) -> dict[str, str]:
    """Return the names of links' ends, by hwloc's number of the object."""
    found: dict[str, str] = {}
    for each in objects:
        is_device = each.kind == "OSDev" or each.element.get("pci_busid")
        name = each.bus_id if is_device else ""
        node = nodes.near(each.cpus)  # It stands for a processor.
        if name or node != UNKNOWN:
            found[each.element.get("gp_index")] = name or f"numa/{node}"
    return found


def _read_links(
    root: Element, names: Mapping[str, str], gpus: Sequence[GpuDevice]
) -> Iterator[Link]:
    capabilities = {gpu.name: gpu.sm for gpu in gpus}
    for matrix in root.named("distances2", "distances2hetero"):
        kind = _LINK_KINDS.get(matrix.get("name"))
        # Its values are the bandwidth of all links together.
        for source, target, mb_per_s in _entries(matrix) if kind else ():
            ends = names.get(source, ""), names.get(target, "")
            if kind is None or source == target or mb_per_s <= 0 or not all(ends):
                continue
            sm = max(capabilities.get(end, UNKNOWN) for end in ends)
            is_first = sm == _FIRST_NVLINK_SM
            each = _FIRST_NVLINK_GB_PER_S if is_first else _NVLINK_GB_PER_S
            count = max(1, round(mb_per_s / 1000 / each))
            count = count if kind is LinkKind.NVLINK else 1
            yield Link(kind, *ends, count, mb_per_s / 1000)


def _entries(matrix: Element) -> Iterator[tuple[str, str, float]]:
    indexes, words = (
        " ".join("".join(child.pieces) for child in matrix.named(tag)).split()
        for tag in ("indexes", "u64values")
    )
    names = [word.rpartition(":")[2] for word in indexes]
    values, num = list(map(_decimal, words)), len(names)
    if any(math.isnan(value) or value > 1e15 for value in values):
        raise matrix.bad("values must be numbers from 0", words)
    if len(values) != num**2 or len(set(names)) != num:
        rule = f"a matrix of {num} different objects must have {num} * {num} values"
        raise matrix.bad(rule, len(values))
    for index, value in enumerate(values):
        yield names[index // num], names[index % num], value


HWLOC = Probe("hwloc XML", has_root("topology"), _read)
