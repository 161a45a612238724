"""Compare two hosts: missing elements, different facts, and the lost bandwidth.

Elements are matched by bus address. If both hosts have the same number of unmatched
elements, such as virtual machines with other addresses, GPUs are matched by number and
ports by name. A kind of element that one host's source does not list is not compared.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, combinations, product
from operator import attrgetter
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
from ronde.topology.paths import speeds
from ronde.topology.paths.network import (
    Path,
    PathKind,
    Paths,
    bridges_above,
    find_paths,
)
from ronde.topology.pci import bus_order, is_address

_GIB = 2**30
_NEARLY = 0.02
_GDR = {0: "off", 1: "on"}
_NUMBERED = re.compile(r"([^0-9]*)([0-9]*)")
_MAX_DIGITS = 18
_ROLES = {"gpus": "GPUs", "ports": "network ports", "numa_nodes": "NUMA nodes"}

Element = GpuDevice | NetPort | NumaNode
_Pairs = list[tuple[Any, Any]]
"""Matched elements: one of the first host, one of the second."""


class Fact(NamedTuple):
    """A comparable value of an element, such as the speed of its PCI link."""

    value: str  # Empty if unknown.
    gb_per_s: float = 0.0  # NCCL's figure where it is a bandwidth; else 0.
    amount: float = 0.0  # For sizes that differ slightly between equal hosts; else 0.


class ComparedHost:
    """The comparable facts of each element of a host."""

    def __init__(self, host: HostTopology) -> None:
        self._host = host
        self._devices = {device.bus_id: device for device in host.devices}

    def of(self, element: Element) -> dict[str, Fact]:
        if isinstance(element, NumaNode):
            return self._node(element)
        gdr = {"GPUDirect RDMA": Fact(_GDR.get(element.gdr, ""))}
        if isinstance(element, GpuDevice):
            chip = f"gfx{element.gcn}" if element.gcn else _number("sm {}", element.sm)
            links = {"GPU links": self._direct_links(element)}
            return {"chip": Fact(chip), **self._location(element), **links, **gdr}
        # A port of unknown state counts as up.
        state = "" if element.is_up else "down"
        speed = Fact("")
        if element.mbit_per_s:
            speed = Fact(f"{element.mbit_per_s} Mb/s", speeds.port_gb_per_s(element))
            state = state or "up"
        own = {"network speed": speed, "state": Fact(state)}
        return {"port": Fact(element.title), **self._location(element), **own, **gdr}

    def _node(self, node: NumaNode) -> dict[str, Fact]:
        size, cpus = max(0, node.memory_bytes), node.cpus
        numbers = _number("family {}", node.family), _number("model {}", node.model)
        return {
            "CPUs": Fact(f"{len(cpus)} ({format_list(cpus)})" if cpus else ""),
            "memory": Fact(f"{size / _GIB:.1f} GiB" if size else "", amount=size),
            "processor": Fact(" ".join(filter(None, (node.vendor, *numbers)))),
        }

    def _location(self, element: GpuDevice | NetPort) -> dict[str, Fact]:
        links = bridges_above(self._devices, element.bus_id)
        node = next((each.node for each in links if each.node != UNKNOWN), element.node)
        address, number = Fact(element.bus_id), Fact(_number("{}", node))
        facts = {"bus address": address, "NUMA node": number}
        if links:
            own, *above = map(_link, links)
            words = ", ".join(each.value or "?" for each in above)
            rate = min((each.gb_per_s for each in above if each.gb_per_s), default=0.0)
            facts["PCI link"] = own
            facts["device"] = Fact("lost" if links[0].is_lost else "answers")
            is_on = any(each.is_redirecting for each in links)
            acs = ("on" if is_on else "off") if self._host.shows_acs else ""
            facts["ACS above"] = Fact(acs)
            facts["links above"] = Fact(words or (own.value and "none"), rate)
        return facts

    def _direct_links(self, gpu: GpuDevice) -> Fact:
        counts: Counter[LinkKind] = Counter()
        own = [link for link in self._host.links if link.source == gpu.name]
        for link in own:
            counts[link.kind] += link.num_links
        is_known = all(speeds.is_link_known(link, gpu) for link in own)
        rate = sum(speeds.link_gb_per_s(link, gpu) for link in own) if is_known else 0.0
        value = ", ".join(f"{num} {kind}" for kind, num in sorted(counts.items()))
        # A GPU without links is a fact if other GPUs have links.
        others_have = any(link.kind != LinkKind.PCI for link in self._host.links)
        is_shown = others_have or gpu.nvlinks == 0
        return Fact(value or ("none" if is_shown else ""), rate)


def _link(device: PciDevice) -> Fact:
    device = speeds.as_running(device)
    if not device.speed and device.width < 0 and not device.gb_per_s:
        return Fact("")
    return Fact(speeds.link_words(device), speeds.pci_gb_per_s(device))


def _number(words: str, number: int) -> str:
    return words.format(number) if number != UNKNOWN else ""


class Difference(NamedTuple):
    """A fact with different values in the two hosts."""

    element: str  # Its name in the first host.
    other: str  # Its name in the second.
    fact: str  # Its name, for output: ``PCI link``.
    was: str  # In the first host.
    now: str  # In the second.
    was_gb_per_s: float = 0.0  # Its bandwidth; 0 for other facts.
    now_gb_per_s: float = 0.0  # In the second.


class PathChange(NamedTuple):
    """A pair of elements with different paths in the two hosts."""

    ends: tuple[str, str]  # Names in the first host.
    was: Path  # In the first host, from one end to the other; 0 GB/s if unknown.
    now: Path  # In the second.

    @property
    def kept(self) -> float:
        """The second host's bandwidth divided by the first's; 1.0 if unknown."""
        was, now = self.was.gb_per_s, self.now.gb_per_s
        return now / was if was and now else 1.0


class PathComparison(NamedTuple):
    """The comparison of all paths between two kinds of elements."""

    kind: str  # For output: ``GPU to GPU``.
    num_pairs: int  # All of them.
    changes: tuple[PathChange, ...]  # Those that differ in kind or bandwidth.


class HostComparison(NamedTuple):
    """Matched elements, elements of only one host, and differences."""

    num_matched: int  # Elements that both have.
    only_first: tuple[str, ...]  # Names that the second lacks.
    only_second: tuple[str, ...]  # Names that the first lacks.
    missing_first: tuple[str, ...]  # Kinds that the first does not show.
    missing_second: tuple[str, ...]  # Kinds that the second does not show.
    differences: tuple[Difference, ...]  # By element.
    paths: tuple[PathComparison, ...]  # The effect on paths, in NCCL's figures.

    @property
    def is_equal(self) -> bool:
        changes = [each.changes for each in self.paths]
        return not any([self.only_first, self.only_second, self.differences, *changes])


def compare_hosts(first: HostTopology, second: HostTopology) -> HostComparison:
    """Compare two hosts. Facts that are unknown for one of them are ignored."""
    hidden = _hidden(first), _hidden(second)
    buses = [{p.bus_id for p in host.ports if p.bus_id} for host in (first, second)]
    pairs: dict[str, _Pairs] = {}
    only: tuple[list[str], list[str]] = [], []
    num_matched = 0
    for role, name in _ROLES.items():
        are_moved = role == "ports" and not buses[0] & buses[1]
        key = attrgetter("title") if are_moved else _key_of
        elements = getattr(first, role), getattr(second, role)
        pairs[role], *left = _match(*elements, key)
        if name not in hidden[0] | hidden[1]:
            num_matched += len(pairs[role])
            only[0].extend(each.name for each in left[0])
            only[1].extend(each.name for each in left[1])
    return HostComparison(
        num_matched,
        tuple(only[0]),
        tuple(only[1]),
        missing_first=tuple(sorted(hidden[0] - hidden[1])),
        missing_second=tuple(sorted(hidden[1] - hidden[0])),
        differences=tuple(_differences(chain(*pairs.values()), first, second)),
        paths=tuple(_compare_paths(first, second, pairs["gpus"], pairs["ports"])),
    )


def _hidden(host: HostTopology) -> set[str]:
    """Return the kinds of elements that a host's source does not list."""
    # Sources that show the PCI bus list all GPUs and ports. Every host has NUMA nodes.
    shows_bus = any(device.class_code != UNKNOWN for device in host.devices)
    return {
        name
        for role, name in _ROLES.items()
        if not getattr(host, role) and (role == "numa_nodes" or not shows_bus)
    }


def _key_of(element: Element) -> str:
    """Return the key by which an element is matched with the other host's."""
    if isinstance(element, NetPort) and element.bus_id:
        return f"{element.bus_id} {element.port}"
    return element.bus_id if isinstance(element, GpuDevice) else element.name


def _match(
    first: Sequence[Element], second: Sequence[Element], key: Callable[[Any], str]
) -> tuple[_Pairs, list[Element], list[Element]]:
    by_key = {key(each): each for each in second if key(each)}
    found = [(each, by_key.pop(key(each), None)) for each in first]
    pairs: _Pairs = [(each, other) for each, other in found if other]
    left = [each for each, other in found if not other]
    taken = {other.name for _, other in pairs}
    rest = [each for each in second if each.name not in taken]
    if len(left) == len(rest):
        pairs += zip(sorted(left, key=_order), sorted(rest, key=_order), strict=True)
        left, rest = [], []
    return pairs, left, rest


def _order(element: Element) -> tuple[list[int], list[tuple[str, int]]]:
    if not isinstance(element, NetPort):
        return [element.number], []
    # The title of a port without a name is an address.
    if is_address(element.title):
        return bus_order(element.title), []
    parts = _NUMBERED.findall(element.title)
    return [], [(text, int(digits[:_MAX_DIGITS] or 0)) for text, digits in parts]


def _differences(
    pairs: Iterable[tuple[Any, Any]], first: HostTopology, second: HostTopology
) -> Iterator[Difference]:
    before, after = ComparedHost(first), ComparedHost(second)
    for element, other in pairs:
        facts = after.of(other)
        for name, was in before.of(element).items():
            now = facts.get(name, Fact(""))
            is_other = bool(was.value and now.value) and was.value != now.value
            if was.amount and now.amount:
                is_other = abs(was.amount - now.amount) > _NEARLY * was.amount
            if is_other:
                ends, rates = (element.name, other.name), (was.gb_per_s, now.gb_per_s)
                yield Difference(*ends, name, was.value, now.value, *rates)


def _compare_paths(
    first: HostTopology, second: HostTopology, gpus: _Pairs, ports: _Pairs
) -> Iterator[PathComparison]:
    before, after = find_paths(first), find_paths(second)
    for kind, ends in (
        ("GPU to GPU", combinations(gpus, 2)),
        ("GPU to network port", product(gpus, ports)),
    ):
        num_pairs, changes = 0, list[PathChange]()
        for pair in ends:
            names = pair[0][0].name, pair[1][0].name
            found = [
                PathChange(names, was, now)
                for (a, other_a), (b, other_b) in (pair, pair[::-1])
                if (was := _known_path(before, a.name, b.name))
                and (now := _known_path(after, other_a.name, other_b.name))
            ]
            num_pairs += bool(found)
            others = [each for each in found if _is_other(each.was, each.now)]
            # Report only the direction that lost more.
            changes += sorted(others, key=lambda each: each.kept)[:1]
        yield PathComparison(kind, num_pairs, tuple(changes))


def _known_path(paths: Paths, source: str, target: str) -> Path | None:
    path = paths.between(source, target)
    return path._replace(gb_per_s=0.0) if path and not paths.is_known(path) else path


def _is_other(was: Path, now: Path) -> bool:
    if was.gb_per_s and now.gb_per_s:
        return (was.kind, round(was.gb_per_s, 3)) != (now.kind, round(now.gb_per_s, 3))
    # NCCL joins some switches that nvidia-smi counts one by one.
    is_near = {was.kind, now.kind} <= {PathKind.PIX, PathKind.PXB}
    return was.kind != now.kind and not is_near
