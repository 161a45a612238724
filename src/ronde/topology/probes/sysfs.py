"""A host as its kernel shows it in /proc and /sys: this machine, or a saved tree.

Functions take ``root``: the directory that holds proc and sys; empty for this machine.

A PCI switch is several bridges in sysfs: one above, and one for each port below. Of the
two devices that a link joins, the lower is kept, as NCCL does: then a switch is one
device, and each device has the link above it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ronde.topology import pci
from ronde.topology.cpu_sets import format_list, members
from ronde.topology.graph import (
    UNKNOWN,
    GpuDevice,
    HostTopology,
    Interface,
    Link,
    LinkKind,
    NetPort,
    NumaNode,
    PciDevice,
)
from ronde.topology.kernel_files import (
    list_names,
    read_list,
    read_mask,
    read_number,
    read_text,
)
from ronde.topology.machine import (
    parse_rate,
    read_driver_gpus,
    read_node_cpus,
    read_online,
    split_cores,
)
from ronde.topology.pci import bus_order, compute_capability, is_address, is_network

SOURCE = "sysfs"
"""How sources of this kind begin."""

_BUS = "sys/bus/pci/devices"
_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s.*")
# The kernel's value for a device that is not on PCI Express.
_NO_WIDTH = 255
_NVIDIA, _AMD, _INTEL = 0x10DE, 0x1002, 0x8086
_KFD = "sys/class/kfd/kfd/topology/nodes"
_KFD_XGMI = 11
# AMD's and Intel's on the first bus are parts of the processor, for screens.
_FIRST_BUS = "0000:00:"
_NODES = "sys/devices/system/node"
# Enough for the first processor; for all of them the kernel takes milliseconds.
_ONE_PROCESSOR_BYTES = 4096
_EXTENDED_FAMILY = 15
_NET, _INFINIBAND = "sys/class/net", "sys/class/infiniband"
_KINDS = {"1": "ethernet", "32": "infiniband"}
_LOWER = "lower_"


def read_host(root: Path = Path("/")) -> HostTopology:
    """Return a host's hardware, whatever of it this process may use; asks no driver.

    What cannot be read is left out or unknown, and is never an error.
    """
    top = str(root).rstrip("/")
    functions = read_functions(top)
    nodes, remarks = _read_nodes(top)
    gpus, links = _read_gpus(top, functions)
    ports = _read_ports(top, functions)
    ends = {each.bus_id for each in (*gpus, *ports) if each.bus_id}
    # Virtual functions are not among them: one that is in use has a port.
    ends |= {
        address
        for address, each in functions.items()
        if (is_network(each.class_code) and not each.is_virtual)
        or pci.is_nvswitch(each.class_code, each.vendor)
    }
    devices: dict[str, PciDevice] = {}
    for address in sorted(ends, key=bus_order):
        chain = functions[address].chain if address in functions else (address,)
        for place in range((len(chain) - 1) // 2 * 2, -1, -2):
            if chain[place] not in devices:
                devices[chain[place]] = _read_device(top, chain[place:], nodes)
    return HostTopology(
        name=read_text(f"{top}/proc/sys/kernel/hostname"),
        sources=(f"{SOURCE} of {root if top else 'this machine'}",),
        numa_nodes=nodes,
        devices=tuple(devices.values()),
        gpus=gpus,
        ports=ports,
        interfaces=_read_interfaces(top, ports),
        links=links,
        remarks=remarks,
    )


class Function(NamedTuple):
    """A function of a device on the bus."""

    chain: tuple[str, ...]  # Its address, then those of all bridges above it.
    class_code: int  # Class, subclass and interface.
    vendor: int
    is_virtual: bool  # One of many that an adapter shows of itself (SR-IOV).


def read_functions(root: str) -> dict[str, Function]:
    """Return all that is on the bus by address, in the order of drivers."""
    names = [name for name in list_names(f"{root}/{_BUS}") if is_address(name)]
    found: dict[str, Function] = {}
    for address in sorted(names, key=bus_order):
        own = f"{root}/{_BUS}/{address}"
        parts = (pci.read_path(own) or address).split("/")[::-1]
        place = next((n for n, part in enumerate(parts) if not is_address(part)), None)
        code = _code(own, "class")
        is_virtual = is_network(code) and bool(list_names(f"{own}/physfn"))
        found[address] = Function(
            tuple(parts[:place]), code, _code(own, "vendor"), is_virtual
        )
    return found


def _read_device(
    root: str, chain: Sequence[str], nodes: Sequence[NumaNode]
) -> PciDevice:
    """Return the first of a chain, with the link to the second."""
    own = f"{root}/{_BUS}/{chain[0]}"
    # Both ends can do more than their link: it is what the weaker one can.
    ends = [f"{root}/{_BUS}/{address}" for address in chain[:2]]
    return PciDevice(
        bus_id=chain[0],
        parent=chain[2] if len(chain) > 2 else "",
        node=_read_node(root, chain, nodes),
        class_code=_code(own, "class"),
        vendor=_code(own, "vendor"),
        device=_code(own, "device"),
        subsystem_vendor=_code(own, "subsystem_vendor"),
        subsystem_device=_code(own, "subsystem_device"),
        speed=_slowest(f"{end}/max_link_speed" for end in ends),
        width=_narrowest(f"{end}/max_link_width" for end in ends),
        speed_now=_slowest([f"{own}/current_link_speed"]),
        width_now=_narrowest([f"{own}/current_link_width"]),
    )


def _read_node(root: str, chain: Sequence[str], nodes: Sequence[NumaNode]) -> int:
    """Return the node of a device, of the next above, or that has all CPUs near it."""
    known = {node.number for node in nodes}
    for address in chain:
        node = read_number(f"{root}/{_BUS}/{address}/numa_node", UNKNOWN)
        if node >= 0 and node in known:
            return node
    own = f"{root}/{_BUS}/{chain[0]}"
    near = read_mask(f"{own}/local_cpus") or read_list(f"{own}/local_cpulist")
    for node in nodes:
        around = sum(1 << cpu for cpu in node.cpus)
        if near & around and not near & ~around:
            return node.number
    return UNKNOWN


def _slowest(files: Iterable[str]) -> str:
    speeds = [
        (float(m[1]), m[0]) for m in map(_SPEED.fullmatch, map(read_text, files)) if m
    ]
    return min(speeds, key=lambda speed: speed[0], default=(0.0, ""))[1]


def _narrowest(files: Iterable[str]) -> int:
    widths = [w for file in files if 0 <= (w := read_number(file, UNKNOWN)) < _NO_WIDTH]
    return min([w for w in widths if w] or widths, default=UNKNOWN)


def _code(directory: str, name: str) -> int:
    try:
        return max(UNKNOWN, int(read_text(f"{directory}/{name}"), 16))
    except ValueError:
        return UNKNOWN


def _read_gpus(
    root: str, functions: Mapping[str, Function]
) -> tuple[tuple[GpuDevice, ...], tuple[Link, ...]]:
    """Return the GPUs by bus address, and AMD's links between them.

    Of a maker whose driver lists GPUs, only those; containers show more on the bus. Of
    NVIDIA's links the kernel knows nothing.
    """
    nvidia = {
        address: GpuDevice(
            bus_id=address,
            number=UNKNOWN,
            sm=compute_capability(driver.model),
            title=driver.model,
            uuid=driver.uuid,
        )
        for address, driver in read_driver_gpus(root).items()
    }
    kfd = _read_kfd(root)
    amd = {gpu.bus_id: gpu for gpu in kfd.values()}
    listed = {vendor for vendor, gpus in ((_NVIDIA, nvidia), (_AMD, amd)) if gpus}
    found = nvidia | amd
    for address, each in functions.items():
        is_inside = each.vendor in (_AMD, _INTEL) and address.startswith(_FIRST_BUS)
        is_gpu = pci.is_gpu(each.class_code, each.vendor) and not is_inside
        if each.vendor not in listed and is_gpu:
            found.setdefault(address, GpuDevice(address, UNKNOWN))
    ordered = sorted(found, key=bus_order)
    gpus = tuple(found[name]._replace(number=n) for n, name in enumerate(ordered))
    return gpus, tuple(_read_xgmi(root, kfd))


def _read_kfd(root: str) -> dict[str, GpuDevice]:
    """Return AMD's GPUs by the number of their node, as the driver for computing."""
    found: dict[str, GpuDevice] = {}
    for number in list_names(f"{root}/{_KFD}"):
        # Those that this container may not use have a number that cannot be read.
        if read_text(f"{root}/{_KFD}/{number}/gpu_id") in ("", "0"):
            continue
        values = _properties(f"{root}/{_KFD}/{number}/properties")
        place, version = values.get("location_id", 0), values.get("gfx_target_version")
        found[number] = GpuDevice(
            bus_id=f"{values.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:"
            f"{place >> 3 & 0x1F:02x}.{place & 7}",
            number=UNKNOWN,
            sm=values.get("simd_count", UNKNOWN)
            // max(1, values.get("simd_per_cu", 1)),
            # ``90a`` for 90010, of which each part becomes one hexadecimal digit.
            gcn=f"{version // 10000}{version // 100 % 100:x}{version % 100:x}"
            if version
            else "",
        )
    return found


def _read_xgmi(root: str, kfd: Mapping[str, GpuDevice]) -> Iterable[Link]:
    for number, gpu in kfd.items():
        directory = f"{root}/{_KFD}/{number}/io_links"
        for name in list_names(directory):
            values = _properties(f"{directory}/{name}/properties")
            target = kfd.get(str(values.get("node_to")))
            if target is not None and values.get("type") == _KFD_XGMI:
                # MB/s that one link carries, and all together.
                least, most = (values.get(f"{m}_bandwidth", 0) for m in ("min", "max"))
                count = max(1, most // least) if least > 0 else 1
                yield Link(LinkKind.XGMI, gpu.bus_id, target.bus_id, count)


def _properties(path: str) -> dict[str, int]:
    """Return the numbers of lines such as ``simd_count 1216``."""
    pairs = (line.partition(" ") for line in read_text(path).splitlines())
    return {name: int(value) for name, _, value in pairs if value.isdecimal()}


def _read_nodes(root: str) -> tuple[tuple[NumaNode, ...], tuple[str, ...]]:
    """Return the nodes that are online, by number, and what is odd about them.

    CPUs that are online and on none of them are a node of unknown number. Without any
    node, as kernels without NUMA show it, all is one node 0.
    """
    left = read_online(root)
    remarks: list[str] = []
    nodes: list[NumaNode] = []
    processor = _read_processor(root)
    online = read_list(f"{root}/{_NODES}/online")
    cpus_of = {
        n: cpus
        for n, cpus in read_node_cpus(root).items()
        if not online or online >> n & 1
    }
    for number, listed in cpus_of.items():
        node = _node(root, number, listed & left, processor)
        nodes.append(_with_memory(node, f"{root}/{_NODES}/node{number}/meminfo"))
        left &= ~listed
    if not nodes and left:
        node = _node(root, 0, left, processor)
        nodes.append(_with_memory(node, f"{root}/proc/meminfo"))
    elif left:
        nodes.insert(0, _node(root, UNKNOWN, left, processor))
        remarks.append(
            f"CPUs {format_list(members(left))} are online, but their NUMA node is not."
        )
    distances = _read_distances(root, list(cpus_of))
    undistanced = [f"numa/{node}" for node in cpus_of if node not in distances]
    if undistanced and len(cpus_of) > 1:
        remarks.append(f"The kernel lists no distances of {', '.join(undistanced)}.")
    return (
        tuple(n._replace(distances=distances.get(n.number, ())) for n in nodes),
        tuple(remarks),
    )


def _read_processor(root: str) -> tuple[str, str, int, int]:
    """Return a node's architecture, vendor, family and model, from the first CPU."""
    text = read_text(f"{root}/proc/cpuinfo", _ONE_PROCESSOR_BYTES)
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    # One blank stands after the colon; more belong to the name: "  Shanghai  ".
    values = {name.strip(): value.removeprefix(" ") for name, _, value in pairs}
    if "vendor_id" in values and "cpu family" in values:
        family = _number(values["cpu family"])
        if family > _EXTENDED_FAMILY:
            # The kernel adds the extended family to 15, NCCL adds 16 times as much.
            # Source: ``ncclTopoGetXmlFromCpu`` of NCCL's src/graph/xml.cc.
            family = _EXTENDED_FAMILY + 16 * (family - _EXTENDED_FAMILY)
        model = _number(values.get("model", ""))
        return "x86_64", values["vendor_id"], family, model
    is_power = values.get("cpu", "").startswith("POWER")
    arch = "arm64" if "CPU implementer" in values else "ppc64" if is_power else ""
    return arch, "", UNKNOWN, UNKNOWN


def _node(
    root: str, number: int, cpus: int, processor: tuple[str, str, int, int]
) -> NumaNode:
    cores = split_cores(root, cpus)
    if not cores:
        return NumaNode(number)
    topology = f"{root}/sys/devices/system/cpu/cpu{cores[0][0]}/topology"
    package = max(UNKNOWN, read_number(f"{topology}/physical_package_id", UNKNOWN))
    arch, vendor, family, model = processor
    return NumaNode(
        number,
        tuple(members(cpus)),
        tuple(cores),
        package=package,
        arch=arch,
        vendor=vendor,
        family=family,
        model=model,
    )


def _with_memory(node: NumaNode, path: str) -> NumaNode:
    """Return a node with its memory, from lines such as ``Node 0 MemFree: 8 kB``."""
    values: dict[str, int] = {}
    for line in read_text(path).splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit.strip() == "kB":
            values[name.rpartition(" ")[2]] = max(UNKNOWN, _number(number) * 1024)
    return node._replace(
        memory_bytes=values.get("MemTotal", UNKNOWN),
        free_bytes=values.get("MemFree", UNKNOWN),
    )


def _read_distances(
    root: str, nodes: list[int]
) -> dict[int, tuple[tuple[int, int], ...]]:
    """Return the distances from each node to the listed ones.

    A row has a column for each node that is online, in the order of their numbers, and
    from some kernels for each that may ever be; else nobody knows what it means.
    """
    possible = members(read_list(f"{root}/{_NODES}/possible"))
    columns_by_num = {len(possible): possible, len(nodes): nodes}
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    for node in nodes:
        text = read_text(f"{root}/{_NODES}/node{node}/distance")
        row = [_number(part) for part in text.split()]
        pairs = zip(columns_by_num.get(len(row), ()), row, strict=False)
        known = tuple((n, distance) for n, distance in pairs if n in nodes)
        if known and all(distance > 0 for _, distance in known):
            found[node] = known
    return found


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return UNKNOWN


def _read_ports(root: str, functions: Mapping[str, Function]) -> tuple[NetPort, ...]:
    ports = [
        port
        for name in list_names(f"{root}/{_INFINIBAND}")
        for port in _read_adapter(root, name)
    ]
    taken = {port.bus_id for port in ports if port.bus_id}
    for name in list_names(f"{root}/{_NET}"):
        own = f"{root}/{_NET}/{name}"
        bus_id = pci.bus_id(pci.read_path(own))
        if bus_id in taken or _is_software(own):
            continue
        ports.append(
            NetPort(
                title=name,
                bus_id=bus_id,
                kind=_KINDS.get(read_text(f"{own}/type"), ""),
                mbit_per_s=max(0, read_number(f"{own}/speed", 0)),
                # The carrier of one that is down cannot be read.
                is_up=read_text(f"{own}/carrier") == "1",
            )
        )
    virtual = {address for address, each in functions.items() if each.is_virtual}
    return tuple(port for port in ports if port.is_up or port.bus_id not in virtual)


def _read_interfaces(root: str, ports: Sequence[NetPort]) -> tuple[Interface, ...]:
    known = {port.title for port in ports}
    above = [n for n in list_names(f"{root}/{_NET}") if n not in known]
    waiting = {name: _lower_names(root, name, ports) for name in above}
    found: list[Interface] = []
    # A circle, which no kernel has, never gets ready.
    while ready := [n for n, lower in waiting.items() if not waiting.keys() & lower]:
        for name in ready:
            lower = tuple(each for each in waiting.pop(name) if each in known)
            if lower:
                mode = read_text(f"{root}/{_NET}/{name}/bonding/mode")
                found.append(Interface(name, lower, mode.partition(" ")[0]))
                known.add(name)
    return tuple(found)


def _lower_names(root: str, name: str, ports: Sequence[NetPort]) -> list[str]:
    """Return what is right below an interface that is no port, in order of names."""
    own = f"{root}/{_NET}/{name}"
    if _is_software(own):
        names = list_names(own)
        return [n.removeprefix(_LOWER) for n in names if n.startswith(_LOWER)]
    bus_id = pci.bus_id(pci.read_path(own))
    shared = [port for port in ports if bus_id and port.bus_id == bus_id]
    # The kernel counts ports from 0 here, and RDMA adapters' from 1.
    number = read_number(f"{own}/dev_port", 0) + 1
    exact = [port for port in shared if port.port == number]
    return [port.title for port in exact or shared[:1]]


def _read_adapter(root: str, name: str) -> list[NetPort]:
    """Return the ports of an RDMA adapter; the second and later bear their number."""
    own = f"{root}/{_INFINIBAND}/{name}"
    bus_id = pci.bus_id(pci.read_path(own))
    ports: list[NetPort] = []
    for number in sorted(int(n) for n in list_names(f"{own}/ports") if n.isdecimal()):
        port = f"{own}/ports/{number}"
        ports.append(
            NetPort(
                title=f"{name}:{number}" if ports else name,
                bus_id=bus_id,
                kind=read_text(f"{port}/link_layer").lower(),
                mbit_per_s=parse_rate(read_text(f"{port}/rate")),
                port=number,
                guid=read_text(f"{own}/node_guid"),
                is_up=read_text(f"{port}/state").startswith("4:"),
            )
        )
    return ports


def _is_software(own: str) -> bool:
    link = pci.read_link(own)
    # In trees that were copied without links, only hardware still has a device.
    return "/devices/virtual/" in link if link else not list_names(f"{own}/device")
