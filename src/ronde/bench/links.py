"""The rates of a host's network links, from sysfs.

Every reader takes the directory that holds ``sys``, so that snapshots of other machines
parse. What is virtual has no rate: a bridge or a container's interface tells none of
the hardware below, or tells of a hardware that is not there.
"""

import fcntl
import re
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ronde.topology.graph import PciDevice
from ronde.topology.limits.world import Rate
from ronde.topology.paths.rules import LATEST
from ronde.topology.paths.speeds import pci_gb_per_s, pci_theory_gb_per_s

ROOT = Path("/")

_SIOCGIFADDR = 0x8915
_INTERFACE_NAME_BYTES = 15
_MBIT_PER_GB = 8000.0
_MAX_LANES = 32
_RATE = re.compile(r"([\d.]+)\s*Gb/sec")


@dataclass(frozen=True, slots=True)
class Link:
    """One way out of a host.

    Attributes:
        name: Of the interface or adapter, such as ``eth0`` or ``mlx5_0``.
        gb_per_s: In one direction.
        bottleneck: What is slower than the port itself, such as its PCIe link; or
            empty.
        practical_gb_per_s: What NCCL counts on; None where it does not differ.
    """

    name: str
    gb_per_s: float
    bottleneck: str = ""
    practical_gb_per_s: float | None = None


def interface_of(address: str) -> str:
    """Return the name of the interface that has an IPv4 address; empty where none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_INTERFACE_NAME_BYTES])
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return ""


def own_address() -> str:
    """Return the IPv4 address that the host's own name leads to; empty where none.

    It is where Gloo listens, unless it is told an interface.
    """
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def ethernet_link(interface: str, root: Path = ROOT) -> Link | None:
    """Return what an interface's hardware carries.

    A bond carries what its ports do together, or one of them where one is a spare; a
    VLAN or bridge what the port below does.

    Args:
        interface: Its name.
        root: Directory that holds ``sys``.

    Returns:
        None where it has no hardware below, or that does not tell: a virtual machine's
        adapters say -1, and so does an unplugged one.
    """
    folder = root / "sys/class/net" / interface
    if not _is_virtual(folder):
        speed = _integer(folder / "speed")
        if speed is None or speed <= 0:
            return None
        return _capped(interface, speed / _MBIT_PER_GB, folder / "device")
    below = [
        link
        for name in _lower_names(folder)
        if (link := ethernet_link(name, root)) is not None
    ]
    if not below:
        return None
    mode = _text(folder / "bonding/mode")
    rates = [link.gb_per_s for link in below]
    is_shared = bool(mode) and "active-backup" not in mode
    names = "+".join(link.name for link in below)
    return Link(f"{interface} over {names}", sum(rates) if is_shared else max(rates))


def infiniband_links(root: Path = ROOT) -> list[Link]:
    """Return the active ports of all RDMA adapters, in order of their names.

    Args:
        root: Directory that holds ``sys``.
    """
    found: list[Link] = []
    for adapter in _listed(root / "sys/class/infiniband"):
        for port in _listed(adapter / "ports"):
            rate = _RATE.match(_text(port / "rate"))
            if "ACTIVE" in _text(port / "state") and rate is not None:
                name = f"{adapter.name}:{port.name}"
                found.append(_capped(name, float(rate[1]) / 8, adapter / "device"))
    return found


def pci_rates(device: Path) -> tuple[float, float] | None:
    """Return what a PCI device's link carries, its own or that of the bridge above it.

    Args:
        device: Its directory in sysfs, or a link to that.

    Returns:
        GB/s in one direction, by the standard and as NCCL counts; None where nothing
        tells them.
    """
    own = device.resolve()
    rates = [_pci_link_rates(each) for each in (own, own.parent)]
    return min((rate for rate in rates if rate is not None), default=None)


def node_rate(links: Sequence[Link]) -> float:
    """Return what all links of a node carry together."""
    return sum(link.gb_per_s for link in links)


def join_links(links: Sequence[Link]) -> Rate:
    """Return what all links of a node carry together, with their name."""
    practical = [
        link.gb_per_s if link.practical_gb_per_s is None else link.practical_gb_per_s
        for link in links
    ]
    return Rate(name_links(links), node_rate(links), sum(practical))


def name_links(links: Sequence[Link]) -> str:
    """Return links by name, with their rate: ``eth0, 3.125 GB/s``."""
    total = f"{node_rate(links):.4g} GB/s"
    slow = [link.bottleneck for link in links if link.bottleneck]
    names = [link.name for link in links]
    shown = (
        "+".join(names) if len(names) <= 3 else f"{len(names)} ports from {names[0]}"
    )
    return f"{shown}, {total}{f' ({slow[0]})' if slow else ''}"


def _capped(name: str, port_gb_per_s: float, device: Path) -> Link:
    rates = pci_rates(device) if device.exists() else None
    if rates is None:
        return Link(name, port_gb_per_s)
    pci, nccl = rates
    practical = nccl if nccl < port_gb_per_s else None
    if pci >= port_gb_per_s:
        return Link(name, port_gb_per_s, practical_gb_per_s=practical)
    bottleneck = f"its PCIe link: {pci:.4g} of {port_gb_per_s:.4g} GB/s"
    return Link(name, pci, bottleneck, practical)


def _pci_link_rates(device: Path) -> tuple[float, float] | None:
    speed = _text(device / "max_link_speed")
    width = _integer(device / "max_link_width")
    # 0 and 255 lanes, and 2.5 GT/s on one, are what virtual machines say of bridges.
    if width is None or not 0 < width <= _MAX_LANES:
        return None
    theory = pci_theory_gb_per_s(speed, width)
    nccl = pci_gb_per_s(PciDevice("", speed=speed, width=width), LATEST)
    return (theory, nccl) if theory > 0 else None


def _is_virtual(folder: Path) -> bool:
    """Say whether an interface is software; so is one that is not there."""
    target = str(folder.resolve())
    return not folder.exists() or "/devices/virtual/" in f"{target}/"


def _lower_names(folder: Path) -> list[str]:
    return [each.name.removeprefix("lower_") for each in _listed(folder, "lower_*")]


def _listed(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted(folder.glob(pattern))


def _text(path: Path) -> str:
    # An interface that is down answers a read of its speed with an error.
    try:
        return path.read_text(encoding="ascii", errors="replace").strip("\0 \n")
    except OSError:
        return ""


def _integer(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:
        return None
