"""Whether the PCI links of network adapters carry what their ports do."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ronde.check.check import FAIL, WARN, Problem, Problems, each_host
from ronde.check.fleet import Fleet, Value, Values
from ronde.check.gpu.links import read_is_virtual
from ronde.check.network.interfaces import INTERFACES, VIRTUAL
from ronde.check.probing import FactReader
from ronde.topology.kernel_files import list_names, read_number, read_text

_LINKS, _PORTS = "network.pci_links", "network.rdma_ports"
_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s")
# What is left of a lane's GT/s for data, by the speed: 8b/10b, 128b/130b, FLIT.
_CODED = {2.5: 0.8, 5.0: 0.8, 64.0: 0.945}
_CODED_128 = 128 / 130
# Slower ones, such as a host's port for its own administration, are left as they are.
_MIN_MBIT_PER_S = 25_000
_NO_WIDTH = 255  # of what is on no link, as in a virtual machine


def read(reader: FactReader) -> None:
    """Read the links of the ports that ``interfaces`` and ``rdma`` have read."""
    reader.keep(_LINKS, lambda: read_links(reader.root, reader.values))
    reader.keep(VIRTUAL, lambda: read_is_virtual(reader.root))


def read_links(root: str, values: Values) -> dict[str, Value]:
    """Return the PCI link of each adapter's port, by the port's name.

    ``mbit_per_s`` is the port's, 0 where it is unknown or down; ``speed`` is in GT/s,
    0 where it is unknown; the highest are those that both ends of the link have.
    Ports of virtual functions, which have the link of their adapter, are left out.
    """
    found: dict[str, Value] = {}
    for name, device, mbit_per_s in _list_ports(root, values):
        own = Path(device).resolve()
        width = read_number(f"{own}/current_link_width", 0)
        if (own / "physfn").exists() or not 0 < width < _NO_WIDTH:
            continue
        found[name] = {
            "mbit_per_s": mbit_per_s,
            "width": width,
            "speed": _speed([own], "current"),
            "max_width": min(_widths((own, own.parent)), default=width),
            "max_speed": _speed((own, own.parent), "max"),
        }
    return found


def _widths(ends: Sequence[Path]) -> list[int]:
    widths = [read_number(f"{end}/max_link_width", 0) for end in ends]
    return [width for width in widths if 0 < width < _NO_WIDTH]


def _speed(ends: Sequence[Path], which: str) -> float:
    texts = [read_text(f"{end}/{which}_link_speed") for end in ends]
    return min((float(m[1]) for m in map(_SPEED.match, texts) if m), default=0.0)


def _list_ports(root: str, values: Values) -> Iterator[tuple[str, str, int]]:
    """Yield name, PCI device and rate of each port."""
    ports: Values = values.get(_PORTS, {})
    for name, port in ports.items():
        adapter = name.partition(":")[0]
        rate = port["mbit_per_s"] if port["state"] == "ACTIVE" else 0
        yield name, f"{root}/sys/class/infiniband/{adapter}/device", rate
    interfaces: Values = values.get(INTERFACES, {})
    for name, interface in interfaces.items():
        device = f"{root}/sys/class/net/{name}/device"
        # A port that RDMA uses as well is above already.
        if not list_names(f"{device}/infiniband"):
            yield name, device, interface["mbit_per_s"]


@each_host(FAIL, _LINKS, VIRTUAL, _PORTS, INTERFACES)
def adapter_pcie(values: Values, _: Fleet) -> Problems:
    """The PCI links of network adapters carry what their ports do.

    reads: width and speed in sysfs, of adapter and slot; the rates of ports that are up
    threshold: the lanes and the speed that both ends have (fewer lanes alone warn), and
        no less than the port's rate; from 25 Gbit/s on; virtual machines: a warning
    source: PCI Express Base Specification 6.0: bits a lane and coding; 25: ronde's own,
        as slower ports are seldom those of training
    fix: reseat the card or its riser; look at the slot's lanes in the BIOS
    why: The link, not the port, then sets the pace of every reduction.
    """
    for name, link in values[_LINKS].items():
        if link["mbit_per_s"] < _MIN_MBIT_PER_S:
            continue
        width, speed = link["width"], link["speed"]
        carried = width * speed * _CODED.get(speed, _CODED_128)
        message = f"{name}: its PCI link has {width} lanes of {speed:g} GT/s"
        port = link["mbit_per_s"] / 1000
        if speed and carried < port:
            message += f", {carried:.0f} Gbit/s, and its port {port:g} Gbit/s"
            # What both ends do not have is how the host was built.
            is_best = width >= link["max_width"] and speed >= link["max_speed"]
            yield Problem(message, WARN if is_best or values[VIRTUAL] else FAIL)
        elif width < link["max_width"]:
            yield Problem(
                f"{message}, where {link['max_width']} lanes are possible", WARN
            )
