"""What all network links of a host carry together, as far as PCIe lets it through."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ronde.topology.graph import HostTopology, NetPort
from ronde.topology.limits.link_rates import (
    NO_FIGURES,
    UNLIMITED,
    Figures,
    pci_figures,
)
from ronde.topology.limits.network_ways import (
    find_interfaces,
    find_rdma_ports,
    find_ways,
    told_gb_per_s,
)
from ronde.topology.limits.world import Rate

_MAX_NAMES = 3
_ROUNDING = 1e-9


class NetworkRates(NamedTuple):
    """The network links of a host.

    Attributes:
        network: All together; None where none is known.
        path: The best one; None likewise.
        remark: What is not known of them, as a clause; empty where all is.
    """

    network: Rate | None
    path: Rate | None
    remark: str = ""


def network_rates(host: HostTopology, interface: str = "") -> NetworkRates:
    """Return what the network links of a host carry in one direction.

    Those are RDMA adapters where the source tells of any, else all that are hardware.
    A port that is told no speed counts with its PCIe link: a bound, not more.

    Args:
        host: Where they are.
        interface: The one that carries all bytes instead; of it a speed has to be told.
    """
    if interface:
        return _interface_rates(host, interface)
    ports = find_rdma_ports(host) or find_interfaces(host)
    paths = {port: figures for port in ports if (figures := _path(host, port))}
    if not paths:
        why = "no network adapter with a rate was found; --link-rate gives it"
        return NetworkRates(None, None, why)
    untold = [port.title for port in ports if port.mbit_per_s <= 0]
    remark = ""
    if untold:
        remark = f"no speed is told of {_names(untold)}: its PCIe link counts"
    total = _total(host, paths)
    best = max(paths, key=lambda port: paths[port].theory)
    return NetworkRates(
        _rate(_names([port.title for port in paths]), total, told_gb_per_s(paths)),
        _rate(best.title, paths[best], told_gb_per_s([best])),
        remark,
    )


def _interface_rates(host: HostTopology, interface: str) -> NetworkRates:
    way = find_ways(host).get(interface)
    if way is None:
        why = f"{interface} is virtual or does not tell its speed"
        why = f"the link rate is not known: {why}; --link-rate gives it"
        return NetworkRates(None, None, why)
    total = _total(host, {port: _path(host, port) or UNLIMITED for port in way.ports})
    rate = _rate(way.name, total, told_gb_per_s(way.ports))
    return NetworkRates(rate, rate)


def _total(host: HostTopology, paths: Mapping[NetPort, Figures]) -> Figures:
    """Return what all ports bring to the processors, or to GPUs on the way.

    Each PCI link lets through what it carries; a bridge with a GPU below is where
    bytes may end.
    """
    firsts: dict[str, str] = {}
    for device in host.devices:
        firsts.setdefault(_slot(device.bus_id), device.bus_id)
    arriving: dict[str, Figures] = {}
    for port, figures in paths.items():
        # Functions of one device share its link.
        first = firsts.get(_slot(port.bus_id), "")
        arriving[first] = arriving.get(first, NO_FIGURES).plus(figures)
    known = {device.bus_id for device in host.devices}
    ends = _above_gpus(host)
    total = arriving.get("", NO_FIGURES)
    for device in reversed(host.devices):
        own = arriving.get(device.bus_id, NO_FIGURES)
        if device.bus_id not in ends:
            own = own.capped(pci_figures(device) or UNLIMITED)
        if device.bus_id in ends or device.parent not in known:
            total = total.plus(own)
        else:
            before = arriving.get(device.parent, NO_FIGURES)
            arriving[device.parent] = before.plus(own)
    return total


def _above_gpus(host: HostTopology) -> set[str]:
    """Return the bus addresses of GPUs and of all bridges above them."""
    found = {gpu.bus_id for gpu in host.gpus}
    for device in reversed(host.devices):
        if device.bus_id in found:
            found.add(device.parent)
    return found


def _slot(bus_id: str) -> str:
    return bus_id.partition(".")[0]


def _path(host: HostTopology, port: NetPort) -> Figures | None:
    """Return what one port carries through its own PCIe link; None where not told."""
    above = (each for each in host.devices if each.bus_id == port.bus_id)
    device = next(above, None)
    link = pci_figures(device) if device else None
    if port.mbit_per_s <= 0:
        return link if link and link.is_told else None
    rate = told_gb_per_s([port])
    return Figures(rate, rate).capped(link or UNLIMITED)


def _rate(names: str, figures: Figures, plain_gb_per_s: float) -> Rate:
    link = f"{names}, {figures.theory:.4g} GB/s"
    if figures.theory < plain_gb_per_s * (1 - _ROUNDING):
        link += f" (PCIe lets through no more of {plain_gb_per_s:.8g})"
    return Rate(link, figures.theory, figures.practical)


def _names(names: Sequence[str]) -> str:
    if len(names) <= _MAX_NAMES:
        return "+".join(names)
    return f"{len(names)} ports from {names[0]}"
