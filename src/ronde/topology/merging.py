"""One host from what several sources say of it.

Elements are the same if their bus address is, the number of a NUMA node, or the name of
a port. Each field is taken from the most trusted source that tells it: the kernel, then
NVML, NCCL's file, hwloc, the rest. Where sources disagree, a remark says on what, and
who says what.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ronde.topology import pci
from ronde.topology.graph import (
    NVSWITCH,
    UNKNOWN,
    GpuDevice,
    HostTopology,
    Link,
    NumaNode,
    PciDevice,
    Relation,
)
from ronde.topology.merging_devices import find_needed, sort_devices
from ronde.topology.merging_fields import Told, disagree, merge_told
from ronde.topology.merging_gpus import address_gpus, source_of
from ronde.topology.merging_ports import merge_ports

_TRUSTED = ("sysfs", "NVML", "NCCL", "hwloc", "nvidia-smi")
"""How sources begin, the most trusted first; others follow."""
_MAX_REMARKS = 50


def merge_hosts(sources: Sequence[HostTopology]) -> HostTopology:
    """Return one host from what sources say of it, in any order.

    Of two sources of the same form the first is believed.

    Args:
        sources: At least one, of one and the same host.
    """
    remarks: list[str] = []
    hosts = sorted(sources, key=_rank)
    if len(hosts) == 1:
        return hosts[0]
    hosts = address_gpus(hosts, remarks)
    ports, hosts = merge_ports(hosts, remarks)
    gpus = _merge_gpus(hosts, remarks)
    merged = HostTopology(
        name=_merge_name(hosts, remarks),
        sources=_unique(source for host in hosts for source in host.sources),
        numa_nodes=_merge_nodes(hosts, remarks),
        gpus=gpus,
        ports=ports,
        # The kernel alone tells of them.
        interfaces=next((h.interfaces for h in hosts if h.interfaces), ()),
        links=_merge_links(hosts, remarks),
        relations=_merge_relations(hosts, remarks),
    )
    merged = merged._replace(devices=_merge_devices(hosts, merged, remarks))
    own = [remark for host in hosts for remark in host.remarks]
    more = len(remarks) - _MAX_REMARKS
    if more > 0:
        remarks[_MAX_REMARKS:] = [f"The sources disagree in {more} other ways."]
    return merged._replace(remarks=_unique([*own, *remarks]))


def _rank(host: HostTopology) -> int:
    source = host.sources[0] if host.sources else ""
    ranks = (n for n, form in enumerate(_TRUSTED) if source.startswith(form))
    return next(ranks, len(_TRUSTED))


def _groups(
    hosts: Iterable[HostTopology],
    elements: Callable[[HostTopology], Iterable[Any]],
) -> dict[str, list[Told]]:
    """Return what is told of each element, by its name."""
    groups: dict[str, list[Told]] = {}
    for host in hosts:
        for each in elements(host):
            groups.setdefault(each.name, []).append(Told(source_of(host), each))
    return groups


def _merge_name(hosts: Sequence[HostTopology], remarks: list[str]) -> str:
    named = [(host.name, source_of(host)) for host in hosts if host.name]
    others = [other for other in named[1:] if other[0] != named[0][0]]
    remarks += [disagree("The host", "name", named[0], other) for other in others]
    return named[0][0] if named else ""


def _merge_nodes(
    hosts: Sequence[HostTopology], remarks: list[str]
) -> tuple[NumaNode, ...]:
    groups = _groups(hosts, lambda host: host.numa_nodes)
    nodes: list[NumaNode] = [merge_told(g, name, remarks) for name, g in groups.items()]
    numbers = [{node.number for node in host.numa_nodes} for host in hosts]
    numbered = [each for each in numbers if each - {UNKNOWN}]
    if numbered and not any(UNKNOWN in each for each in numbered):
        # Who does not know the numbers means nodes that others number.
        nodes = [node for node in nodes if node.number != UNKNOWN]
    return tuple(sorted(nodes, key=lambda node: node.number))


def _merge_gpus(
    hosts: Sequence[HostTopology], remarks: list[str]
) -> tuple[GpuDevice, ...]:
    groups = _groups(hosts, lambda host: host.gpus)
    for host in hosts:
        own = {gpu.name for gpu in host.gpus}
        missing = [name for name in groups if name not in own]
        if own and missing:
            remarks.append(
                f"{source_of(host)} does not list {', '.join(missing)}, which another "
                "source does."
            )
    gpus: list[GpuDevice] = [
        merge_told(group, name, remarks) for name, group in groups.items()
    ]
    numbers = {gpu.number for gpu in gpus}
    if len(numbers) < len(gpus) and all(gpu.bus_id for gpu in gpus):
        ordered = sorted((gpu.bus_id for gpu in gpus), key=pci.bus_order)
        gpus = [gpu._replace(number=ordered.index(gpu.bus_id)) for gpu in gpus]
    return tuple(gpus)


def _merge_devices(
    hosts: Sequence[HostTopology], merged: HostTopology, remarks: list[str]
) -> tuple[PciDevice, ...]:
    """Return those of the most trusted source that has any, and what else is needed."""
    groups = _groups(hosts, lambda host: host.devices)
    devices: dict[str, PciDevice] = {
        name: merge_told(group, name, remarks) for name, group in groups.items()
    }
    best = next((host.devices for host in hosts if host.devices), ())
    kept = find_needed(merged, devices) | {device.bus_id for device in best}
    return sort_devices({name: d for name, d in devices.items() if name in kept})


def _merge_links(hosts: Sequence[HostTopology], remarks: list[str]) -> tuple[Link, ...]:
    """Return the links that leave each element as the most trusted source has them."""
    groups: dict[tuple[str, str], list[tuple[str, list[Link]]]] = {}
    for host in hosts:
        own: dict[tuple[str, str], list[Link]] = {}
        for link in host.links:
            own.setdefault((link.source, link.kind), []).append(link)
        for key, links in own.items():
            groups.setdefault(key, []).append((source_of(host), links))
    for (source, kind), told in groups.items():
        by, believed = told[0]
        for other, links in told[1:]:
            pairs = _counts_that_differ(believed, links)
            if pairs:
                one, instead = (", ".join(each) for each in zip(*pairs, strict=True))
                what = f"{kind} links"
                remarks.append(disagree(source, what, (one, by), (instead, other)))
    return tuple(link for told in groups.values() for link in told[0][1])


def _count(links: Iterable[Link]) -> dict[str, int]:
    """Return how many links lead to each element, all switches counted as one.

    Some sources show switches one by one.
    """
    counts: dict[str, int] = {}
    for link in links:
        is_switch = link.target == NVSWITCH or link.target_class >> 8 == 0x0680
        target = NVSWITCH if is_switch else link.target
        counts[target] = counts.get(target, 0) + link.num_links
    return counts


def _counts_that_differ(
    links: Iterable[Link], others: Iterable[Link]
) -> list[tuple[str, str]]:
    """Return what two sources say of links to elements on which they disagree."""
    one, other = _count(links), _count(others)
    return [
        (f"{one.get(target, 0)} to {target}", f"{other.get(target, 0)} to {target}")
        for target in sorted({*one, *other})
        if one.get(target) != other.get(target)
    ]


def _merge_relations(
    hosts: Sequence[HostTopology], remarks: list[str]
) -> tuple[Relation, ...]:
    groups: dict[tuple[str, str], list[Told]] = {}
    for host in hosts:
        pairs = {(each.source, each.target) for each in host.relations}
        before = set(groups)
        for each in host.relations:
            pair, back = (each.source, each.target), (each.target, each.source)
            # Who tells of one direction means both.
            if pair not in before and back in before and back not in pairs:
                pair = back
            groups.setdefault(pair, []).append(Told(source_of(host), each))
    return tuple(
        merge_told(group, f"{source} to {target}", remarks)
        for (source, target), group in groups.items()
    )


def _unique(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
