"""Ports of network adapters and what stands above them, as the kernel shows them.

What software makes up is no port: loopback, bridges, bonds, VLANs, both ends of the
links of containers. Neither is the network interface of an RDMA adapter, whose port is
there under the adapter's name, nor a virtual function without a link. Those of them
whose bytes leave through ports are interfaces above these.
"""

from collections.abc import Mapping, Sequence

from ronde.topology import pci
from ronde.topology.graph import Interface, NetPort
from ronde.topology.kernel_files import list_names, read_number, read_text
from ronde.topology.nics import parse_rate
from ronde.topology.probes.sysfs_devices import Function

_NET, _INFINIBAND = "sys/class/net", "sys/class/infiniband"
_KINDS = {"1": "ethernet", "32": "infiniband"}
_LOWER = "lower_"


def read_ports(root: str, functions: Mapping[str, Function]) -> tuple[NetPort, ...]:
    """Return ports by name, RDMA adapters' first.

    Args:
        root: Where ``sys`` is; empty for this machine.
        functions: All that is on the bus.
    """
    adapters = [
        port
        for name in list_names(f"{root}/{_INFINIBAND}")
        for port in _read_adapter(root, name)
    ]
    taken = {port.bus_id for port in adapters if port.bus_id}
    interfaces = [
        _read_interface(root, name)
        for name in list_names(f"{root}/{_NET}")
        if not _is_software(f"{root}/{_NET}/{name}")
    ]
    ports = [*adapters, *(each for each in interfaces if each.bus_id not in taken)]
    return tuple(
        port
        for port in ports
        if port.is_up
        or port.bus_id not in functions
        or not functions[port.bus_id].is_virtual
    )


def read_interfaces(root: str, ports: Sequence[NetPort]) -> tuple[Interface, ...]:
    """Return the interfaces above ports, each after those below it.

    Args:
        root: Where ``sys`` is; empty for this machine.
        ports: Those that are listed.
    """
    known = {port.title for port in ports}
    above = [n for n in list_names(f"{root}/{_NET}") if n not in known]
    waiting = {name: _lower_names(root, name, ports) for name in above}
    found: list[Interface] = []
    # A circle, which no kernel has, never gets ready.
    while ready := [n for n, lower in waiting.items() if not waiting.keys() & lower]:
        for name in ready:
            lower = tuple(each for each in waiting.pop(name) if each in known)
            if lower:
                mode = read_text(f"{root}/{_NET}/{name}/bonding/mode")
                found.append(Interface(name, lower, mode.partition(" ")[0]))
                known.add(name)
    return tuple(found)


def _lower_names(root: str, name: str, ports: Sequence[NetPort]) -> list[str]:
    """Return what is right below an interface that is no port, in order of names."""
    own = f"{root}/{_NET}/{name}"
    if _is_software(own):
        below = [each for each in list_names(own) if each.startswith(_LOWER)]
        return [each.removeprefix(_LOWER) for each in below]
    bus_id = pci.bus_id(pci.read_path(own))
    shared = [port for port in ports if bus_id and port.bus_id == bus_id]
    # The kernel counts ports from 0 here, and RDMA adapters' from 1.
    number = read_number(f"{own}/dev_port", 0) + 1
    exact = [port for port in shared if port.port == number]
    return [port.title for port in exact or shared[:1]]


def _read_adapter(root: str, name: str) -> list[NetPort]:
    """Return the ports of an RDMA adapter; the second and later bear their number."""
    own = f"{root}/{_INFINIBAND}/{name}"
    bus_id = pci.bus_id(pci.read_path(own))
    ports: list[NetPort] = []
    for number in sorted(int(n) for n in list_names(f"{own}/ports") if n.isdecimal()):
        port = f"{own}/ports/{number}"
        ports.append(
            NetPort(
                title=f"{name}:{number}" if ports else name,
                bus_id=bus_id,
                kind=read_text(f"{port}/link_layer").lower(),
                mbit_per_s=parse_rate(read_text(f"{port}/rate")),
                port=number,
                guid=read_text(f"{own}/node_guid"),
                is_up=read_text(f"{port}/state").startswith("4:"),
            )
        )
    return ports


def _read_interface(root: str, name: str) -> NetPort:
    own = f"{root}/{_NET}/{name}"
    return NetPort(
        title=name,
        bus_id=pci.bus_id(pci.read_path(own)),
        kind=_KINDS.get(read_text(f"{own}/type"), ""),
        mbit_per_s=max(0, read_number(f"{own}/speed", 0)),
        # Of one that is down the kernel refuses to tell the carrier.
        is_up=read_text(f"{own}/carrier") == "1",
    )


def _is_software(own: str) -> bool:
    link = pci.read_link(own)
    # In trees that were copied without links, only hardware still has a device.
    return "/devices/virtual/" in link if link else not list_names(f"{own}/device")
