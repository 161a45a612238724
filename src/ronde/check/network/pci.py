"""Checks that the PCI links of network adapters are as fast as their ports."""

from pathlib import Path

from ronde.check.check import FAIL, WARN, Problem, Problems, each_host
from ronde.check.fleet import Fleet, Value, Values
from ronde.check.gpu.links import read_is_virtual
from ronde.check.network.interfaces import VIRTUAL
from ronde.check.probing import FactReader
from ronde.topology.paths.speeds import gt_per_s, pci_theory_gb_per_s
from ronde.topology.probes.sysfs import read_host

_LINKS = "network.pci_links"
# Slower ports, such as those for administration, are not checked.
_MIN_MBIT_PER_S = 25_000


def read(reader: FactReader) -> None:
    reader.store(_LINKS, lambda: read_links(reader.root))
    reader.store(VIRTUAL, lambda: read_is_virtual(reader.root))


def read_links(root: str) -> dict[str, Value]:
    """Return the current and maximum PCI link behind each network port, by port name.

    ``mbit_per_s`` is the port's rate, or 0 if it is unknown or the port is down. Speeds
    are in GT/s, 0 if unknown. Virtual functions have no link.
    """
    host = read_host(Path(f"{root}/"))
    devices = {device.bus_id: device for device in host.devices}
    found: dict[str, Value] = {}
    for port in host.ports:
        device = devices.get(port.bus_id)
        if device is not None and device.width_now > 0:
            found[port.title] = {
                "mbit_per_s": port.mbit_per_s if port.is_up else 0,
                "width": device.width_now,
                "speed": gt_per_s(device.speed_now),
                "max_width": device.width,
                "max_speed": gt_per_s(device.speed),
            }
    return found


@each_host(FAIL, _LINKS, VIRTUAL)
def adapter_pcie(values: Values, _: Fleet) -> Problems:
    """The PCI links of network adapters are as fast as their ports.

    reads: PCI width and speed of adapter and slot in sysfs, and the rates of ports that
        are up
    threshold: the rate of the port, from 25 Gbit/s on (only a warning if both ends can
        do no more, and in virtual machines); all lanes that both ends have (a warning)
    source: PCI Express Base Specification 6.0: bits per lane and coding; ronde's
        choice: 25 Gbit/s, since slower ports are seldom used for training
    fix: reseat the card or its riser; look at the slot's lanes in the BIOS
    why: The PCI link, and not the port, sets the pace of every reduction.
    """
    for name, link in values[_LINKS].items():
        if link["mbit_per_s"] < _MIN_MBIT_PER_S:
            continue
        width, speed = link["width"], link["speed"]
        carried = 8 * pci_theory_gb_per_s(f"{speed:g} GT/s", width)
        message = f"{name}: its PCI link has {width} lanes of {speed:g} GT/s"
        port = link["mbit_per_s"] / 1000
        if 0 < carried < port:
            message += f", {carried:.0f} Gbit/s, and its port {port:g} Gbit/s"
            # The link is the best that both ends can do: the host was built so.
            is_best = width >= link["max_width"] and speed >= link["max_speed"]
            yield Problem(message, WARN if is_best or values[VIRTUAL] else FAIL)
        elif width < link["max_width"]:
            yield Problem(
                f"{message}, where {link['max_width']} lanes are possible", WARN
            )
