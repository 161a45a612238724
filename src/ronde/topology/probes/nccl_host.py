"""One host of a NCCL topology file, element by element."""

from ronde.topology import pci
from ronde.topology.graph import (
    UNKNOWN,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    NetPort,
    NumaNode,
    PciDevice,
)
from ronde.topology.probes.nccl_attributes import AttributeReader
from ronde.topology.probes.pci_kinds import is_network
from ronde.topology.xml_tree import Element

_GPU_CLASSES = (0x03, 0x12)
"""Display controllers, and AMD's accelerators."""
_INFINIBAND_CLASS = 0x0207
_GPU_LINKS = {"nvlink": LinkKind.NVLINK, "xgmi": LinkKind.XGMI}


class HostReader:
    """Takes the processors of one host and gives the host.

    Args:
        values: Reads attributes, and has the remarks afterwards.
    """

    def __init__(self, values: AttributeReader) -> None:
        self._values = values
        self._nodes: dict[int, NumaNode] = {}
        self._devices: dict[str, PciDevice] = {}
        self._gpus: dict[str, GpuDevice] = {}
        self._ports: dict[str, NetPort] = {}
        self._links: list[Link] = []

    def take_cpu(self, cpu: Element) -> None:
        """Read a processor with all that is below it."""
        values = self._values
        node = NumaNode(
            number=values.integer(cpu, "numaid", is_needed=True),
            cpus=values.cpus(cpu, "affinity"),
            arch=values.text(cpu, "arch"),
            vendor=cpu.attributes.get("vendor", ""),
            family=values.integer(cpu, "familyid"),
            model=values.integer(cpu, "modelid"),
        )
        if node.number in self._nodes:
            values.remark(cpu, f"has numaid {node.number} again: both are one node")
        self._nodes.setdefault(node.number, node)
        for child in cpu.children:
            self._take_child(child, None, node.number)

    def host(self) -> HostTopology:
        """Return what was taken; name, sources and remarks are the caller's."""
        return HostTopology(
            numa_nodes=tuple(self._nodes[number] for number in sorted(self._nodes)),
            devices=tuple(self._devices.values()),
            gpus=_numbered(tuple(self._gpus.values())),
            ports=_without_parts(tuple(self._ports.values())),
            links=tuple(self._links),
        )

    def _take_child(self, child: Element, device: PciDevice | None, node: int) -> None:
        """Read what is below a PCI device, or below a processor itself."""
        if child.tag == "pci":
            self._take_pci(child, device, node)
        elif child.tag == "nic":
            self._take_nic(child, device, node)
        elif child.tag == "gpu" and device:
            self._take_gpu(child, device)
        elif child.tag == "pcilink" and device:
            self._take_link(child, LinkKind.PCI, device.bus_id, 1)
        else:
            self._leave_out(child)

    def _take_pci(self, element: Element, above: PciDevice | None, node: int) -> None:
        told = self._pci_device(element, above.bus_id if above else "", node)
        device = self._add_device(element, told)
        if not device:
            return
        for child in element.children:
            self._take_child(child, device, node)
        if not element.named("pci", "gpu", "nic"):
            self._take_bare(device)

    def _add_device(self, element: Element, device: PciDevice) -> PciDevice | None:
        """Return what stands for a device from now on; none if nothing can."""
        if not device.bus_id:
            return None
        there = self._devices.setdefault(device.bus_id, device)
        if there is device:
            return device
        if there.parent == device.parent:
            self._values.remark(element, f"{device.bus_id} is listed again")
            return there
        # Another device under a wrong address: NCCL takes it where it stands.
        for function in range(1, 8):
            other = device._replace(bus_id=f"{device.bus_id[:-1]}{function}")
            if other.bus_id not in self._devices:
                self._values.remark(
                    element, f"has the address of another; it is {other.bus_id} here"
                )
                self._devices[other.bus_id] = other
                return other
        self._leave_out(element)
        return None

    def _pci_device(self, element: Element, parent: str, node: int) -> PciDevice:
        values = self._values
        return PciDevice(
            bus_id=values.bus_id(element, "busid"),
            parent=parent,
            node=node,
            class_code=values.code(element, "class", is_needed=True),
            vendor=values.code(element, "vendor"),
            device=values.code(element, "device"),
            subsystem_vendor=values.code(element, "subsystem_vendor"),
            subsystem_device=values.code(element, "subsystem_device"),
            speed=values.text(element, "link_speed"),
            width=values.integer(element, "link_width", is_needed=True),
        )

    def _take_bare(self, device: PciDevice) -> None:
        """Take a device that only its class tells of."""
        if device.class_code >> 16 in _GPU_CLASSES:
            bare = GpuDevice(device.bus_id, UNKNOWN)
            self._gpus.setdefault(device.bus_id, bare)
        elif is_network(device.class_code):
            self._add_port(NetPort(device.bus_id, device.bus_id, kind=_kind(device)))

    def _take_gpu(self, element: Element, device: PciDevice) -> None:
        values = self._values
        if device.bus_id in self._gpus:
            values.remark(element, f"is one more part of {device.bus_id}: left out")
            return
        self._gpus[device.bus_id] = GpuDevice(
            bus_id=device.bus_id,
            number=values.integer(element, "dev", is_needed=True),
            rank=values.integer(element, "rank", is_needed=True),
            sm=values.integer(element, "sm", is_needed=True),
            gcn=element.attributes.get("gcn", "").removeprefix("gfx"),
            gdr=values.integer(element, "gdr"),
        )
        for child in element.children:
            if child.tag in _GPU_LINKS:
                count = values.integer(child, "count", is_needed=True)
                self._take_link(child, _GPU_LINKS[child.tag], device.bus_id, count)
            elif child.tag == "c2c":
                self._take_c2c(child, device)
            else:
                self._leave_out(child)

    def _take_link(
        self, element: Element, kind: LinkKind, source: str, count: int
    ) -> None:
        target = self._values.target(element)
        if not target or count < 0:
            self._values.remark(element, f"of {source} is left out")
            return
        target_class = self._values.code(element, "tclass")
        self._links.append(Link(kind, source, target, count, target_class=target_class))

    def _take_c2c(self, element: Element, device: PciDevice) -> None:
        count = self._values.integer(element, "count", is_needed=True)
        mb_per_s = self._values.integer(element, "bw", is_needed=True)
        if count < 0 or mb_per_s < 0:
            self._values.remark(element, f"of {device.bus_id} is left out")
            return
        target = self._nodes[device.node].name
        gb_per_s = mb_per_s * count / 1000
        self._links.append(Link(LinkKind.C2C, device.bus_id, target, count, gb_per_s))

    def _take_nic(self, nic: Element, device: PciDevice | None, node: int) -> None:
        for child in nic.children:
            if child.tag != "net":
                self._leave_out(child)
            elif self._values.integer(child, "net", default=1) == 0:
                self._values.remark(child, "carries no NCCL messages and is left out")
            else:
                self._take_net(child, device, node)
        if device and not nic.named("net"):
            self._take_bare(device)

    def _take_net(self, element: Element, device: PciDevice | None, node: int) -> None:
        values = self._values
        number = values.integer(element, "dev", is_needed=True)
        bus_id = device.bus_id if device else ""
        port = NetPort(
            title=values.text(element, "name") or bus_id or f"dev{number}",
            bus_id=bus_id,
            node=UNKNOWN if device else node,
            number=number,
            kind=_kind(device) if device else "",
            mbit_per_s=values.integer(element, "speed", default=0),
            port=values.integer(element, "port"),
            guid=element.attributes.get("guid", ""),
            gdr=values.integer(element, "gdr"),
            latency_us=values.number(element, "latency"),
        )
        if not self._add_port(port):
            values.remark(element, f"{port.title} is listed again and left out")

    def _add_port(self, port: NetPort) -> bool:
        """Add a port under a title of its own; return whether it was not there."""
        there = self._ports.get(port.title)
        if there and (there.number, there.port) != (port.number, port.port):
            # One adapter, two ports; NCCL's log writes them so, too.
            mark = port.port if port.port != there.port else port.number
            port = port._replace(title=f"{port.title}:{mark}")
        return self._ports.setdefault(port.title, port) is port

    def _leave_out(self, element: Element) -> None:
        self._values.remark(element, "has no place there and is left out")


def _kind(device: PciDevice) -> str:
    # What calls itself an Ethernet controller may be EFA or Slingshot.
    return "infiniband" if device.class_code >> 8 == _INFINIBAND_CLASS else ""


def _numbered(gpus: tuple[GpuDevice, ...]) -> tuple[GpuDevice, ...]:
    """Return GPUs with numbers for those without, as drivers count: by bus address."""
    taken = {gpu.number for gpu in gpus}
    free = (number for number in range(2 * len(gpus)) if number not in taken)
    bare = [gpu.bus_id for gpu in gpus if gpu.number < 0]
    numbers = dict(zip(sorted(bare, key=pci.bus_order), free, strict=False))
    return tuple(
        gpu._replace(number=numbers.get(gpu.bus_id, gpu.number)) for gpu in gpus
    )


def _without_parts(ports: tuple[NetPort, ...]) -> tuple[NetPort, ...]:
    """Return ports without those that NCCL has fused into one of name ``a+b``."""
    parts = {
        part for port in ports if "+" in port.title for part in port.title.split("+")
    }
    return tuple(
        port for port in ports if port.number != UNKNOWN or port.title not in parts
    )
