"""Distances between GPUs and adapters, in the words of ``nvidia-smi topo -m``."""

from collections import Counter
from typing import NamedTuple

from ronde.topology.cpu_sets import format_list
from ronde.topology.graph import NVSWITCH, UNKNOWN, HostTopology, LinkKind
from ronde.topology.paths.network import (
    POWER_BRIDGE_CLASS,
    adapter_name,
    bridges_above,
    find_numa_numbers,
)

UNKNOWN_WORD = "?"
"""The word for a pair of unknown distance."""


class ClassTable(NamedTuple):
    """The matrix of ``nvidia-smi topo -m``: a word for each pair of GPUs and ports."""

    names: tuple[str, ...]  # Of GPUs by number, then of ports, as in the graph.
    labels: tuple[str, ...]  # ``GPU0``, ``NIC0``, one each.
    titles: tuple[str, ...]  # Of ports: ``mlx5_0``.
    # One row per element with one word per element: ``X``, ``NV18``, ``PIX``, ``PXB``,
    # ``PHB``, ``NODE``, ``SYS``, AMD's ``XGMI``, or ``UNKNOWN_WORD``. If no source has
    # the host bridges, ``PHB`` may really be ``NODE``.
    words: tuple[tuple[str, ...], ...]
    cpus: tuple[str, ...]  # Near each, as a list: ``0-47,96-143``.
    nodes: tuple[str, ...]  # NUMA node of each.


def classify(host: HostTopology) -> ClassTable:
    """Return the matrix, from PCI tree and NVLinks or else from the source's words."""
    gpus = tuple(each.name for each in sorted(host.gpus, key=lambda gpu: gpu.number))
    paired = host.paired
    # Other ports are virtual.
    ports = [each.name for each in host.ports if each.bus_id or each.name in paired]
    names = tuple(dict.fromkeys([*gpus, *ports]))
    pairs = _Pairs(host)
    numbers = [pairs.numa_number(name) for name in names]
    cpus = {each.number: format_list(each.cpus) for each in host.numa_nodes}
    num_gpus = len(set(gpus))
    nics = range(len(names) - num_gpus)
    return ClassTable(
        names=names,
        labels=(*(f"GPU{n}" for n in range(num_gpus)), *(f"NIC{n}" for n in nics)),
        titles=tuple(name.removeprefix("net/") for name in names[num_gpus:]),
        words=tuple(tuple(pairs.word(a, b) for b in names) for a in names),
        cpus=tuple(cpus.get(number, "") for number in numbers),
        nodes=tuple("" if number == UNKNOWN else str(number) for number in numbers),
    )


class _Pairs:
    def __init__(self, host: HostTopology) -> None:
        self._devices = {each.bus_id: each for each in host.devices}
        self._adapters = {each.name: adapter_name(each) for each in host.ports}
        self._numbers = find_numa_numbers(host)
        self._listed = {each.number for each in host.numa_nodes}
        self._links: Counter[tuple[str, str]] = Counter()
        self._peers: set[frozenset[str]] = set()
        own = [each for each in host.relations if each.path]
        self._relations = {frozenset((r.source, r.target)): r.path for r in own}
        gpus = {each.name for each in host.gpus}
        processors = {each.name for each in host.numa_nodes}
        for link in host.links:
            if link.target in processors or link.target_class == POWER_BRIDGE_CLASS:
                continue
            ends = link.source, link.target if link.target in gpus else NVSWITCH
            if link.kind == LinkKind.NVLINK and link.target != link.source:
                self._links[ends] += max(0, link.num_links)
            elif link.kind == LinkKind.XGMI:
                self._peers.add(frozenset(ends))

    def numa_number(self, name: str) -> int:
        return self._numbers.get(self._adapters.get(name, name), UNKNOWN)

    def word(self, one: str, other: str) -> str:
        if one == other:
            return "X"
        if frozenset((one, other)) in self._peers:
            return "XGMI"
        to_switch = [self._links[each, NVSWITCH] for each in (one, other)]
        direct = [self._links[ends] for ends in ((one, other), (other, one))]
        if count := max(*direct, min(to_switch)):
            return f"NV{count}"
        given = self._relations.get(frozenset((one, other)))
        return self._pci_word(one, other) or given or self._numa_word(one, other)

    def _pci_word(self, one: str, other: str) -> str:
        ends = self._adapters.get(one, one), self._adapters.get(other, other)
        chains = [bridges_above(self._devices, name) for name in ends]
        if not all(chains):
            return ""
        # Functions of one adapter; other devices on the same bus are at a host bridge.
        if ends[0].rpartition(".")[0] == ends[1].rpartition(".")[0]:
            return "PIX"
        above = [each.bus_id for each in chains[1][1:]]
        for index, bridge in enumerate(chains[0][1:]):
            if bridge.bus_id in above:
                is_one = index + above.index(bridge.bus_id) == 0
                return "PIX" if is_one else "PXB"
        word = self._numa_word(one, other)
        given = self._relations.get(frozenset((one, other)), "")
        # Only the driver knows the host bridges.
        return given if word == "PHB" and given in ("PHB", "NODE") else word

    def _numa_word(self, one: str, other: str) -> str:
        numbers = self.numa_number(one), self.numa_number(other)
        if UNKNOWN in numbers and UNKNOWN not in self._listed:
            return UNKNOWN_WORD
        return "PHB" if numbers[0] == numbers[1] else "SYS"
