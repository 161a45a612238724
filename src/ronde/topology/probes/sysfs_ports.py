"""Ports of network adapters, as the kernel shows them.

What software makes up is left out: loopback, bridges, bonds, VLANs, both ends of the
links of containers. So is the network interface of an RDMA adapter, whose port is there
under the adapter's name, and virtual functions without a link.
"""

from collections.abc import Mapping

from ronde.topology import pci
from ronde.topology.graph import NetPort
from ronde.topology.kernel_files import list_names, read_number, read_text
from ronde.topology.nics import parse_rate
from ronde.topology.probes.sysfs_devices import Function

_NET, _INFINIBAND = "sys/class/net", "sys/class/infiniband"
_KINDS = {"1": "ethernet", "32": "infiniband"}


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
