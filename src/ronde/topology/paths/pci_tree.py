"""Where each element of a host hangs: below which switch, and at which NUMA node.

Broadcom's switches for PCIe 4 and 5 in base mode show themselves as a switch above
others, and yet sustain the full bandwidth between all their ports. NCCL makes one of
them, and a path through them counts as through one.
"""

from collections.abc import Sequence

from ronde.topology.graph import UNKNOWN, HostTopology, NetPort, PciDevice
from ronde.topology.paths.rules import NcclRules

POWER_BRIDGE_CLASS = 0x068001
"""Of what stands for the processor at the end of a GPU's NVLinks."""

_BROADCOM = 0x1000
_PCIE4_SWITCH = 0xC010
_PCIE5_SWITCH = 0xC030


def join_switches(devices: Sequence[PciDevice], rules: NcclRules) -> dict[str, str]:
    """Return the parent of each device by bus address, such switches being one.

    A switch that became part of the one above it is not in it.

    Args:
        devices: Parents before children.
        rules: Of which release.
    """
    parents = {each.bus_id: each.parent for each in devices}
    by_bus_id = {each.bus_id: each for each in devices}
    for switch in devices:
        generation = _generation(switch, 0, rules)
        if not generation or switch.bus_id not in parents:
            continue
        below = [name for name, parent in parents.items() if parent == switch.bus_id]
        for name in below:
            if _generation(by_bus_id[name], 1, rules) == generation:
                del parents[name]
                for child, parent in parents.items():
                    if parent == name:
                        parents[child] = switch.bus_id
    return parents


def find_numa_numbers(host: HostTopology) -> dict[str, int]:
    """Return the number of the NUMA node of all devices, GPUs and adapters, by name.

    All of one PCI tree are at one node, as one host bridge has them. What no source
    places is at the only node, or at ``UNKNOWN``; a virtual adapter at the first node,
    where NCCL puts it. One of which a source tells how near others are is none.
    """
    roots: dict[str, str] = {}
    numbers: dict[str, int] = {}
    for device in host.devices:
        root = roots.get(device.parent, device.bus_id)
        roots[device.bus_id] = root
        if numbers.get(root, UNKNOWN) == UNKNOWN:
            numbers[root] = device.node
    found = {name: numbers[root] for name, root in roots.items()}
    for gpu in host.gpus:
        found.setdefault(gpu.name, gpu.node)
    first = host.numa_nodes[0].number if host.numa_nodes else UNKNOWN
    paired = host.paired
    for port in host.ports:
        is_placed = port.bus_id or port.node != UNKNOWN or port.name in paired
        found.setdefault(adapter_name(port), port.node if is_placed else first)
    only = first if len(host.numa_nodes) == 1 else UNKNOWN
    return {n: only if number == UNKNOWN else number for n, number in found.items()}


def adapter_name(port: NetPort) -> str:
    """Return the name of a port's adapter; virtual ones of a NUMA node share one."""
    return port.bus_id or f"nic/{port.node}"


def _generation(switch: PciDevice, level: int, rules: NcclRules) -> int:
    """Return the PCIe generation of a switch of Broadcom's, 0 of any other device.

    Args:
        switch: Any device.
        level: 0 for one above others, 1 for one below.
        rules: Of which release.

    Source: ``getBcmGen`` of NCCL's src/graph/topo.cc.
    """
    if (switch.vendor, switch.subsystem_vendor) != (_BROADCOM, _BROADCOM):
        return 0
    family = switch.subsystem_device & 0xF000
    if (switch.device, family) == (_PCIE4_SWITCH, 0xA000):
        return 4
    if (switch.device, family) == (_PCIE5_SWITCH, level << 12):
        return 5 if rules.flattens_gen5 else 0
    return 0
