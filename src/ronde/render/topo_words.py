"""What trees and drawings say of an element alike."""

from ronde.topology.graph import HostTopology, NetPort, PciDevice


def rate_words(port: NetPort) -> str:
    """Return how fast a port is told to be: ``200 Gb/s``, ``down``."""
    if not port.is_up:
        return "down"
    rate = port.mbit_per_s / 1000
    return f"{rate:g} Gb/s" if rate > 0 else "rate unknown"


def words_without_device(host: HostTopology, port: NetPort) -> str:
    """Return what to say of a port whose PCI device is not listed: hardware has one."""
    is_hardware = port.bus_id or port.name in host.paired
    return "PCI device unknown" if is_hardware else "no PCI device"


def is_speed_told(device: PciDevice) -> bool:
    """Return whether a source tells anything of the link above a device."""
    return bool(device.speed) or device.width > 0 or device.gb_per_s > 0
