"""The network of a host, put together in NCCL's order."""

from collections.abc import Iterator

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
)
from ronde.topology.paths.network import Draft, Network, VertexKind
from ronde.topology.paths.path import PathKind
from ronde.topology.paths.pci_tree import (
    POWER_BRIDGE_CLASS,
    adapter_name,
    find_numa_numbers,
    join_switches,
)
from ronde.topology.paths.rules import NcclRules
from ronde.topology.paths.speeds import (
    LOCAL_GB_PER_S,
    is_link_told,
    is_pci_told,
    link_gb_per_s,
    pci_gb_per_s,
    port_gb_per_s,
    smp_gb_per_s,
)

_NVLINK_CLASSES = (0x068000, POWER_BRIDGE_CLASS)
_GPU_CLASSES = (0x03, 0x12)
_END_CLASSES = (*_GPU_CLASSES, 0x02)


def build_network(host: HostTopology, rules: NcclRules) -> Network:
    """Return the network of a host.

    What has no PCI device hangs at its NUMA node, as if by PCIe 3. PCI devices without
    NUMA node are at one of number -1, as in NCCL, and all else without one at none. Of
    elements with the same name the first counts.
    """
    builder = _Builder(host, rules)
    builder.add_processors()
    builder.add_devices()
    builder.add_rest()
    builder.add_links()
    builder.join_processors()
    return builder.draft.finish(host, rules)


class _Builder:
    """Adds the elements of one host."""

    def __init__(self, host: HostTopology, rules: NcclRules) -> None:
        self.draft = Draft()
        self._host = host
        self._rules = rules
        self._parents = join_switches(host.devices, rules)
        self._numbers = find_numa_numbers(host)
        self._paired = host.paired
        self._gpus = {each.name: each for each in reversed(host.gpus)}
        self._nodes = {node.number: node for node in self._order_nodes()}

    def add_processors(self) -> None:
        for node in self._nodes.values():
            self.draft.add(node.name, VertexKind.CPU)

    def add_devices(self) -> None:
        adapters = {each.bus_id for each in self._host.ports}
        for device in self._host.devices:
            name, class_code = device.bus_id, device.class_code
            if name not in self._parents or name in self.draft:
                continue
            if name in self._gpus:
                self._add_gpu(device)
            elif name in adapters:
                self._add_below(device, VertexKind.NIC)
            elif (
                class_code >> 16 not in _END_CLASSES
                and class_code not in _NVLINK_CLASSES
            ):
                self._add_below(device, VertexKind.PCI)

    def add_rest(self) -> None:
        for gpu in self._host.gpus:
            if gpu.name not in self.draft:
                self._add_gpu(PciDevice(gpu.name))
        for port in self._host.ports:
            if port.name not in self.draft:
                self._add_port(port)

    def add_links(self) -> None:
        for link in self._host.links:
            if link.kind == LinkKind.PCI:
                self._add_pci_link(link)
            elif link.source in self._gpus:
                self._add_gpu_link(self._gpus[link.source], link)

    def join_processors(self) -> None:
        for node in self._nodes.values():
            for other in self._nodes.values():
                if node.number != other.number:
                    speed = smp_gb_per_s(node, other, self._rules)
                    self.draft.connect(node.name, other.name, PathKind.SYS, speed)

    def _order_nodes(self) -> Iterator[NumaNode]:
        """Yield the NUMA nodes by the devices' order, that of NCCL's files."""
        known = {each.number: each for each in self._host.numa_nodes}
        devices = {each.bus_id for each in self._host.devices}
        numbers = [n for name, n in self._numbers.items() if name in devices]
        numbers += [n for n in self._numbers.values() if n != UNKNOWN]
        numbers += known
        # Where no source tells any, that all are near one another would be a guess.
        if known or any(n != UNKNOWN for n in numbers):
            for number in dict.fromkeys(numbers):
                yield known.get(number) or NumaNode(number)

    def _add_gpu(self, device: PciDevice) -> None:
        name = device.bus_id
        if not self._rules.has_device_vertex:
            self._add_below(device, VertexKind.GPU)
            return
        holder = self._holder(name)
        self.draft.add(holder, VertexKind.DEV)
        self._hang(holder, device)
        self.draft.add(name, VertexKind.GPU)
        self.draft.join(holder, name, PathKind.LOC, LOCAL_GB_PER_S)

    def _add_port(self, port: NetPort) -> None:
        adapter = adapter_name(port)
        if adapter not in self.draft and port.bus_id:
            self._add_below(PciDevice(adapter), VertexKind.NIC)
        elif adapter not in self.draft:
            self.draft.add(adapter, VertexKind.NIC)
            self.draft.hang(adapter, self._above(adapter), LOCAL_GB_PER_S)
        # One that the source lists as a mere PCI device has a speed all the same.
        is_told = port.mbit_per_s != 0 or port.number != UNKNOWN
        speed = port_gb_per_s(port) if is_told else LOCAL_GB_PER_S
        self.draft.add(port.name, VertexKind.NET)
        self.draft.join(adapter, port.name, PathKind.LOC, speed)
        if not port.bus_id and port.name in self._paired:
            self.draft.doubt(adapter, port.name)

    def _add_below(self, device: PciDevice, kind: VertexKind) -> None:
        name = device.bus_id
        self.draft.add(name, kind)
        self._hang(name, device)

    def _hang(self, vertex: str, device: PciDevice) -> None:
        """Join a vertex by a device's PCI link to what is above the device."""
        above = self._above(device.bus_id)
        self.draft.hang(vertex, above, pci_gb_per_s(device, self._rules))
        if not is_pci_told(device):
            self.draft.doubt(vertex, above)

    def _add_pci_link(self, link: Link) -> None:
        ends = [self.draft.kind_of(link.source), self.draft.kind_of(link.target)]
        if ends == [VertexKind.PCI, VertexKind.PCI]:
            self.draft.connect(link.source, link.target, PathKind.PXB, LOCAL_GB_PER_S)

    def _add_gpu_link(self, gpu: GpuDevice, link: Link) -> None:
        source = self._holder(gpu.name)
        speed = link_gb_per_s(link, gpu, self._rules)
        target = self._target_kind(link) if speed > 0 else None
        is_c2c = link.kind == LinkKind.C2C and self._rules.has_c2c
        kind = PathKind.C2C if is_c2c else PathKind.NVL
        end = NumaNode(self._numbers[gpu.name]).name
        if target == VertexKind.GPU and link.target in self._gpus:
            # The other direction is a link of its own.
            end = self._holder(link.target)
            self.draft.connect(source, end, kind, speed)
        elif target == VertexKind.CPU and end in self.draft:
            self.draft.join(source, end, kind, speed)
        elif target == VertexKind.NVS:
            end = NVSWITCH
            if end not in self.draft:
                self.draft.add(end, VertexKind.NVS)
            self.draft.join(source, end, kind, speed)
        if target and not is_link_told(link, gpu):
            self.draft.doubt(source, end)

    def _target_kind(self, link: Link) -> VertexKind:
        """Return what a link leads to: what its class says, else its name."""
        is_gpu = link.target in self._gpus
        is_processor = self.draft.kind_of(link.target) == VertexKind.CPU
        if link.target_class != UNKNOWN:
            is_gpu = link.target_class >> 16 in _GPU_CLASSES
            is_processor = link.target_class == POWER_BRIDGE_CLASS
        if link.kind == LinkKind.C2C or is_processor:
            return VertexKind.CPU
        if is_gpu and link.target != NVSWITCH:
            return VertexKind.GPU
        return VertexKind.NVS

    def _holder(self, gpu: str) -> str:
        """Return the vertex at which a GPU's links begin."""
        return f"dev/{gpu}" if self._rules.has_device_vertex else gpu

    def _above(self, name: str) -> str:
        """Return the vertex above a device."""
        parent = self._parents.get(name, "")
        if self.draft.kind_of(parent) == VertexKind.PCI:
            return parent
        return NumaNode(self._numbers[name]).name
