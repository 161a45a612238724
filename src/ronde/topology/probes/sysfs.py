"""Read a host from /proc and /sys, of this machine or of a saved tree.

The argument ``root`` is the directory with proc and sys; empty for this machine.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from ronde.topology import machine, pci
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
    nccl_family,
)
from ronde.topology.kernel_files import (
    list_names,
    list_numbers,
    read_list,
    read_mask,
    read_number,
    read_text,
)
from ronde.topology.paths.speeds import gt_per_s
from ronde.topology.probes.base import keep_lower_ends, small_number

SOURCE = "sysfs"
"""Prefix of the names of sources that this module reads."""

_BUS = "sys/bus/pci/devices"
_CODES = ("class", "vendor", "device", "subsystem_vendor", "subsystem_device")
# The kernel's value for a device that is not on PCI Express.
_NO_WIDTH = 255
_NVIDIA, _AMD, _INTEL = 0x10DE, 0x1002, 0x8086
_KFD = "sys/class/kfd/kfd/topology/nodes"
_KFD_XGMI = 11
_NODES = "sys/devices/system/node"
# The first processor; reading all takes milliseconds.
_ONE_PROCESSOR_BYTES = 4096
_NET, _INFINIBAND = "sys/class/net", "sys/class/infiniband"
_KINDS = {"1": "ethernet", "32": "infiniband"}


def read_host(root: Path = Path("/")) -> HostTopology:
    """Return all hardware of a host, even if this process may not use it.

    No driver is queried. Unreadable files are skipped and never raise.
    """
    top = str(root).rstrip("/")
    functions = read_functions(top)
    nodes, remarks = _read_nodes(top)
    gpus, links = _read_gpus(top, functions)
    ports = _read_ports(top, functions)
    ends = {each.bus_id for each in (*gpus, *ports) if each.bus_id}
    for address, each in functions.items():
        # A virtual function in use has a port already.
        is_adapter = pci.is_network(each.class_code) and not each.is_virtual
        if is_adapter or pci.is_nvswitch(each.class_code, each.vendor):
            ends.add(address)
    devices: dict[str, PciDevice] = {}
    for address in ends:
        chain = functions[address].chain if address in functions else (address,)
        for index, name in enumerate(chain):
            if name not in devices:
                devices[name] = _device(top, chain[index:], nodes)
    return HostTopology(
        name=read_text(f"{top}/proc/sys/kernel/hostname"),
        sources=(f"{SOURCE} of {root if top else 'this machine'}",),
        numa_nodes=nodes,
        devices=keep_lower_ends(devices, sorted(ends, key=pci.bus_order)),
        gpus=gpus,
        ports=ports,
        interfaces=_read_interfaces(top, ports),
        links=links,
        remarks=remarks,
    )


class Function(NamedTuple):
    """A PCI function, which is a part of a device with its own address."""

    chain: tuple[str, ...]  # Its address, then those of all bridges above it.
    class_code: int  # Class, subclass and interface.
    vendor: int
    is_virtual: bool  # A virtual function (SR-IOV).


def read_functions(root: str) -> dict[str, Function]:
    """Return all functions on the PCI bus by address, in the drivers' order."""
    found: dict[str, Function] = {}
    names = filter(pci.is_address, list_names(f"{root}/{_BUS}"))
    for address in sorted(names, key=pci.bus_order):
        own = f"{root}/{_BUS}/{address}"
        parts = (pci.read_path(own) or address).split("/")[::-1]
        chain, code = tuple(takewhile(pci.is_address, parts)), _code(own, "class")
        is_virtual = pci.is_network(code) and bool(list_names(f"{own}/physfn"))
        found[address] = Function(chain, code, _code(own, "vendor"), is_virtual)
    return found


def _device(root: str, chain: Sequence[str], nodes: Sequence[NumaNode]) -> PciDevice:
    """Return the first device of a chain, with its link as seen from this end only."""
    own = f"{root}/{_BUS}/{chain[0]}"
    links = [f"{own}/{which}_link" for which in ("max", "current")]
    (speed, width), (speed_now, width_now) = map(_read_link, links)
    return PciDevice(
        chain[0],
        chain[1] if len(chain) > 1 else "",
        _read_node(root, chain, nodes),
        *(_code(own, name) for name in _CODES),
        speed=speed,
        width=width,
        speed_now=speed_now,
        width_now=width_now,
    )


def _read_link(path: str) -> tuple[str, int]:
    speed = read_text(f"{path}_speed")
    width = read_number(f"{path}_width", UNKNOWN)
    is_width = 0 <= width < _NO_WIDTH
    return speed if gt_per_s(speed) else "", width if is_width else UNKNOWN


def _read_node(root: str, chain: Sequence[str], nodes: Sequence[NumaNode]) -> int:
    """Return the NUMA node of a device, else of a bridge above, else of local CPUs."""
    known = {node.number for node in nodes}
    for address in chain:
        node = read_number(f"{root}/{_BUS}/{address}/numa_node", UNKNOWN)
        if node >= 0 and node in known:
            return node
    own = f"{root}/{_BUS}/{chain[0]}"
    near = read_mask(f"{own}/local_cpus") or read_list(f"{own}/local_cpulist")
    cpus = set(members(near))
    around = (node.number for node in nodes if cpus and cpus <= set(node.cpus))
    return next(around, UNKNOWN)


def _code(directory: str, name: str) -> int:
    return max(UNKNOWN, read_number(f"{directory}/{name}", UNKNOWN, 16))


def _read_gpus(
    root: str, functions: Mapping[str, Function]
) -> tuple[tuple[GpuDevice, ...], tuple[Link, ...]]:
    # If a maker's driver lists GPUs, only those count; a container's bus shows more.
    found: dict[str, GpuDevice] = {}
    for address, (model, uuid, _) in machine.read_driver_gpus(root).items():
        sm = pci.compute_capability(model)
        found[address] = GpuDevice(address, UNKNOWN, sm=sm, title=model, uuid=uuid)
    kfd, links = _read_kfd(root)
    listed = {v for v, gpus in ((_NVIDIA, found), (_AMD, kfd)) if gpus}
    found |= kfd
    for address, each in functions.items():
        is_first = address.startswith(machine.FIRST_BUS)
        is_inside = is_first and each.vendor in (_AMD, _INTEL)
        is_gpu = pci.is_gpu(each.class_code, each.vendor) and not is_inside
        if each.vendor not in listed and is_gpu:
            found.setdefault(address, GpuDevice(address, UNKNOWN))
    ordered = sorted(found, key=pci.bus_order)
    gpus = (found[name]._replace(number=n) for n, name in enumerate(ordered))
    return tuple(gpus), links


def _read_kfd(root: str) -> tuple[dict[str, GpuDevice], tuple[Link, ...]]:
    found: dict[str, GpuDevice] = {}
    address_of: dict[str, str] = {}  # By number of the driver's node.
    for number in list_names(f"{root}/{_KFD}"):
        # Numbers of GPUs that this container may not use cannot be read.
        if read_text(f"{root}/{_KFD}/{number}/gpu_id") in ("", "0"):
            continue
        values = _properties(f"{root}/{_KFD}/{number}/properties")
        domain, location = values.get("domain", 0), values.get("location_id", 0)
        bus, device, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
        version = values.get("gfx_target_version", 0)
        # ``90a`` for 90010, of which each part becomes one hexadecimal digit.
        gcn = f"{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        per_unit = max(1, values.get("simd_per_cu", 1))
        units = values.get("simd_count", UNKNOWN) // per_unit
        name = f"{domain:04x}:{bus:02x}:{device:02x}.{function}"
        address_of[number] = name
        found[name] = GpuDevice(name, UNKNOWN, sm=units, gcn=gcn if version else "")
    links: list[Link] = []
    for number, name in address_of.items():
        directory = f"{root}/{_KFD}/{number}/io_links"
        for values in (
            _properties(f"{directory}/{n}/properties") for n in list_names(directory)
        ):
            target = address_of.get(str(values.get("node_to")))
            if target is not None and values.get("type") == _KFD_XGMI:
                # MB/s of one link, and of all.
                least, most = (values.get(f"{m}_bandwidth", 0) for m in ("min", "max"))
                count = max(1, most // least) if least > 0 else 1
                links.append(Link(LinkKind.XGMI, name, target, count))
    return found, tuple(links)


def _properties(path: str) -> dict[str, int]:
    """Return the numbers of lines such as ``simd_count 1216``."""
    pairs = (line.partition(" ") for line in read_text(path).splitlines())
    return {name: int(value) for name, _, value in pairs if value.isdecimal()}


def _read_nodes(root: str) -> tuple[tuple[NumaNode, ...], tuple[str, ...]]:
    """Return the online NUMA nodes, sorted by number, and remarks.

    Online CPUs outside these nodes form a node of unknown number. If there are no
    nodes, as on kernels without NUMA, all CPUs are in node 0.
    """
    left, online = machine.read_online(root), read_list(f"{root}/{_NODES}/online")
    plain = _read_processor(root)
    remarks: list[str] = []
    nodes: list[NumaNode] = []
    for number, listed in machine.read_node_cpus(root).items():
        if online and not online >> number & 1:
            continue
        memory = _read_memory(f"{root}/{_NODES}/node{number}/meminfo")
        node = plain._replace(number=number, memory_bytes=memory)
        nodes.append(_with_cpus(root, node, listed & left))
        left &= ~listed
    if left and nodes:
        nodes.insert(0, _with_cpus(root, plain, left))
        remarks.append(
            f"CPUs {format_list(members(left))} are online, but their NUMA node is not."
        )
    elif left:
        nodes.append(_with_cpus(root, plain._replace(number=0), left))
    if len(nodes) == 1:
        # No node's file has memory that was added to a virtual machine.
        memory = max(nodes[0].memory_bytes, _read_memory(f"{root}/proc/meminfo"))
        nodes = [nodes[0]._replace(memory_bytes=memory)]
    return tuple(nodes), tuple(remarks)


def _read_processor(root: str) -> NumaNode:
    text = read_text(f"{root}/proc/cpuinfo", _ONE_PROCESSOR_BYTES)
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    # One blank stands after the colon; more belong to the name: "  Shanghai  ".
    values = {name.strip(): value.removeprefix(" ") for name, _, value in pairs}
    if "vendor_id" in values and "cpu family" in values:
        return NumaNode(
            UNKNOWN,
            arch="x86_64",
            vendor=values["vendor_id"],
            family=nccl_family(small_number(values["cpu family"])),
            model=small_number(values.get("model", "")),
        )
    is_power = values.get("cpu", "").startswith("POWER")
    arch = "arm64" if "CPU implementer" in values else "ppc64" if is_power else ""
    return NumaNode(UNKNOWN, arch=arch)


def _with_cpus(root: str, node: NumaNode, cpus: int) -> NumaNode:
    cores = machine.split_cores(root, cpus)
    if not cores:
        return node._replace(arch="", vendor="", family=UNKNOWN, model=UNKNOWN)
    return node._replace(cpus=tuple(members(cpus)), cores=tuple(cores))


def _read_memory(path: str) -> int:
    """Return the bytes in a file with a line such as ``Node 0 MemTotal: 8 kB``."""
    found = re.search(r"\bMemTotal:\s*(\d{1,15}) kB", read_text(path))
    return int(found[1]) * 1024 if found else UNKNOWN


def _read_ports(root: str, functions: Mapping[str, Function]) -> tuple[NetPort, ...]:
    ports: list[NetPort] = []
    for name in list_names(f"{root}/{_INFINIBAND}"):
        own = f"{root}/{_INFINIBAND}/{name}"
        for index, number in enumerate(list_numbers(f"{own}/ports")):
            files = f"{own}/ports/{number}"
            names = "rate", "state", "phys_state"
            rate, state, physical = (read_text(f"{files}/{name}") for name in names)
            is_up, lanes = state.startswith("4:"), rate.partition("(")[2].rstrip(")")
            words = (text.partition(": ")[2] for text in (state, physical))
            down = ", ".join(filter(None, words))
            port = NetPort(
                # Titles of second and later ports have a number.
                title=f"{name}:{number}" if index else name,
                bus_id=pci.bus_id(pci.read_path(own)),
                kind=read_text(f"{files}/link_layer").lower(),
                mbit_per_s=machine.parse_rate(rate),
                port=number,
                is_up=is_up,
                state=lanes if is_up else down,
            )
            ports.append(port)
    taken = {port.bus_id for port in ports if port.bus_id}
    for name in list_names(f"{root}/{_NET}"):
        own = f"{root}/{_NET}/{name}"
        bus_id = pci.bus_id(pci.read_path(own))
        if bus_id not in taken and not _is_software(own):
            port = NetPort(
                title=name,
                bus_id=bus_id,
                kind=_KINDS.get(read_text(f"{own}/type"), ""),
                mbit_per_s=max(0, read_number(f"{own}/speed", 0)),
                # The carrier of one that is down cannot be read.
                is_up=read_text(f"{own}/carrier") == "1",
            )
            ports.append(port)
    virtual = {address for address, each in functions.items() if each.is_virtual}
    return tuple(port for port in ports if port.is_up or port.bus_id not in virtual)


def _read_interfaces(root: str, ports: Sequence[NetPort]) -> tuple[Interface, ...]:
    known = {port.title for port in ports}
    above = [n for n in list_names(f"{root}/{_NET}") if n not in known]
    waiting = {name: _lower_names(root, name, ports) for name in above}
    found: list[Interface] = []
    # Interfaces in a cycle, which no kernel has, never get ready.
    while ready := [n for n, lower in waiting.items() if not waiting.keys() & lower]:
        for name in ready:
            lower = tuple(each for each in waiting.pop(name) if each in known)
            if lower:
                mode = read_text(f"{root}/{_NET}/{name}/bonding/mode")
                found.append(Interface(name, lower, mode.partition(" ")[0]))
                known.add(name)
    return tuple(found)


def _lower_names(root: str, name: str, ports: Sequence[NetPort]) -> list[str]:
    own = f"{root}/{_NET}/{name}"
    if _is_software(own):
        names = (n for n in list_names(own) if n.startswith("lower_"))
        return [name.removeprefix("lower_") for name in names]
    bus_id = pci.bus_id(pci.read_path(own))
    shared = [port for port in ports if bus_id and port.bus_id == bus_id]
    # The kernel counts ports from 0 here, and RDMA adapters' from 1.
    number = read_number(f"{own}/dev_port", 0) + 1
    exact = [port for port in shared if port.port == number]
    return [port.title for port in exact or shared[:1]]


def _is_software(own: str) -> bool:
    link = pci.read_link(own)
    # In trees copied without links, only hardware has a device.
    return "/devices/virtual/" in link if link else not list_names(f"{own}/device")
