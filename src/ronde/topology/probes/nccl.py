"""NCCL's topology file, and AMD's of the same form.

NCCL writes one for ``NCCL_TOPO_DUMP_FILE`` and reads one for ``NCCL_TOPO_FILE``. Files
of clouds hold processors and PCI devices alone: the PCI class tells GPUs and network
adapters.
"""

import math
import re

from ronde.errors import UsageError
from ronde.plain_values import shorten
from ronde.topology import cpu_sets, pci
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
from ronde.topology.pci import is_network, plain_address
from ronde.topology.probes.base import Saved
from ronde.topology.xml_tree import Element, outermost_tag, parse_xml

MAX_REMARKS = 100
"""More about one file help nobody."""

_INTEGER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]{1,15}|[0-9]{1,18})\s*")
_CODE = re.compile(r"\s*(?:0[xX])?([0-9a-fA-F]{1,15})\s*")
_UNSEEN = "fffffff:"
_MASK = re.compile(r"[0-9a-fA-F]{0,8}(,[0-9a-fA-F]{0,8}){0,255}")


def parse_affinity(text: str) -> tuple[int, ...]:
    """Return the CPUs of words of 32 bits, highest first.

    Raises:
        ValueError: It is no such mask, or one of more than 8192 CPUs.
    """
    if not _MASK.fullmatch(text):
        raise ValueError(text)
    # NCCL lets words be shorter than the kernel writes them.
    words = ",".join(word.zfill(8) for word in text.split(","))
    return tuple(cpu_sets.members(cpu_sets.parse_mask(words)))


class AttributeReader:
    """Reads attributes of elements.

    What is missing though it is needed, and what is there and cannot be read, stands
    as a sentence in ``remarks`` and is ``UNKNOWN`` or empty.
    """

    def __init__(self) -> None:
        self.remarks: list[str] = []

    def remark(self, element: Element, what: str) -> None:
        """Note what is odd about an element: ``has no busid``."""
        if len(self.remarks) < MAX_REMARKS:
            self.remarks.append(f"Line {element.line}: {element.tag} {what}.")
        elif len(self.remarks) == MAX_REMARKS:
            self.remarks.append(f"More than these {MAX_REMARKS} things are odd.")

    def text(self, element: Element, name: str) -> str:
        """Return an attribute that is needed, as written."""
        if name not in element.attributes:
            self.remark(element, f"has no {name}")
        return element.attributes.get(name, "")

    def integer(
        self,
        element: Element,
        name: str,
        *,
        is_needed: bool = False,
        default: int = UNKNOWN,
    ) -> int:
        """Return a number, decimal or after 0x, or the default."""
        text = self._told(element, name, is_needed=is_needed)
        found = _INTEGER.fullmatch(text) if text is not None else None
        if found:
            sign, digits = found.groups()
            value = int(digits, 16) if digits[1:2] in ("x", "X") else int(digits)
            return -value if sign == "-" else value
        self._remark_unread(element, name, text)
        return default

    def code(self, element: Element, name: str, *, is_needed: bool = False) -> int:
        """Return a hexadecimal number, with or without 0x."""
        text = self._told(element, name, is_needed=is_needed)
        if text is not None and (found := _CODE.fullmatch(text)):
            return int(found[1], 16)
        self._remark_unread(element, name, text)
        return UNKNOWN

    def number(self, element: Element, name: str) -> float:
        """Return a number with a fraction; 0 where there is none."""
        text = self._told(element, name, is_needed=False)
        try:
            value = float(text or "nan")
        except ValueError:
            value = math.nan
        if math.isfinite(value):
            return value
        self._remark_unread(element, name, text)
        return 0.0

    def cpus(self, element: Element, name: str) -> tuple[int, ...]:
        """Return the CPUs of a mask."""
        text = self._told(element, name, is_needed=True)
        try:
            return parse_affinity(text or "")
        except ValueError:
            self._remark_unread(element, name, text)
            return ()

    def bus_id(self, element: Element, name: str) -> str:
        """Return a PCI bus address; empty where there is none."""
        text = self._told(element, name, is_needed=True)
        bus_id = plain_address((text or "").strip())
        if not bus_id:
            self._remark_unread(element, name, text)
        return bus_id

    def target(self, element: Element) -> str:
        """Return what a link leads to; empty where that is not told."""
        # NCCL's name for a switch that a virtual machine does not see.
        if element.attributes.get("target", "").lower().startswith(_UNSEEN):
            return NVSWITCH
        return self.bus_id(element, "target")

    def _told(self, element: Element, name: str, *, is_needed: bool) -> str | None:
        text = element.attributes.get(name)
        if text is None and is_needed:
            self.remark(element, f"has no {name}")
        return text

    def _remark_unread(self, element: Element, name: str, text: str | None) -> None:
        if text is not None:
            self.remark(element, f"has {name}={shorten(text)}, which cannot be read")


_GPU_CLASSES = (0x03, 0x12)
"""Display controllers, and AMD's accelerators."""
_INFINIBAND_CLASS = 0x0207
_GPU_LINKS = {"nvlink": LinkKind.NVLINK, "xgmi": LinkKind.XGMI}


class HostReader:
    """Takes the processors of one host and gives the host."""

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


_VERSIONS = ("1", "2")


class NcclTopologyProbe:
    """Reads NCCL's topology files."""

    @property
    def format(self) -> str:
        """The form, for people."""
        return "NCCL topology file"

    def recognises(self, saved: Saved) -> bool:
        """Return whether a file is of this form."""
        return outermost_tag(saved.data) == "system"

    def read(self, saved: Saved) -> Topology:
        """Return what a file says; processors of several hosts are so many hosts.

        Raises:
            UsageError: It is no such XML, or lists no processor.
        """
        root = parse_xml(saved.data, saved.name)
        if root.tag != "system":
            raise UsageError(
                f"{saved.name} must begin with the element system, got {root.tag} at "
                f"line {root.line}. Is it a {self.format}?"
            )
        hosts = _by_host(root)
        if not hosts:
            raise UsageError(
                f"{saved.name} must list at least one cpu, got none. Write it with "
                "NCCL_TOPO_DUMP_FILE."
            )
        values = AttributeReader()
        _check_root(root, values)
        source = f"{self.format} {saved.name}"
        return Topology(
            hosts=tuple(
                # Where there is one, the file does not name it.
                _read_host(cpus, name if len(hosts) > 1 else "", source, values)
                for name, cpus in hosts.items()
            )
        )


def _by_host(root: Element) -> dict[str, list[Element]]:
    """Return the processors by the hash of their host, in the order of the file."""
    hosts: dict[str, list[Element]] = {}
    for cpu in root.named("cpu"):
        hosts.setdefault(cpu.attributes.get("host_hash", "").lower(), []).append(cpu)
    return hosts


def _check_root(root: Element, values: AttributeReader) -> None:
    version = values.text(root, "version")
    if version and version not in _VERSIONS:
        values.remark(root, f"has version {version[:20]!r}, and is read like version 1")
    for child in root.children:
        if child.tag != "cpu":
            values.remark(child, "has no place there and is left out")


def _read_host(
    cpus: list[Element], name: str, source: str, values: AttributeReader
) -> HostTopology:
    reader = HostReader(values)
    for cpu in cpus:
        reader.take_cpu(cpu)
    host = reader.host()._replace(
        name=name, sources=(source,), remarks=tuple(values.remarks)
    )
    values.remarks.clear()
    return host
