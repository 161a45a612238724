"""The XML that hwloc's ``lstopo`` writes, of versions 2 and 3.

Of a PCI device's link hwloc has the bandwidth, not the speed.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.topology.cpu_sets import members, parse_mask
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
)
from ronde.topology.pci import compute_capability, is_gpu, plain_address
from ronde.topology.probes.base import (
    Element,
    Saved,
    bad_value,
    outermost_tag,
    parse_xml,
)

# More hardware threads than this are no machine.
_MAX_CPUS = 1 << 16
_CPU_WORD = re.compile(r"(?:0x)?([0-9a-f]{0,8})", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]{1,18}")
_LINK_KINDS = {"NVLinkBandwidth": LinkKind.NVLINK, "XGMIBandwidth": LinkKind.XGMI}
_LATENCY = "NUMALatency"
_ARCHS = {"aarch64": "arm64", "ppc64le": "ppc64"}
_GPU_BACKENDS = ("CUDA", "NVML", "RSMI", "LevelZero")
_UUIDS = ("NVIDIAUUID", "AMDUUID", "LevelZeroUUID")
_TYPE = re.compile(
    r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]"
    r"(?: \[([0-9a-f]{4}):([0-9a-f]{4})\])?(?: [0-9a-f]{2})?(?: ([0-9a-f]{2}))?",
    re.IGNORECASE,
)
_PORT_STATE = re.compile(r"Port([0-9]{1,3})State")
# GB/s that hwloc counts a link; by compute capability. Source: hwloc's
# ``hwloc/topology-nvml.c``.
_FIRST_NVLINK_SM, _FIRST_NVLINK_GB_PER_S, _NVLINK_GB_PER_S = 60, 20.0, 25.0

_Distances = dict[int, tuple[tuple[int, int], ...]]


class HwlocProbe:
    """Reads hwloc's XML."""

    format = "hwloc XML"

    def recognises(self, saved: Saved) -> bool:
        return outermost_tag(saved.data) == "topology"

    def read(self, saved: Saved) -> Topology:
        """Return the machine.

        Raises:
            UsageError: It is no well-formed XML, no hwloc's, or a value in it cannot be
                read.
        """
        root = parse_xml(saved.data, saved.name)
        machines = root.named("object")
        if root.tag != "topology" or not machines:
            raise UsageError(
                f"{saved.name} must be a machine as hwloc writes it, got {root.tag} "
                f"with {len(machines)} objects. Write it with: lstopo file.xml"
            )
        version = _decimal(root.attributes.get("version", "1"))
        if not version >= 2:
            rule = "version must be a number from 2 (lstopo of hwloc 2 writes it)"
            got = root.attributes.get("version", "none")
            raise bad_value(saved.name, root.line, rule, got)
        host = _host(root, machines[0], saved.name, version)
        return Topology((host._replace(sources=(f"{self.format} {saved.name}",)),))


class _Object(NamedTuple):
    """An object, and where it stands."""

    element: Element
    cpus: int  # Its CPUs as bits, else those of the nearest object around it.
    package: "_Object | None"  # The package around it.
    bus_id: str  # Of the nearest PCI device or bridge around it; empty if none.
    origin: str  # The file's name in messages.

    @property
    def kind(self) -> str:
        return self.text("type")

    def text(self, name: str) -> str:
        return self.element.attributes.get(name, "")

    def number(self, name: str) -> int:
        return _number(self.element, name, self.origin)

    def infos(self) -> dict[str, str]:
        return _infos(self.element)

    def bad(self, rule: str, got: object) -> UsageError:
        return bad_value(self.origin, self.element.line, rule, got)


def _walk(machine: Element, origin: str) -> Iterator[_Object]:
    """Yield all objects, parents before children, in the order of the file."""
    waiting = [_Object(machine, 0, None, "", origin)]
    while waiting:
        each = waiting.pop()
        if "cpuset" in each.element.attributes:
            each = each._replace(cpus=_cpus(each.element, origin))
        yield each
        package = each if each.kind == "Package" else each.package
        text = each.text("pci_busid")
        address = plain_address(text)
        if text and not address:
            raise each.bad("pci_busid must be an address such as 0000:1b:00.0", text)
        bus_id = address or each.bus_id
        waiting += [
            _Object(child, each.cpus, package, bus_id, origin)
            for child in reversed(each.element.named("object"))
        ]


def _infos(element: Element) -> dict[str, str]:
    found = (info.attributes for info in element.named("info"))
    return {each.get("name", ""): each.get("value", "") for each in found}


def _number(element: Element, name: str, origin: str) -> int:
    text = element.attributes.get(name)
    if text is None:
        return UNKNOWN
    if not _NUMBER.fullmatch(text):
        raise bad_value(origin, element.line, f"{name} must be a whole number", text)
    return int(text)


def _decimal(text: str) -> float:
    """Return a number that is finite and not negative; ``nan`` for anything else."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if 0 <= value < math.inf else math.nan


def _cpus(element: Element, origin: str) -> int:
    """Return an element's ``cpuset`` as bits; empty where there is none.

    Words of 32 bits stand between commas, the highest first, without their zeros.
    """
    text = element.attributes.get("cpuset", "")
    words = [_CPU_WORD.fullmatch(word) for word in text.split(",", _MAX_CPUS // 32)]
    if not all(words):
        rule = (
            f"cpuset must be words of hexadecimal digits for at most {_MAX_CPUS} CPUs"
        )
        raise bad_value(origin, element.line, rule, text)
    return parse_mask("".join(word[1].zfill(8) for word in words if word))


def _host(root: Element, machine: Element, origin: str, version: float) -> HostTopology:
    # What holds for the whole machine stands in it before version 3, then beside it.
    infos = {**_infos(root), **_infos(machine)}
    objects = list(_walk(machine, origin))
    nodes = _Nodes(objects, infos)
    devices = _read_devices(objects, nodes, _read_localities(root, origin))
    gpus = _read_gpus(objects, devices)
    ports = _read_ports(objects, nodes, version)
    ends = [each.bus_id for each in (*gpus, *ports) if each.bus_id]
    return HostTopology(
        name=infos.get("HostName", ""),
        numa_nodes=nodes.with_distances(_read_distances(root, objects, origin)),
        devices=_keep_lower_ends(devices, ends),
        gpus=gpus,
        ports=ports,
        links=tuple(_read_links(root, _names(objects, nodes), gpus, origin)),
    )


class _Nodes:
    """The NUMA nodes of a machine.

    A CPU is in one of them: where nodes have the same CPUs, as memory of two sorts in
    one package has, those belong to ordinary memory, and there to the lowest number.
    """

    def __init__(self, objects: Sequence[_Object], infos: Mapping[str, str]) -> None:
        self._infos = infos
        self._threads = _threads(objects)
        self._own: dict[int, int] = {}
        self._owner: dict[int, int] = {}
        numbered: dict[int, _Object] = {}
        for each in objects:
            if each.kind == "NUMANode":
                number = each.number("os_index")
                if number in numbered or number == UNKNOWN:
                    rule = "a NUMANode must have an os_index of its own"
                    raise each.bad(rule, each.text("os_index"))
                numbered[number] = each
        # Without any, all is one node.
        numbered = numbered or {0: objects[0]}
        self._share(numbered)
        cores: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        self._packages: dict[int, _Object] = {}
        taken = 0
        for each in objects:
            threads = each.cpus & self._threads
            if each.kind == "Core" and threads:
                cores[self.near(threads)].append(tuple(members(threads)))
            elif each.kind == "Package":
                self._packages |= dict.fromkeys(members(each.cpus & ~taken), each)
                taken |= each.cpus
        self._nodes = {
            number: self._node(number, each, tuple(sorted(cores[number])))
            for number, each in sorted(numbered.items())
        }

    def with_distances(self, distances: _Distances) -> tuple[NumaNode, ...]:
        return tuple(
            node._replace(distances=distances.get(number, ()))
            for number, node in self._nodes.items()
        )

    def near(self, cpus: int) -> int:
        """Return the node that has all of some CPUs; ``UNKNOWN`` if none has."""
        first = (cpus & -cpus).bit_length() - 1
        number = self._owner.get(first, UNKNOWN)
        return number if cpus & ~self._own.get(number, 0) == 0 else UNKNOWN

    def _share(self, numbered: Mapping[int, _Object]) -> None:
        def precedence(item: tuple[int, _Object]) -> tuple[bool, int, int]:
            number, each = item
            is_special = each.text("subtype") not in ("", "DRAM")
            return is_special, each.cpus.bit_count(), number

        taken = 0
        for number, each in sorted(numbered.items(), key=precedence):
            cpus = each.cpus & self._threads if self._threads else each.cpus
            self._own[number] = cpus & ~taken
            taken |= cpus
            self._owner |= dict.fromkeys(members(self._own[number]), number)

    def _node(
        self, number: int, each: _Object, cores: tuple[tuple[int, ...], ...]
    ) -> NumaNode:
        cpus = members(self._own[number])
        package = each.package
        if cpus:
            # None where they are of several.
            around = [self._packages[cpu] for cpu in cpus if cpu in self._packages]
            is_one = len({id(each) for each in around}) == 1
            package = around[0] if is_one else None
        infos = {**self._infos, **(package.infos() if package else {})}
        arch = infos.get("Architecture", "")
        family = _small_number(infos.get("CPUFamilyNumber", ""))
        return NumaNode(
            number=number,
            cpus=tuple(cpus),
            cores=cores,
            memory_bytes=each.number("local_memory"),
            package=package.number("os_index") if package else UNKNOWN,
            arch=_ARCHS.get(arch, arch),
            vendor=infos.get("CPUVendor", ""),
            # NCCL adds 16 times what goes beyond 15, hwloc and the kernel once.
            family=15 + 16 * (family - 15) if family > 15 else family,
            model=_small_number(infos.get("CPUModelNumber", "")),
        )


def _threads(objects: Sequence[_Object]) -> int:
    found: set[int] = set()
    for each in objects:
        if each.kind == "PU":
            number = each.number("os_index")
            if not 0 <= number < _MAX_CPUS:
                rule = f"a PU's os_index must be from 0 to {_MAX_CPUS - 1}"
                raise each.bad(rule, each.text("os_index"))
            found.add(number)
    return sum(1 << number for number in found)


def _small_number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else UNKNOWN


def _read_localities(root: Element, origin: str) -> list[tuple[int, range, int]]:
    """Return domain, buses and the CPUs near them, where the tree has them not."""
    found: list[tuple[int, range, int]] = []
    for each in root.named("pci_locality"):
        words = [each.attributes.get(n, "") for n in ("domain", "bus_min", "bus_max")]
        try:
            domain, first, last = (int(word[:10], 16) for word in words)
        except ValueError:
            rule = "pci_locality must be of numbered buses"
            raise bad_value(origin, each.line, rule, words) from None
        found.append((domain, range(first, last + 1), _cpus(each, origin)))
    return found


def _read_devices(
    objects: Iterable[_Object],
    nodes: _Nodes,
    localities: Sequence[tuple[int, range, int]],
) -> tuple[PciDevice, ...]:
    found: dict[str, PciDevice] = {}
    for each in objects:
        address = plain_address(each.text("pci_busid"))
        if each.kind not in ("PCIDev", "Bridge") or not address:
            continue
        if address in found:
            raise each.bad("pci_busid must be listed once", address)
        node = nodes.near(each.cpus)
        if node == UNKNOWN:
            own, bus = (int(part, 16) for part in address.split(":")[:2])
            near = (cpus for n, buses, cpus in localities if n == own and bus in buses)
            node = nodes.near(next(near, 0))
        found[address] = _device(each, address, node)
    return tuple(found.values())


def _device(each: _Object, address: str, node: int) -> PciDevice:
    kind = _TYPE.fullmatch(each.text("pci_type"))
    speed = _decimal(each.text("pci_link_speed") or "0")
    if kind is None or math.isnan(speed):
        raise each.bad(
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


def _keep_lower_ends(
    devices: Sequence[PciDevice], ends: Iterable[str]
) -> tuple[PciDevice, ...]:
    """Return the devices at ``ends`` and those above, without the upper ends of links.

    hwloc lists both ends of a link: the upper one, a processor's or switch's port, and
    the lower one, the device or switch below. NCCL and the graph have only the lower,
    with the lower of the rates of both.
    """
    by_bus_id = {device.bus_id: device for device in devices}
    parents: dict[str, str] = {}
    for end in ends:
        place = end
        while place in by_bus_id and place not in parents:
            above = by_bus_id.get(by_bus_id[place].parent)
            parents[place] = place = above.parent if above else ""
    found: list[PciDevice] = []
    for device in devices:
        if device.bus_id in parents:
            above = by_bus_id.get(device.parent)
            rate = device.gb_per_s
            if above and above.gb_per_s > 0:
                rate = min(rate, above.gb_per_s)
            found.append(device._replace(parent=parents[device.bus_id], gb_per_s=rate))
    return tuple(found)


def _read_gpus(
    objects: Iterable[_Object], devices: Sequence[PciDevice]
) -> tuple[GpuDevice, ...]:
    """Return GPUs in the order of the devices, with what their drivers have of them."""
    known: dict[str, dict[str, str]] = {}
    for each in objects:
        infos = each.infos() if each.kind == "OSDev" else {}
        # The library that found it; each version has it elsewhere.
        backend = each.text("subtype") or infos.get("CoProcType", "")
        if each.bus_id and (backend or infos.get("Backend", "")) in _GPU_BACKENDS:
            known.setdefault(each.bus_id, {}).update(infos)
    found: list[GpuDevice] = []
    for device in devices:
        if device.bus_id in known or is_gpu(device.class_code, device.vendor):
            infos = known.get(device.bus_id, {})
            title = infos.get("GPUModel", "")
            uuid = next((infos[name] for name in _UUIDS if name in infos), "")
            sm = compute_capability(title)
            gpu = GpuDevice(device.bus_id, len(found), sm=sm, title=title, uuid=uuid)
            found.append(gpu)
    return tuple(found)


def _read_ports(
    objects: Iterable[_Object], nodes: _Nodes, version: float
) -> tuple[NetPort, ...]:
    found: list[NetPort] = []
    for each in objects:
        sort = each.number("osdev_type") if each.kind == "OSDev" else UNKNOWN
        # Version 3 changed the numbers for sorts of devices to bits.
        is_bits = version >= 3 and sort != UNKNOWN
        is_net = bool(sort & 16) if is_bits else sort == 2
        is_rdma = bool(sort & 32) if is_bits else sort == 3
        if not each.text("name") or not (is_net or is_rdma):
            continue
        infos = each.infos() if is_rdma else {}
        port = NetPort(
            title=each.text("name"),
            bus_id=each.bus_id,
            node=UNKNOWN if each.bus_id else nodes.near(each.cpus),
            kind="infiniband" if is_rdma else "ethernet",
        )
        states = {
            int(match[1]): state
            for name, state in infos.items()
            if (match := _PORT_STATE.fullmatch(name))
        }
        found += [
            port._replace(port=number, is_up=state.startswith("4"))
            for number, state in sorted(states.items())
        ] or [port]
    return tuple(found)


def _names(objects: Iterable[_Object], nodes: _Nodes) -> dict[str, str]:
    """Return the names of what links can lead to by hwloc's numbers of objects.

    What stands for a processor is its NUMA node.
    """
    found: dict[str, str] = {}
    for each in objects:
        address = plain_address(each.text("pci_busid"))
        name = address or (each.bus_id if each.kind == "OSDev" else "")
        if not name and (node := nodes.near(each.cpus)) != UNKNOWN:
            name = f"numa/{node}"
        if name and each.text("gp_index"):
            found[each.text("gp_index")] = name
    return found


def _read_links(
    root: Element, names: Mapping[str, str], gpus: Sequence[GpuDevice], origin: str
) -> Iterator[Link]:
    """Yield the direct links whose ends are known, each direction by itself.

    hwloc has the bandwidth of all links together.
    """
    capabilities = {gpu.name: gpu.sm for gpu in gpus}
    for matrix in root.named("distances2", "distances2hetero"):
        kind = _LINK_KINDS.get(matrix.attributes.get("name", ""))
        if kind is None:
            continue
        indexes = [word.rpartition(":")[2] for word in _words(matrix, "indexes")]
        for source, target, value in _entries(matrix, indexes, origin):
            ends = names.get(source, ""), names.get(target, "")
            if source == target or value <= 0 or not all(ends):
                continue
            sm = max(capabilities.get(end, UNKNOWN) for end in ends)
            is_first = sm == _FIRST_NVLINK_SM
            rate = _FIRST_NVLINK_GB_PER_S if is_first else _NVLINK_GB_PER_S
            count = max(1, round(value / 1000 / rate))
            if kind is not LinkKind.NVLINK:
                count = 1
            yield Link(kind, *ends, count, value / 1000)


def _read_distances(
    root: Element, objects: Sequence[_Object], origin: str
) -> _Distances:
    """Return, for each NUMA node, the pairs of number and distance."""
    nodes = [each for each in objects if each.kind == "NUMANode"]
    numbers = {each.text("gp_index"): each.number("os_index") for each in nodes}
    for matrix in root.named("distances2"):
        given = matrix.attributes
        if given.get("type") == "NUMANode" and given.get("name", _LATENCY) == _LATENCY:
            words = _words(matrix, "indexes")
            if given.get("indexing") == "gp":
                words = [str(numbers.get(word, "")) for word in words]
            return _by_node(matrix, words, origin)
    return {}


def _by_node(matrix: Element, numbers: Sequence[str], origin: str) -> _Distances:
    if any(_small_number(number) == UNKNOWN for number in numbers):
        rule = "indexes must be numbers of NUMA nodes"
        raise bad_value(origin, matrix.line, rule, numbers)
    found: dict[int, list[tuple[int, int]]] = {int(number): [] for number in numbers}
    for source, target, value in _entries(matrix, numbers, origin):
        found[int(source)].append((int(target), round(value)))
    return {number: tuple(row) for number, row in found.items()}


def _entries(
    matrix: Element, names: Sequence[str], origin: str
) -> Iterator[tuple[str, str, float]]:
    """Yield source, target and value of each entry, row by row."""
    words = _words(matrix, "u64values")
    values = list(map(_decimal, words))
    if any(math.isnan(value) or value > 1e15 for value in values):
        raise bad_value(origin, matrix.line, "values must be numbers from 0", words)
    num = len(names)
    if len(values) != num**2 or len(set(names)) != num:
        rule = f"a matrix of {num} different objects must have {num} * {num} values"
        raise bad_value(origin, matrix.line, rule, len(values))
    for place, value in enumerate(values):
        yield names[place // num], names[place % num], value


def _words(matrix: Element, tag: str) -> list[str]:
    """Return the words that stand in all children of a name together."""
    return [word for child in matrix.named(tag) for word in child.text.split()]
