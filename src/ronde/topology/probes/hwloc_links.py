"""hwloc's PCI links, of which it lists both ends, as all others have them: once."""

from collections.abc import Iterable, Sequence

from ronde.topology.graph import PciDevice


def keep_lower_ends(
    devices: Sequence[PciDevice], ends: Iterable[str]
) -> tuple[PciDevice, ...]:
    """Return devices and what is above them without the upper ends of links.

    A link has an upper end, a processor's or switch's port, and a lower one, the device
    or switch below. NCCL and the graph have only the lower. Of the rates that the two
    ends tell the lower is kept.

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
        device._replace(
            parent=parents[device.bus_id],
            gb_per_s=_lower(device, by_bus_id.get(device.parent)),
        )
        for device in devices
        if device.bus_id in parents
    )


def _lower(device: PciDevice, above: PciDevice | None) -> float:
    rates = [each.gb_per_s for each in (device, above) if each and each.gb_per_s > 0]
    return min(rates, default=0.0) if device.gb_per_s > 0 else 0.0
