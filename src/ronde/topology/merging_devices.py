"""PCI devices of several sources: one tree, with what leads to GPUs and networks."""

from collections.abc import Mapping

from ronde.topology.graph import HostTopology, PciDevice


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
