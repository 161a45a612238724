"""Read the topology files of NCCL, and of RCCL in the same format.

NCCL writes one for ``NCCL_TOPO_DUMP_FILE`` and reads one for ``NCCL_TOPO_FILE``. Files
of clouds have only processors and PCI devices: GPUs and network adapters are
distinguished by PCI class.
"""

import re
from collections import defaultdict
from collections.abc import Iterable

from ronde.errors import UsageError
from ronde.plain_values import shorten
from ronde.topology.cpu_sets import members, parse_mask
from ronde.topology.graph import (
    NVSWITCH,
    UNKNOWN,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    NetPort,
    NumaNode,
    PciDevice,
    Topology,
)
from ronde.topology.paths.speeds import GPU_CLASSES
from ronde.topology.pci import bus_order, is_network, plain_address, port_kind
from ronde.topology.probes.base import Element, Probe, Saved, has_root, parse_xml

MAX_REMARKS = 100
"""Maximum number of remarks about a file; further ones are only counted."""

_INTEGER = re.compile(r"\s*[+-]?(0[xX][0-9a-fA-F]{1,15}|[0-9]{1,18})\s*")
_CODE = re.compile(r"\s*(?:0[xX])?[0-9a-fA-F]{1,15}\s*")
# NCCL's name for a switch that a virtual machine does not see.
_UNSEEN = "fffffff:"
_GPU_NUMBERS = ("dev", "sm", "gdr")
_CODES = ("class", "vendor", "device", "subsystem_vendor", "subsystem_device")


def _read_hosts(saved: Saved) -> Topology:
    root = parse_xml(saved.data, saved.name, "system")
    readers: defaultdict[str, _HostReader] = defaultdict(_HostReader)
    for cpu in root.named("cpu"):
        readers[cpu.get("host_hash").lower()].on_cpu(cpu)
    if not readers:
        raise UsageError(
            f"{saved.name} lists no cpu. Write it with NCCL_TOPO_DUMP_FILE."
        )
    # A file of one host does not name it.
    names = list(readers) if len(readers) > 1 else [""]
    source = f"NCCL topology file {saved.name}"
    hosts = zip(names, readers.values(), strict=True)
    return Topology(tuple(reader.host(name, source) for name, reader in hosts))


class _HostReader:
    def __init__(self) -> None:
        self._remarks: list[str] = []
        self._refused: list[str] = []
        self._nodes: dict[int, NumaNode] = {}
        self._devices: dict[str, PciDevice] = {}
        self._gpus: dict[str, GpuDevice] = {}
        self._ports: dict[str, NetPort] = {}
        self._links: list[Link] = []

    def host(self, name: str, source: str) -> HostTopology:
        ports = self._ports.values()
        # NCCL has fused the parts of ``a+b`` into one.
        fused = [port.title for port in ports if "+" in port.title]
        parts = {part for title in fused for part in title.split("+")}
        remarks = self._remarks[:MAX_REMARKS]
        if len(self._remarks) > MAX_REMARKS:
            remarks.append(f"More than these {MAX_REMARKS} things are odd.")
        return HostTopology(
            name=name,
            sources=(source,),
            numa_nodes=tuple(self._nodes[number] for number in sorted(self._nodes)),
            devices=tuple(self._devices.values()),
            gpus=_number_gpus(self._gpus.values()),
            ports=tuple(
                p for p in ports if p.number != UNKNOWN or p.title not in parts
            ),
            links=tuple(self._links),
            remarks=tuple(remarks),
            refused=tuple(self._refused),
        )

    def _remark(self, element: Element, remark: str) -> None:
        self._remarks.append(f"Line {element.line}: {element.tag} {remark}.")

    def _unread(self, element: Element, name: str) -> None:
        if (text := element.attributes.get(name)) is not None:
            self._remark(element, f"has {name}={shorten(text)}, which cannot be read")

    def _integer(self, element: Element, name: str, default: int = UNKNOWN) -> int:
        if found := _INTEGER.fullmatch(element.get(name)):
            return int(found[0], 16 if found[1][1:2] in ("x", "X") else 10)
        self._unread(element, name)
        return default

    def _code(self, element: Element, name: str) -> int:
        if _CODE.fullmatch(text := element.get(name)):
            return int(text, 16)
        self._unread(element, name)
        return UNKNOWN

    def _bus_id(self, element: Element, name: str) -> str:
        bus_id = plain_address(element.get(name).strip())
        if not bus_id:
            self._unread(element, name)
        return bus_id

    def on_cpu(self, cpu: Element) -> None:
        cpus = 0
        try:
            cpus = parse_mask(cpu.get("affinity"))
        except ValueError:
            self._unread(cpu, "affinity")
        if "numaid" not in cpu.attributes:
            self._refused.append(f"Line {cpu.line}: cpu has no numaid.")
        node = NumaNode(
            self._integer(cpu, "numaid"),
            tuple(members(cpus)),
            arch=cpu.get("arch"),
            vendor=cpu.get("vendor"),
            family=self._integer(cpu, "familyid"),
            model=self._integer(cpu, "modelid"),
        )
        if self._nodes.setdefault(node.number, node) is not node:
            self._remark(cpu, f"has numaid {node.number} again: both are one node")
        self._descend(cpu, None, node.number)

    def _descend(self, element: Element, device: PciDevice | None, node: int) -> None:
        for child in element.children:
            if child.tag == "pci":
                self._on_pci(child, device, node)
            elif child.tag == "nic":
                self._on_nic(child, device, node)
            elif child.tag == "gpu" and device:
                self._on_gpu(child, device)
            elif child.tag == "pcilink" and device:
                self._on_link(child, device)

    def _on_pci(self, element: Element, above: PciDevice | None, node: int) -> None:
        listed = PciDevice(
            self._bus_id(element, "busid"),
            above.bus_id if above else "",
            node,
            *(self._code(element, name) for name in _CODES),
            speed=element.get("link_speed"),
            width=self._integer(element, "link_width"),
        )
        if listed.bus_id:
            device = self._add_device(element, listed)
            self._descend(element, device, node)
            if not element.named("pci", "gpu", "nic"):
                self._on_bare(device)

    def _add_device(self, element: Element, device: PciDevice) -> PciDevice:
        """Add a device; return it as listed, which may be under another address."""
        there = self._devices.setdefault(device.bus_id, device)
        if there is device:
            return device
        # Another device with a wrong address; NCCL accepts it.
        others = (f"{device.bus_id[:-1]}{function}" for function in range(1, 8))
        free = next((other for other in others if other not in self._devices), "")
        if there.parent == device.parent or not free:
            self._remark(element, f"{device.bus_id} is listed again")
            return there
        self._remark(element, f"has the address of another; it is {free} here")
        return self._devices.setdefault(free, device._replace(bus_id=free))

    def _on_bare(self, device: PciDevice) -> None:
        """Add the GPU or port of a device that has only a PCI class."""
        bus_id, code = device.bus_id, device.class_code
        if code >> 16 in GPU_CLASSES:
            self._gpus.setdefault(bus_id, GpuDevice(bus_id, UNKNOWN))
        elif is_network(code):
            self._add_port(NetPort(bus_id, bus_id, kind=port_kind(code)))

    def _on_gpu(self, element: Element, device: PciDevice) -> None:
        bus_id = device.bus_id
        if bus_id in self._gpus:
            self._remark(element, f"is one more part of {bus_id}: left out")
            return
        number, sm, gdr = (self._integer(element, name) for name in _GPU_NUMBERS)
        gcn = element.get("gcn").removeprefix("gfx")
        self._gpus[bus_id] = GpuDevice(bus_id, number, sm, gcn, gdr)
        for child in element.named("nvlink", "xgmi", "c2c"):
            self._on_link(child, device)

    def _on_link(self, element: Element, device: PciDevice) -> None:
        kind = LinkKind("pci" if element.tag == "pcilink" else element.tag)
        count = self._integer(element, "count", 1 if kind is LinkKind.PCI else UNKNOWN)
        mb_per_s = 0
        if kind is LinkKind.C2C:
            mb_per_s = self._integer(element, "bw")
            target = self._nodes[device.node].name
        elif element.get("target").lower().startswith(_UNSEEN):
            target = NVSWITCH
        else:
            target = self._bus_id(element, "target")
        rate, code = mb_per_s * count / 1000, self._code(element, "tclass")
        if not target or count < 0 or mb_per_s < 0:
            self._remark(element, f"of {device.bus_id} is left out")
        else:
            self._links.append(Link(kind, device.bus_id, target, count, rate, code))

    def _on_nic(self, nic: Element, device: PciDevice | None, node: int) -> None:
        bus_id = device.bus_id if device else ""
        for net in nic.named("net"):
            if self._integer(net, "net", default=1) == 0:
                self._remark(net, "carries no NCCL messages and is left out")
                continue
            number = self._integer(net, "dev")
            port = NetPort(
                title=net.get("name") or bus_id or f"dev{number}",
                bus_id=bus_id,
                node=UNKNOWN if device else node,
                number=number,
                kind=port_kind(device.class_code) if device else "",
                mbit_per_s=self._integer(net, "speed", default=0),
                port=self._integer(net, "port"),
                gdr=self._integer(net, "gdr"),
            )
            if not self._add_port(port):
                self._remark(net, f"{port.title} is listed again and left out")
        if device and not nic.named("net"):
            self._on_bare(device)

    def _add_port(self, port: NetPort) -> bool:
        """Add a port under a unique title; return False if it is already listed."""
        there = self._ports.get(port.title)
        if there and (there.number, there.port) != (port.number, port.port):
            # Two ports of an adapter, written as in NCCL's log.
            mark = port.port if port.port != there.port else port.number
            port = port._replace(title=f"{port.title}:{mark}")
        return self._ports.setdefault(port.title, port) is port


def _number_gpus(gpus: Iterable[GpuDevice]) -> tuple[GpuDevice, ...]:
    """Assign missing GPU numbers in the order of bus addresses, as drivers do."""
    taken = {gpu.number for gpu in gpus}
    bare = sorted((g.bus_id for g in gpus if g.number < 0), key=bus_order)
    free = (n for n in range(len(taken) + len(bare)) if n not in taken)
    numbers = dict(zip(bare, free, strict=False))
    return tuple(g._replace(number=numbers.get(g.bus_id, g.number)) for g in gpus)


NCCL_TOPOLOGY = Probe("NCCL topology file", has_root("system"), _read_hosts)
