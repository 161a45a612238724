"""NUMA nodes from what ``nvidia-smi topo -m`` says of GPUs' affinities."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from ronde.topology.cpu_sets import format_list, members, parse_list
from ronde.topology.graph import UNKNOWN, NumaNode
from ronde.topology.probes.nvidia_smi_matrices import Row
from ronde.topology.probes.refusals import bad_value

_LIST = re.compile(r"[0-9]{1,5}(?:-[0-9]{1,5})?(?:,[0-9]{1,5}(?:-[0-9]{1,5})?)*")
_MAX_NUMBER = (1 << 16) - 1
_WITHIN_NODE = ("PIX", "PXB", "PHB", "NODE")


class Affinity(NamedTuple):
    """What a GPU is near.

    Attributes:
        cpus: As bits; none where not told.
        nodes: Numbers of NUMA nodes, ascending; none where not told.
        memory_nodes: Those of the GPU's own memory; none where not told.
    """

    cpus: int
    nodes: tuple[int, ...]
    memory_nodes: tuple[int, ...]


class Placed(NamedTuple):
    """Where GPUs are.

    Attributes:
        numa_nodes: By number.
        homes: Number of each GPU's node, by the GPU's name; ``UNKNOWN``.
        remarks: What was odd about the affinities.
    """

    numa_nodes: tuple[NumaNode, ...]
    homes: dict[str, int]
    remarks: tuple[str, ...]


def read_affinity(row: Row, origin: str) -> Affinity:
    """Return the affinity in a row.

    Raises:
        UsageError: It is no list of numbers.
    """
    cpus, nodes, own = (
        _parse(text, row.line, origin)
        for text in (row.cpus, row.nodes, row.memory_node)
    )
    return Affinity(cpus, tuple(members(nodes)), tuple(members(own)))


def place(affinities: Mapping[str, Affinity]) -> Placed:
    """Return the NUMA nodes that GPUs' affinities name.

    Where no numbers are told, as by drivers before 2019, sets of CPUs stand for nodes
    and are numbered by their lowest CPU.

    Args:
        affinities: By name of the GPU.
    """
    if not any(each.nodes for each in affinities.values()):
        return _place_by_cpus(affinities)
    cpus: dict[int, int] = {}
    homes: dict[str, int] = {}
    remarks: list[str] = []
    for name, (near, nodes, own) in affinities.items():
        homes[name] = nodes[0] if nodes else UNKNOWN
        for number in (*nodes, *own):
            cpus.setdefault(number, 0)
        if nodes:
            cpus[nodes[0]] |= near
        if len(nodes) > 1:
            remarks.append(
                f"{name} is near the NUMA nodes {format_list(nodes)}: the CPUs "
                f"{format_list(members(near))} are counted to the first."
            )
    return Placed(_numa_nodes(cpus), homes, tuple(remarks))


def find_port_nodes(
    words: Mapping[tuple[str, str], tuple[str, str]], homes: Mapping[str, int]
) -> dict[str, int]:
    """Return the number of the NUMA node of adapters that share one with a GPU.

    Those that are near GPUs of several nodes, or of none, are not in it.

    Args:
        words: Path and access by the pair of names.
        homes: Number of each GPU's node, by the GPU's name; ``UNKNOWN``.
    """
    near: dict[str, set[int]] = {}
    for pair, (path, _) in words.items():
        if path not in _WITHIN_NODE:
            continue
        for one, other in (pair, pair[::-1]):
            number = homes.get(other, UNKNOWN)
            if one not in homes and number != UNKNOWN:
                near.setdefault(one, set()).add(number)
    return {name: min(found) for name, found in near.items() if len(found) == 1}


def _place_by_cpus(affinities: Mapping[str, Affinity]) -> Placed:
    sets = sorted({each.cpus for each in affinities.values()} - {0}, key=_lowest)
    everything = 0
    for cpus in sets:
        if cpus & everything:
            remark = (
                "CPU affinities overlap, and no NUMA nodes are told: none is known."
            )
            return Placed((), dict.fromkeys(affinities, UNKNOWN), (remark,))
        everything |= cpus
    numbers = {cpus: number for number, cpus in enumerate(sets)}
    homes = {name: numbers.get(each.cpus, UNKNOWN) for name, each in affinities.items()}
    remark = "NUMA nodes are not told: they are numbered by the CPUs near GPUs."
    nodes = _numa_nodes({number: cpus for cpus, number in numbers.items()})
    return Placed(nodes, homes, (remark,) if sets else ())


def _numa_nodes(cpus: Mapping[int, int]) -> tuple[NumaNode, ...]:
    return tuple(NumaNode(n, tuple(members(bits))) for n, bits in sorted(cpus.items()))


def _lowest(cpus: int) -> int:
    return cpus & -cpus


def _parse(text: str, line: int, origin: str) -> int:
    """Return a list of numbers as bits."""
    ends = [part.partition("-") for part in text.split(",")] if text else []
    is_list = not text or _LIST.fullmatch(text) is not None
    if not is_list or any(
        int(high or low) not in range(int(low), _MAX_NUMBER + 1)
        for low, _, high in ends
    ):
        raise bad_value(
            origin,
            line,
            f"an affinity must be a list of numbers up to {_MAX_NUMBER}",
            text,
        )
    return parse_list(text)
