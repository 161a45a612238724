"""A host as its kernel shows it in /proc and /sys: this machine, or a saved tree."""

from pathlib import Path

from ronde.topology.graph import HostTopology
from ronde.topology.kernel_files import read_text
from ronde.topology.probes.sysfs_devices import (
    find_network,
    read_devices,
    read_functions,
)
from ronde.topology.probes.sysfs_gpus import read_gpus
from ronde.topology.probes.sysfs_nodes import read_nodes
from ronde.topology.probes.sysfs_ports import read_interfaces, read_ports

FORM = "sysfs"
"""How sources of this kind begin."""


def read_host(root: Path = Path("/")) -> HostTopology:
    """Return a host's hardware, whatever of it this process may use; asks no driver.

    What cannot be read is left out or unknown, and is never an error.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    top = str(root).rstrip("/")
    functions = read_functions(top)
    nodes, remarks = read_nodes(top)
    gpus, links = read_gpus(top, functions)
    ports = read_ports(top, functions)
    wanted = [
        *(gpu.bus_id for gpu in gpus),
        *(port.bus_id for port in ports if port.bus_id),
        *find_network(functions),
    ]
    return HostTopology(
        name=read_text(f"{top}/proc/sys/kernel/hostname"),
        sources=(f"{FORM} of {root}" if top else f"{FORM} of this machine",),
        numa_nodes=nodes,
        devices=read_devices(top, functions, wanted, nodes),
        gpus=gpus,
        ports=ports,
        interfaces=read_interfaces(top, ports),
        links=links,
        remarks=remarks,
    )
