"""Two hosts side by side: what one has and the other lacks, and what that costs.

Elements are matched by bus address. What is left over on both sides, as where a virtual
machine counts its buses anew, is matched in the order of numbers and of ports' names,
if it is equally many. A kind of element that one host does not show is left out.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple, TypeVar

from ronde.topology.cpu_sets import format_list
from ronde.topology.graph import (
    UNKNOWN,
    GpuDevice,
    HostTopology,
    LinkKind,
    NetPort,
    NumaNode,
    PciDevice,
)
from ronde.topology.paths.network import Path, PathKind, Paths, find_paths
from ronde.topology.paths.speeds import (
    is_link_known,
    link_gb_per_s,
    pci_gb_per_s,
    port_gb_per_s,
)
from ronde.topology.pci import bus_order, is_address

_GIB = 2**30
_NEARLY = 0.02
_GDR = {0: "off", 1: "on"}


class Fact(NamedTuple):
    """One fact on an element."""

    name: str  # For people: ``PCI link``.
    value: str  # Empty if unknown.
    gb_per_s: float = 0.0  # NCCL's figure where it is a bandwidth; else 0.
    amount: float = 0.0  # Of what is never quite alike; else 0.

    def differs_from(self, other: "Fact") -> bool:
        """Return whether both are known, and not alike or nearly so."""
        if not self.value or not other.value:
            return False
        if self.amount and other.amount:
            return abs(self.amount - other.amount) > _NEARLY * self.amount
        return self.value != other.value


Facts = dict[str, tuple[Fact, ...]]
"""Of each element by its name."""


def gpu_facts(host: HostTopology) -> Facts:
    """Return what is known of each GPU."""
    devices = {device.bus_id: device for device in host.devices}
    return {
        gpu.name: (
            Fact("chip", (gpu.gcn and f"gfx{gpu.gcn}") or _number("sm {}", gpu.sm)),
            *_place_facts(devices, gpu.bus_id, gpu.node),
            _direct_links(host, gpu),
            Fact("GPUDirect RDMA", _GDR.get(gpu.gdr, "")),
        )
        for gpu in host.gpus
    }


def _port_facts(host: HostTopology) -> Facts:
    devices = {device.bus_id: device for device in host.devices}
    found: Facts = {}
    for port in host.ports:
        speed, state = Fact("network speed", ""), "" if port.is_up else "down"
        if port.mbit_per_s:
            value = f"{port.mbit_per_s} Mb/s"
            speed = Fact("network speed", value, port_gb_per_s(port))
            # Where nothing is known, a port counts as up.
            state = state or "up"
        found[port.name] = (
            Fact("port", port.title),
            *_place_facts(devices, port.bus_id, port.node),
            speed,
            Fact("state", state),
            Fact("GPUDirect RDMA", _GDR.get(port.gdr, "")),
        )
    return found


def _node_facts(host: HostTopology) -> Facts:
    found: Facts = {}
    for node in host.numa_nodes:
        size, cpus = max(0, node.memory_bytes), node.cpus
        numbers = _number("family {}", node.family), _number("model {}", node.model)
        distances = " ".join(f"{other}:{far}" for other, far in node.distances)
        found[node.name] = (
            Fact("CPUs", f"{len(cpus)} ({format_list(cpus)})" if cpus else ""),
            Fact("memory", f"{size / _GIB:.1f} GiB" if size else "", amount=size),
            Fact("processor", " ".join(filter(None, (node.vendor, *numbers)))),
            Fact("distances", distances),
        )
    return found


def _place_facts(
    devices: dict[str, PciDevice], bus_id: str, own_node: int
) -> tuple[Fact, ...]:
    """Return where a device sits, and by what links it is joined to the processor."""
    chain: list[PciDevice] = []
    device = devices.get(bus_id)
    while device and device not in chain:
        chain.append(device)
        device = devices.get(device.parent)
    node = next((each.node for each in chain if each.node != UNKNOWN), own_node)
    facts = Fact("bus address", bus_id), Fact("NUMA node", _number("{}", node))
    if not chain:
        return facts
    own, *above = [_link(each) for each in chain]
    return (
        *facts,
        own._replace(name="PCI link"),
        Fact(
            "links above",
            ", ".join(each.value or "?" for each in above) or (own.value and "none"),
            min((each.gb_per_s for each in above if each.gb_per_s), default=0.0),
        ),
    )


def _direct_links(host: HostTopology, gpu: GpuDevice) -> Fact:
    counts: Counter[LinkKind] = Counter()
    own = [link for link in host.links if link.source == gpu.name]
    for link in own:
        counts[link.kind] += link.num_links
    is_known = all(is_link_known(link, gpu) for link in own)
    rate = sum(link_gb_per_s(link, gpu) for link in own) if is_known else 0.0
    value = ", ".join(f"{num} {kind}" for kind, num in sorted(counts.items()))
    # Where others have links, to have none is a fact as well.
    is_missing = not value and any(link.kind != LinkKind.PCI for link in host.links)
    return Fact("GPU links", "none" if is_missing else value, rate)


def _link(device: PciDevice) -> Fact:
    value = f"{device.gb_per_s:g} GB/s" if device.gb_per_s else ""
    if device.speed or device.width >= 0:
        lanes = f" x{device.width}" if device.width >= 0 else ""
        value = f"{device.speed or 'no speed'}{lanes}"
    return Fact("link", value, pci_gb_per_s(device) if value else 0.0)


def _number(words: str, number: int) -> str:
    return words.format(number) if number != UNKNOWN else ""


T = TypeVar("T", GpuDevice, NetPort, NumaNode)

_GPUS, _PORTS, _NODES = "GPUs", "network ports", "NUMA nodes"
_NUMBERED = re.compile(r"([^0-9]*)([0-9]*)")


class Difference(NamedTuple):
    """One fact that differs for one element."""

    element: str  # Its name in the first host.
    other: str  # Its name in the second.
    fact: str  # What differs, for people: ``PCI link``.
    was: str  # In the first host.
    now: str  # In the second.
    was_gb_per_s: float = 0.0  # What that carries; 0 where it is no bandwidth.
    now_gb_per_s: float = 0.0  # Likewise in the second.


class PathChange(NamedTuple):
    """A pair of elements with another path in the second host."""

    ends: tuple[str, str]  # Names in the first host.
    was: Path  # In the first host; 0 GB/s if unknown.
    now: Path  # Likewise in the second.


class PathComparison(NamedTuple):
    """All pairs of two kinds of elements with a known path in both hosts."""

    kind: str  # For people: ``GPU to GPU``.
    num_pairs: int  # All of them.
    changes: tuple[PathChange, ...]  # Those that differ in kind or bandwidth.


class HostComparison(NamedTuple):
    """What two hosts have in common and what not."""

    num_matched: int  # Elements that both have.
    num_by_address: int  # Of them those with one bus address, or number, in both.
    only_first: tuple[str, ...]  # Names of what the second lacks.
    only_second: tuple[str, ...]  # Names of what the first lacks.
    # What is left out, for people, because the first shows none.
    missing_first: tuple[str, ...]
    missing_second: tuple[str, ...]  # What is left out, because the second shows none.
    differences: tuple[Difference, ...]  # By element.
    # What the differences come to, in NCCL's figures.
    paths: tuple[PathComparison, ...]

    @property
    def is_equal(self) -> bool:
        has_changes = any(each.changes for each in self.paths)
        lists = self.only_first, self.only_second, self.differences
        return not any(lists) and not has_changes


class _Pairs(NamedTuple):
    """Elements of one role that were matched, as pairs of names, and the rest."""

    names: tuple[tuple[str, str], ...]
    num_same: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]


def compare_hosts(first: HostTopology, second: HostTopology) -> HostComparison:
    """Return what differs from one host to another.

    What is unknown in one of them is no difference. A host compared with itself has
    none.
    """
    gpus = _match(first.gpus, second.gpus, lambda gpu: gpu.bus_id)
    ports = _match_ports(first, second)
    nodes = _match(first.numa_nodes, second.numa_nodes, lambda node: node.name)
    roles = {_GPUS: gpus, _PORTS: ports, _NODES: nodes}
    unknown = _unknown(first), _unknown(second)
    known = [
        role for name, role in roles.items() if name not in unknown[0] | unknown[1]
    ]
    differences = [
        *_differences(gpus.names, gpu_facts(first), gpu_facts(second)),
        *_differences(ports.names, _port_facts(first), _port_facts(second)),
        *_differences(nodes.names, _node_facts(first), _node_facts(second)),
    ]
    return HostComparison(
        num_matched=sum(len(role.names) for role in known),
        num_by_address=sum(role.num_same for role in known),
        only_first=tuple(name for role in known for name in role.only_first),
        only_second=tuple(name for role in known for name in role.only_second),
        missing_first=tuple(sorted(unknown[0] - unknown[1])),
        missing_second=tuple(sorted(unknown[1] - unknown[0])),
        differences=tuple(differences),
        paths=_compare_paths(first, second, gpus.names, ports.names),
    )


def _unknown(host: HostTopology) -> set[str]:
    """Return the kinds of elements that a host does not show.

    One that shows its bus has no other GPUs and ports; NUMA nodes every host has.
    """
    shows_bus = any(device.class_code != UNKNOWN for device in host.devices)
    is_known = {
        _GPUS: shows_bus or bool(host.gpus),
        _PORTS: shows_bus or bool(host.ports),
        _NODES: bool(host.numa_nodes),
    }
    return {role for role, known in is_known.items() if not known}


def _match_ports(first: HostTopology, second: HostTopology) -> _Pairs:
    """Match ports by adapter and port; by title where no adapter is in common."""
    addresses = [{p.bus_id for p in host.ports if p.bus_id} for host in (first, second)]
    if addresses[0] & addresses[1]:
        return _match(first.ports, second.ports, _port_place)
    return _match(first.ports, second.ports, lambda port: port.title)


def _port_place(port: NetPort) -> str:
    return f"{port.bus_id} {port.port}" if port.bus_id else port.title


def _match(first: Sequence[T], second: Sequence[T], key: Callable[[T], str]) -> _Pairs:
    by_key = {key(each): each for each in second if key(each)}
    pairs: list[tuple[str, str]] = []
    left: list[T] = []
    for each in first:
        other = by_key.pop(key(each), None)
        if other is None:
            left.append(each)
        else:
            pairs.append((each.name, other.name))
    taken = {other for _, other in pairs}
    rest = [each for each in second if each.name not in taken]
    num_same = len(pairs)
    if len(left) == len(rest):
        ends = sorted(left, key=_order), sorted(rest, key=_order)
        pairs += [(a.name, b.name) for a, b in zip(*ends, strict=True)]
        left, rest = [], []
    return _Pairs(
        tuple(pairs),
        num_same,
        tuple(each.name for each in left),
        tuple(each.name for each in rest),
    )


def _order(
    element: GpuDevice | NetPort | NumaNode,
) -> tuple[list[int], list[tuple[str, int, str]]]:
    """Return a key by number, of ports by title: ``mlx5_2`` before ``mlx5_10``."""
    if not isinstance(element, NetPort):
        return [element.number], []
    # A port without a known name goes by its adapter's address.
    if is_address(element.title):
        return bus_order(element.title), []
    parts = [(text, n.lstrip("0")) for text, n in _NUMBERED.findall(element.title)]
    return [], [(text, len(digits), digits) for text, digits in parts]


def _differences(
    pairs: Sequence[tuple[str, str]],
    first: Facts,
    second: Facts,
) -> Iterator[Difference]:
    for name, other in pairs:
        now = {fact.name: fact for fact in second[other]}
        for was in first[name]:
            is_now = now.get(was.name)
            if is_now and was.differs_from(is_now):
                yield Difference(
                    name,
                    other,
                    was.name,
                    was.value,
                    is_now.value,
                    was.gb_per_s,
                    is_now.gb_per_s,
                )


def _compare_paths(
    first: HostTopology,
    second: HostTopology,
    gpus: Sequence[tuple[str, str]],
    ports: Sequence[tuple[str, str]],
) -> tuple[PathComparison, ...]:
    before, after = find_paths(first), find_paths(second)
    compared: list[PathComparison] = []
    for kind, pairs in (
        ("GPU to GPU", list(combinations(gpus, 2))),
        ("GPU to network port", list(product(gpus, ports))),
    ):
        found = [
            PathChange((a, b), was, now)
            for (a, other_a), (b, other_b) in pairs
            if (was := _known_path(before, a, b))
            and (now := _known_path(after, other_a, other_b))
        ]
        changes = tuple(each for each in found if _is_other(each.was, each.now))
        compared.append(PathComparison(kind, len(found), changes))
    return tuple(compared)


def _known_path(paths: Paths, source: str, target: str) -> Path | None:
    path = paths.between(source, target)
    return path._replace(gb_per_s=0.0) if path and not paths.is_known(path) else path


def _is_other(was: Path, now: Path) -> bool:
    """Return whether kind or bandwidth differ, as far as both are known."""
    if was.gb_per_s and now.gb_per_s:
        return (was.kind, round(was.gb_per_s, 3)) != (now.kind, round(now.gb_per_s, 3))
    # Of switches that NCCL takes for one, nvidia-smi's words count each.
    is_near = {was.kind, now.kind} <= {PathKind.PIX, PathKind.PXB}
    return was.kind != now.kind and not is_near
