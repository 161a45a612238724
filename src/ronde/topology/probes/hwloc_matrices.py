"""Distances of NUMA nodes, and bandwidths of direct links, from hwloc's matrices."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ronde.topology.graph import LinkKind
from ronde.topology.probes.hwloc_objects import (
    HwlocObject,
    decimal_of,
    number_of,
)
from ronde.topology.probes.refusals import bad_value
from ronde.topology.xml_tree import Element

_LINK_KINDS = {"NVLinkBandwidth": LinkKind.NVLINK, "XGMIBandwidth": LinkKind.XGMI}
_LATENCY = "NUMALatency"
_MB_PER_GB = 1000


class Bandwidth(NamedTuple):
    """What goes from one object to another over direct links.

    Attributes:
        kind: What the links are made of.
        source: hwloc's number of the object they leave, ``gp_index``.
        target: hwloc's number of the object they lead to.
        gb_per_s: All of them together.
    """

    kind: LinkKind
    source: str
    target: str
    gb_per_s: float


def read_bandwidths(root: Element, origin: str) -> tuple[Bandwidth, ...]:
    """Return the bandwidths between different objects, in the order of the file.

    Raises:
        UsageError: A matrix is no square, or holds something else than numbers.
    """
    found: list[Bandwidth] = []
    for matrix in root.named("distances2", "distances2hetero"):
        kind = _LINK_KINDS.get(matrix.attributes.get("name", ""))
        if kind is None:
            continue
        names = [word.rpartition(":")[2] for word in _words(matrix, "indexes")]
        found += [
            Bandwidth(kind, source, target, value / _MB_PER_GB)
            for source, target, value in _entries(matrix, names, origin)
            if source != target and value > 0
        ]
    return tuple(found)


def read_distances(
    root: Element, objects: Sequence[HwlocObject], origin: str
) -> Mapping[int, tuple[tuple[int, int], ...]]:
    """Return, for each NUMA node, the pairs of number and distance.

    Raises:
        UsageError: A matrix is no square, or holds something else than numbers.
    """
    nodes = [each for each in objects if each.kind == "NUMANode"]
    numbers = {each.text("gp_index"): each.number("os_index") for each in nodes}
    for matrix in root.named("distances2"):
        told = matrix.attributes
        if told.get("type") == "NUMANode" and told.get("name", _LATENCY) == _LATENCY:
            words = _words(matrix, "indexes")
            if told.get("indexing") == "gp":
                words = [str(numbers.get(word, "")) for word in words]
            return _by_node(matrix, words, origin)
    return _old_distances(nodes, objects, origin)


def _old_distances(
    nodes: Sequence[HwlocObject], objects: Sequence[HwlocObject], origin: str
) -> Mapping[int, tuple[tuple[int, int], ...]]:
    """Return the distances as before version 2: of all objects at some depth."""
    depths = {each.depth for each in nodes}
    for each in objects:
        for matrix in each.element.named("distances"):
            depth = each.depth + number_of(matrix, "relative_depth", origin)
            is_of_all = number_of(matrix, "nbobjs", origin) == len(nodes)
            if depths == {depth} and is_of_all:
                return _by_node(
                    matrix, [node.text("os_index") for node in nodes], origin
                )
    return {}


def _by_node(
    matrix: Element, numbers: Sequence[str], origin: str
) -> dict[int, tuple[tuple[int, int], ...]]:
    if not all(number.isdecimal() and len(number) < 10 for number in numbers):
        raise bad_value(
            origin, matrix.line, "indexes must be numbers of NUMA nodes", numbers
        )
    found: dict[int, list[tuple[int, int]]] = {int(number): [] for number in numbers}
    for source, target, value in _entries(matrix, numbers, origin):
        found[int(source)].append((int(target), round(value)))
    return {number: tuple(row) for number, row in found.items()}


def _entries(
    matrix: Element, names: Sequence[str], origin: str
) -> Iterator[tuple[str, str, float]]:
    """Yield source, target and value of each entry, row by row."""
    values = _values(matrix, origin)
    if len(values) != len(names) ** 2 or len(set(names)) != len(names):
        raise bad_value(
            origin,
            matrix.line,
            f"a matrix of {len(names)} different objects must have {len(names)} * "
            f"{len(names)} values",
            len(values),
        )
    given = iter(values)
    for source in names:
        for target in names:
            yield source, target, next(given)


def _values(matrix: Element, origin: str) -> list[float]:
    base = 1.0
    words = _words(matrix, "u64values")
    if matrix.tag == "distances":
        base = decimal_of(matrix.attributes.get("latency_base", "1"))
        words = [each.attributes.get("value", "") for each in matrix.named("latency")]
    values = [base * decimal_of(word) for word in words]
    if any(math.isnan(value) or value > 1e15 for value in values):
        raise bad_value(origin, matrix.line, "values must be numbers from 0", words)
    return values


def _words(matrix: Element, tag: str) -> list[str]:
    """Return the words that stand in all children of a name together."""
    return [word for child in matrix.named(tag) for word in child.text.split()]
