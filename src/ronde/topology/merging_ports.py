"""Ports of network adapters that several sources name differently."""

from collections.abc import Sequence

from ronde.topology.graph import UNKNOWN, HostTopology, NetPort
from ronde.topology.merging_fields import Told, merge_told
from ronde.topology.merging_gpus import rename_elements, source_of
from ronde.topology.pci import is_address

_Group = list[Told]


def merge_ports(
    hosts: Sequence[HostTopology], remarks: list[str]
) -> tuple[tuple[NetPort, ...], list[HostTopology]]:
    """Return the ports of all sources, and hosts whose relations call them so.

    Ports are one if their names are, or if they are the only one of their adapter that
    has no match. What is left over of an adapter that a more trusted source lists is
    left out: the interface of an RDMA adapter, or ports that NCCL has fused.

    Args:
        hosts: What sources say of one host, the most trusted first.
        remarks: Gets a sentence for each disagreement, and each port left out.
    """
    groups: list[_Group] = []
    places: list[dict[str, _Group | None]] = []
    for host in hosts:
        found = _find_groups(host.ports, groups)
        for port, group in zip(host.ports, found, strict=True):
            if group is None:
                remarks.append(
                    f"{port.name} of {source_of(host)} is left out: another source "
                    f"lists the ports of its adapter."
                )
                continue
            if not group:
                groups.append(group)
            group.append(Told(source_of(host), port))
        places.append({p.name: g for p, g in zip(host.ports, found, strict=True)})
    ports = [_merge(group, remarks) for group in groups]
    names = {id(group): port.name for group, port in zip(groups, ports, strict=True)}
    renamed = [
        rename_elements(
            host,
            {old: "" if g is None else names[id(g)] for old, g in place.items()},
        )
        for host, place in zip(hosts, places, strict=True)
    ]
    return tuple(ports), renamed


def _find_groups(
    ports: Sequence[NetPort], groups: Sequence[_Group]
) -> list[_Group | None]:
    """Return the group of each port of one source: an empty one if it is new.

    Of a port that is to be left out it is none.
    """
    found: dict[int, _Group] = {}
    for place, port in enumerate(ports):
        taken = {id(group) for group in found.values()}
        same = (g for g in groups if id(g) not in taken and _is_named(port, g))
        if (group := next(same, None)) is not None:
            found[place] = group
    taken = {id(group) for group in found.values()}
    left = [port.bus_id for place, port in enumerate(ports) if place not in found]
    answer: list[_Group | None] = []
    for place, port in enumerate(ports):
        near = [g for g in groups if _bus_id(g) == port.bus_id != ""]
        free = [g for g in near if id(g) not in taken]
        is_only = left.count(port.bus_id) == 1 and len(free) == 1
        if place in found:
            answer.append(found[place])
        elif _is_fused(port, groups):
            answer.append(None)
        elif is_only:
            answer.append(free[0])
        else:
            answer.append(None if near else [])
    return answer


def _is_named(port: NetPort, group: _Group) -> bool:
    for each in group:
        other: NetPort = each.element
        if UNKNOWN in (port.port, other.port):
            if port.title == other.title:
                return True
        elif port.port == other.port and _adapter(port) == _adapter(other):
            return True
    return False


def _adapter(port: NetPort) -> str:
    """Return the name of the adapter, without the number of a second port."""
    title = port.title
    return title if is_address(title) else title.partition(":")[0]


def _bus_id(group: _Group) -> str:
    return next((each.element.bus_id for each in group if each.element.bus_id), "")


def _is_fused(port: NetPort, groups: Sequence[_Group]) -> bool:
    titles = {each.element.title for group in groups for each in group}
    return "+" in port.title and titles.issuperset(port.title.split("+"))


def _merge(group: _Group, remarks: list[str]) -> NetPort:
    titles = [each.element.title for each in group]
    # Sources that know no name call it by its address.
    title = next((each for each in titles if not is_address(each)), titles[0])
    name = group[0].element._replace(title=title).name
    merged: NetPort = merge_told(group, name, remarks)
    return merged._replace(title=title)
