"""Checks that the PCI links of network adapters are as fast as their ports."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ronde.check.check import FAIL, WARN, Problem, Problems, each_host
from ronde.check.fleet import Fleet, Value, Values
from ronde.check.gpu.links import read_is_virtual
from ronde.check.network.interfaces import INTERFACES, VIRTUAL
from ronde.check.probing import FactReader
from ronde.topology.kernel_files import list_names, read_number, read_text
from ronde.topology.paths.speeds import gt_per_s, pci_theory_gb_per_s

_LINKS, _PORTS = "network.pci_links", "network.rdma_ports"
# Slower ports, such as for the host's administration, are not judged.
_MIN_MBIT_PER_S = 25_000
_NO_WIDTH = 255  # of a device without a link, as in a virtual machine


def read(reader: FactReader) -> None:
    """Read the PCI links of the ports that ``interfaces`` and ``rdma`` have read."""
    reader.keep(_LINKS, lambda: read_links(reader.root, reader.values))
    reader.keep(VIRTUAL, lambda: read_is_virtual(reader.root))


def read_links(root: str, values: Values) -> dict[str, Value]:
    """Return the PCI link of each port, by its name; not of virtual functions.

    ``mbit_per_s`` is the port's, 0 if unknown or down; ``speed`` is in GT/s, 0 if
    unknown; the maxima are those of both ends of the link.
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
    speeds = [gt_per_s(read_text(f"{end}/{which}_link_speed")) for end in ends]
    return min(filter(None, speeds), default=0.0)


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
        # Ports with RDMA are above already.
        if not list_names(f"{device}/infiniband"):
            yield name, device, interface["mbit_per_s"]


@each_host(FAIL, _LINKS, VIRTUAL, _PORTS, INTERFACES)
def adapter_pcie(values: Values, _: Fleet) -> Problems:
    """The PCI links of network adapters are as fast as their ports.

    reads: width and speed in sysfs, of adapter and slot; the rates of ports that are up
    threshold: the maximum lanes and speed of both ends (only fewer lanes: a warning),
        and the port's rate; from 25 Gbit/s on; in virtual machines a warning
    source: PCI Express Base Specification 6.0: bits a lane and coding; 25: ronde's own,
        as slower ports are seldom those of training
    fix: reseat the card or its riser; look at the slot's lanes in the BIOS
    why: The link, not the port, then sets the pace of every reduction.
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
            # The best link of both ends: the host was built so.
            is_best = width >= link["max_width"] and speed >= link["max_speed"]
            yield Problem(message, WARN if is_best or values[VIRTUAL] else FAIL)
        elif width < link["max_width"]:
            yield Problem(
                f"{message}, where {link['max_width']} lanes are possible", WARN
            )
