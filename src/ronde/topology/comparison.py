"""Two hosts side by side: what one has and the other lacks, and what that costs.

Elements are matched by bus address. What is left over on both sides, as where a virtual
machine counts its buses anew, is matched in the order of numbers and of ports' names,
if it is equally many. A kind of element of which one host tells nothing is left out.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple, TypeVar

from ronde.topology.element_facts import Fact, gpu_facts, node_facts, port_facts
from ronde.topology.graph import (
    UNKNOWN,
    GpuDevice,
    HostTopology,
    NetPort,
    NumaNode,
)
from ronde.topology.paths.path import Path, PathKind
from ronde.topology.paths.search import Paths, find_paths
from ronde.topology.pci import bus_order, is_address

T = TypeVar("T", GpuDevice, NetPort, NumaNode)

_GPUS, _PORTS, _NODES = "GPUs", "network ports", "NUMA nodes"
_NUMBERED = re.compile(r"([^0-9]*)([0-9]*)")


class Difference(NamedTuple):
    """One fact that differs for one element.

    Attributes:
        element: Its name in the first host.
        other: Its name in the second.
        fact: What differs, for people: ``PCI link``.
        was: In the first host.
        now: In the second.
        was_gb_per_s: What that carries; 0 where it is no bandwidth.
        now_gb_per_s: Likewise in the second.
    """

    element: str
    other: str
    fact: str
    was: str
    now: str
    was_gb_per_s: float = 0.0
    now_gb_per_s: float = 0.0


class PathChange(NamedTuple):
    """A pair of elements with another path in the second host.

    Attributes:
        ends: Names in the first host.
        was: In the first host; with 0 GB/s where no source tells them.
        now: Likewise in the second.
    """

    ends: tuple[str, str]
    was: Path
    now: Path


class PathComparison(NamedTuple):
    """All pairs of two kinds of elements between which both hosts tell a path.

    Attributes:
        kind: For people: ``GPU to GPU``.
        num_pairs: All of them.
        changes: Those that differ in kind or bandwidth.
    """

    kind: str
    num_pairs: int
    changes: tuple[PathChange, ...]


class Comparison(NamedTuple):
    """What two hosts have in common and what not.

    Attributes:
        num_matched: Elements that both have.
        num_by_address: Of them those with one bus address, or number, in both.
        only_first: Names of what the second lacks.
        only_second: Names of what the first lacks.
        untold_first: What is left out, for people, as the first tells of none.
        untold_second: What is left out, as the second tells of none.
        differences: By element.
        paths: What the differences come to, in NCCL's figures.
    """

    num_matched: int
    num_by_address: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    untold_first: tuple[str, ...]
    untold_second: tuple[str, ...]
    differences: tuple[Difference, ...]
    paths: tuple[PathComparison, ...]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        has_changes = any(each.changes for each in self.paths)
        lists = self.only_first, self.only_second, self.differences
        return not any(lists) and not has_changes


class _Pairs(NamedTuple):
    """Elements of one role that were matched, as pairs of names, and the rest."""

    names: tuple[tuple[str, str], ...]
    num_same: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]


def compare_hosts(first: HostTopology, second: HostTopology) -> Comparison:
    """Return what differs from one host to another.

    What one of them does not tell is no difference. A host compared with itself has
    none.
    """
    gpus = _match(first.gpus, second.gpus, lambda gpu: gpu.bus_id)
    ports = _match_ports(first, second)
    nodes = _match(first.numa_nodes, second.numa_nodes, lambda node: node.name)
    roles = {_GPUS: gpus, _PORTS: ports, _NODES: nodes}
    untold = _untold(first), _untold(second)
    told = [role for name, role in roles.items() if name not in untold[0] | untold[1]]
    differences = [
        *_differences(gpus.names, gpu_facts(first), gpu_facts(second)),
        *_differences(ports.names, port_facts(first), port_facts(second)),
        *_differences(nodes.names, node_facts(first), node_facts(second)),
    ]
    return Comparison(
        num_matched=sum(len(role.names) for role in told),
        num_by_address=sum(role.num_same for role in told),
        only_first=tuple(name for role in told for name in role.only_first),
        only_second=tuple(name for role in told for name in role.only_second),
        untold_first=tuple(sorted(untold[0] - untold[1])),
        untold_second=tuple(sorted(untold[1] - untold[0])),
        differences=tuple(differences),
        paths=_compare_paths(first, second, gpus.names, ports.names),
    )


def _untold(host: HostTopology) -> set[str]:
    """Return the kinds of elements of which a host tells nothing.

    One that shows its bus has no other GPUs and ports; NUMA nodes every host has.
    """
    shows_bus = any(device.class_code != UNKNOWN for device in host.devices)
    told = {
        _GPUS: shows_bus or bool(host.gpus),
        _PORTS: shows_bus or bool(host.ports),
        _NODES: bool(host.numa_nodes),
    }
    return {role for role, is_told in told.items() if not is_told}


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
    # A port of which no name is told goes by its adapter's address.
    if is_address(element.title):
        return bus_order(element.title), []
    parts = [(text, n.lstrip("0")) for text, n in _NUMBERED.findall(element.title)]
    return [], [(text, len(digits), digits) for text, digits in parts]


def _differences(
    pairs: Sequence[tuple[str, str]],
    first: dict[str, tuple[Fact, ...]],
    second: dict[str, tuple[Fact, ...]],
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
            if (was := _told_path(before, a, b))
            and (now := _told_path(after, other_a, other_b))
        ]
        changes = tuple(each for each in found if _is_other(each.was, each.now))
        compared.append(PathComparison(kind, len(found), changes))
    return tuple(compared)


def _told_path(paths: Paths, source: str, target: str) -> Path | None:
    path = paths.between(source, target)
    return path._replace(gb_per_s=0.0) if path and not paths.is_told(path) else path


def _is_other(was: Path, now: Path) -> bool:
    """Return whether kind or bandwidth differ, as far as both are told."""
    if was.gb_per_s and now.gb_per_s:
        return (was.kind, round(was.gb_per_s, 3)) != (now.kind, round(now.gb_per_s, 3))
    # Of switches that NCCL takes for one, nvidia-smi's words count each.
    is_near = {was.kind, now.kind} <= {PathKind.PIX, PathKind.PXB}
    return was.kind != now.kind and not is_near
