"""Two hosts side by side: what one has and the other lacks, and what that costs.

Elements are matched by bus address. What is left over on both sides, as where a virtual
machine counts its buses anew, is matched in order, if it is equally many.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple, TypeVar

from ronde.topology.element_facts import Fact, gpu_facts, node_facts, port_facts
from ronde.topology.graph import GpuDevice, HostTopology, NetPort, NumaNode
from ronde.topology.paths.path import Path
from ronde.topology.paths.search import find_paths

T = TypeVar("T", GpuDevice, NetPort, NumaNode)


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
        was: None where there was no path.
        now: None where there is none.
    """

    ends: tuple[str, str]
    was: Path | None
    now: Path | None


class PathComparison(NamedTuple):
    """All pairs of two kinds of elements that both hosts have.

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
        differences: By element.
        paths: What the differences come to, in NCCL's figures.
    """

    num_matched: int
    num_by_address: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
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
    roles = gpus, ports, nodes
    differences = [
        *_differences(gpus.names, gpu_facts(first), gpu_facts(second)),
        *_differences(ports.names, port_facts(first), port_facts(second)),
        *_differences(nodes.names, node_facts(first), node_facts(second)),
    ]
    return Comparison(
        num_matched=sum(len(role.names) for role in roles),
        num_by_address=sum(role.num_same for role in roles),
        only_first=tuple(name for role in roles for name in role.only_first),
        only_second=tuple(name for role in roles for name in role.only_second),
        differences=tuple(differences),
        paths=_compare_paths(first, second, gpus.names, ports.names),
    )


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
        pairs += [(a.name, b.name) for a, b in zip(left, rest, strict=True)]
        left, rest = [], []
    return _Pairs(
        tuple(pairs),
        num_same,
        tuple(each.name for each in left),
        tuple(each.name for each in rest),
    )


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
            PathChange((a, b), before.between(a, b), after.between(other_a, other_b))
            for (a, other_a), (b, other_b) in pairs
        ]
        told = [each for each in found if each.was or each.now]
        changes = tuple(each for each in told if _way(each.was) != _way(each.now))
        compared.append(PathComparison(kind, len(told), changes))
    return tuple(compared)


def _way(path: Path | None) -> tuple[str, float] | None:
    return (path.kind, round(path.gb_per_s, 3)) if path else None
