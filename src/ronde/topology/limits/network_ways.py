"""By which ports of a host bytes leave, and through which interfaces."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ronde.topology.graph import HostTopology, Interface, NetPort

_MBIT_PER_GB = 8000.0
# Modes of bonds in which each byte leaves by one port, or by all of them.
_NOT_SHARING = ("active-backup", "broadcast")


class Way(NamedTuple):
    """A port or interface by which bytes leave.

    Attributes:
        name: With what it stands on: ``bond0 over eth0+eth1``.
        ports: Those that carry bytes at the same time; of spare ones the fastest.
    """

    name: str
    ports: tuple[NetPort, ...]


def find_ways(host: HostTopology) -> dict[str, Way]:
    """Return all ways that are up and told a speed, by title."""
    ways = {
        port.title: Way(port.title, (port,))
        for port in host.ports
        if port.is_up and port.mbit_per_s > 0
    }
    for each in host.interfaces:
        lower = [ways[title] for title in each.lower if title in ways]
        if lower:
            name = f"{each.title} over {_join([way.name for way in lower])}"
            ways[each.title] = Way(name, _used_together(each, lower))
    return ways


def find_rdma_ports(host: HostTopology) -> list[NetPort]:
    """Return the ports of RDMA adapters that are up."""
    # Sources count their ports from 1, and interfaces' as 0 or not at all.
    ports = _hardware(host)
    return [port for port in ports if port.kind == "infiniband" or port.port > 0]


def find_interfaces(host: HostTopology) -> list[NetPort]:
    """Return all ports that are hardware and up, without the spare ones of bonds."""
    ways = find_ways(host)
    spare: set[NetPort] = set()
    for each in host.interfaces:
        if each.bonding in _NOT_SHARING and each.title in ways:
            below = (ways[title].ports for title in each.lower if title in ways)
            spare |= {p for ports in below for p in ports} - {*ways[each.title].ports}
    return [port for port in _hardware(host) if port not in spare]


def told_gb_per_s(ports: Iterable[NetPort]) -> float:
    """Return what ports are told to carry together, whatever is above them."""
    return sum(port.mbit_per_s / _MBIT_PER_GB for port in ports)


def _hardware(host: HostTopology) -> list[NetPort]:
    known = {device.bus_id for device in host.devices}
    # Software has no rate of its own, and what it says is a default.
    return [port for port in host.ports if port.bus_id in known and port.is_up]


def _join(names: Sequence[str]) -> str:
    return (" + " if any(" " in name for name in names) else "+").join(names)


def _used_together(interface: Interface, lower: Sequence[Way]) -> tuple[NetPort, ...]:
    """Return all ports below a bond that shares its load, else the best way's."""
    if interface.bonding and interface.bonding not in _NOT_SHARING:
        return tuple(dict.fromkeys(port for way in lower for port in way.ports))
    return max(lower, key=lambda way: told_gb_per_s(way.ports)).ports
