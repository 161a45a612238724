"""PCI devices of several sources: one tree, with what leads to GPUs and networks."""

from collections.abc import Iterable, Mapping, Sequence

from ronde.topology.graph import HostTopology, PciDevice


def keep_lower_ends(
    devices: Sequence[PciDevice], ends: Iterable[str]
) -> tuple[PciDevice, ...]:
    """Return devices and what is above them without the upper ends of links.

    Some sources list both ends of each link: a processor's port and the device below
    it, a switch's port and the device below it. Others, like NCCL, only the lower.

    Args:
        devices: Parents before children, both ends of each link.
        ends: Bus addresses of the devices, which are not bridges.
    """
    by_bus_id = {device.bus_id: device for device in devices}
    parents: dict[str, str] = {}
    for end in ends:
        place = end
        while place in by_bus_id and place not in parents:
            above = by_bus_id.get(by_bus_id[place].parent)
            parents[place] = above.parent if above else ""
            place = parents[place]
    return tuple(
        device._replace(parent=parents[device.bus_id])
        for device in devices
        if device.bus_id in parents
    )


def find_needed(host: HostTopology, devices: Mapping[str, PciDevice]) -> set[str]:
    """Return the bus addresses of a host's GPUs and ports and of what is above them.

    Args:
        host: Has GPUs and ports.
        devices: By bus address.
    """
    needed: set[str] = set()
    for end in (*host.gpus, *host.ports):
        place = end.bus_id
        while place in devices and place not in needed:
            needed.add(place)
            place = devices[place].parent
    return needed


def sort_devices(devices: Mapping[str, PciDevice]) -> tuple[PciDevice, ...]:
    """Return devices with parents before children, else in their order.

    A parent that is not among them, or below its own child, is left as told.
    """
    placed: dict[str, PciDevice] = {}
    for bus_id in devices:
        chain: list[str] = []
        place = bus_id
        while place in devices and place not in placed and place not in chain:
            chain.append(place)
            place = devices[place].parent
        placed |= {each: devices[each] for each in reversed(chain)}
    return tuple(placed.values())
