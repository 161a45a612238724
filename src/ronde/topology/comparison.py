"""Two hosts side by side: what one has and the other lacks, and what that costs.

Elements are matched by bus address. What is left over on both sides, as where a virtual
machine counts its buses anew, is matched in the order of numbers and of ports' names,
if it is equally many. A kind of element that one host does not show is left out.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

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
from ronde.topology.paths.network import (
    Path,
    PathKind,
    Paths,
    bridges_above,
    find_paths,
)
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
            *_place_facts(devices, gpu),
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
            *_place_facts(devices, port),
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
    devices: Mapping[str, PciDevice], element: GpuDevice | NetPort
) -> tuple[Fact, ...]:
    """Return where a device sits, and by what links it is joined to the processor."""
    chain = bridges_above(devices, element.bus_id)
    node = next((each.node for each in chain if each.node != UNKNOWN), element.node)
    facts = Fact("bus address", element.bus_id), Fact("NUMA node", _number("{}", node))
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


_Element = GpuDevice | NetPort | NumaNode
_Pairs = list[tuple[str, str]]
_NUMBERED = re.compile(r"([^0-9]*)([0-9]*)")
# Of each kind of element: what it is called for people, and what is known of each.
_ROLES: dict[str, tuple[str, Callable[[HostTopology], Facts]]] = {
    "gpus": ("GPUs", gpu_facts),
    "ports": ("network ports", _port_facts),
    "numa_nodes": ("NUMA nodes", _node_facts),
}


def compare_hosts(first: HostTopology, second: HostTopology) -> HostComparison:
    """Return what differs from one host to another.

    What is unknown in one of them is no difference. A host compared with itself has
    none.
    """
    hidden = _hidden(first), _hidden(second)
    by_title = not {p.bus_id for p in first.ports} & {
        p.bus_id for p in second.ports if p.bus_id
    }
    pairs: dict[str, _Pairs] = {}
    differences: list[Difference] = []
    only: tuple[list[str], list[str]] = [], []
    num_matched = num_same = 0
    for role, (name, facts) in _ROLES.items():
        key = _title if by_title and role == "ports" else _place
        matched, same, *left = _match(getattr(first, role), getattr(second, role), key)
        pairs[role] = matched
        differences += _differences(matched, facts(first), facts(second))
        if name not in hidden[0] | hidden[1]:
            num_matched, num_same = num_matched + len(matched), num_same + same
            only[0].extend(left[0])
            only[1].extend(left[1])
    return HostComparison(
        num_matched,
        num_same,
        tuple(only[0]),
        tuple(only[1]),
        missing_first=tuple(sorted(hidden[0] - hidden[1])),
        missing_second=tuple(sorted(hidden[1] - hidden[0])),
        differences=tuple(differences),
        paths=_compare_paths(first, second, pairs["gpus"], pairs["ports"]),
    )


def _hidden(host: HostTopology) -> set[str]:
    """Return the kinds of elements that a host does not show.

    One that shows its bus has no other GPUs and ports; NUMA nodes every host has.
    """
    shows_bus = any(device.class_code != UNKNOWN for device in host.devices)
    return {
        name
        for role, (name, _) in _ROLES.items()
        if not getattr(host, role) and (role == "numa_nodes" or not shows_bus)
    }


def _place(element: _Element) -> str:
    """Return where an element is, or its name: what hosts have in common."""
    if isinstance(element, NumaNode):
        return element.name
    if isinstance(element, NetPort):
        named = f"{element.bus_id} {element.port}"
        return named if element.bus_id else element.title
    return element.bus_id


def _title(port: NetPort) -> str:
    return port.title


def _match(
    first: Sequence[_Element], second: Sequence[_Element], key: Callable[[Any], str]
) -> tuple[_Pairs, int, list[str], list[str]]:
    """Return pairs of names, how many have one key, and the names of the rest."""
    by_key = {key(each): each for each in second if key(each)}
    pairs: list[tuple[_Element, _Element]] = []
    left: list[_Element] = []
    for each in first:
        if other := by_key.pop(key(each), None):
            pairs.append((each, other))
        else:
            left.append(each)
    num_same = len(pairs)
    taken = {other.name for _, other in pairs}
    rest = [each for each in second if each.name not in taken]
    if len(left) == len(rest):
        ends = sorted(left, key=_order), sorted(rest, key=_order)
        pairs += zip(*ends, strict=True)
        left, rest = [], []
    names = [(each.name, other.name) for each, other in pairs]
    return names, num_same, [e.name for e in left], [e.name for e in rest]


def _order(element: _Element) -> tuple[list[int], list[tuple[str, int, str]]]:
    """Return a key by number, of ports by title: ``mlx5_2`` before ``mlx5_10``."""
    if not isinstance(element, NetPort):
        return [element.number], []
    # A port without a known name goes by its adapter's address.
    if is_address(element.title):
        return bus_order(element.title), []
    parts = [(text, n.lstrip("0")) for text, n in _NUMBERED.findall(element.title)]
    return [], [(text, len(digits), digits) for text, digits in parts]


def _differences(pairs: _Pairs, first: Facts, second: Facts) -> Iterator[Difference]:
    for name, other in pairs:
        now = {fact.name: fact for fact in second[other]}
        for was in first[name]:
            is_now = now.get(was.name)
            if is_now and was.differs_from(is_now):
                rates = was.gb_per_s, is_now.gb_per_s
                yield Difference(name, other, was.name, was.value, is_now.value, *rates)


def _compare_paths(
    first: HostTopology, second: HostTopology, gpus: _Pairs, ports: _Pairs
) -> tuple[PathComparison, ...]:
    before, after = find_paths(first), find_paths(second)
    compared: list[PathComparison] = []
    for kind, pairs in (
        ("GPU to GPU", combinations(gpus, 2)),
        ("GPU to network port", product(gpus, ports)),
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
