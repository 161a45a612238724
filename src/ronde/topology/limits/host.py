"""What the links of a host carry, and a world of hosts like it."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

from ronde.topology.graph import (
    UNKNOWN,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    NetPort,
    PciDevice,
)
from ronde.topology.limits.bounds import Islands, LimitWorld, RankLayout, Rate
from ronde.topology.paths.speeds import (
    link_gb_per_s,
    max_nvlinks,
    pci_gb_per_s,
    pci_theory_gb_per_s,
    smp_gb_per_s,
)
from ronde.topology.probes.sysfs import SOURCE as SYSFS

# GB/s of one link in one direction, payload, by compute capability. Source: NVIDIA's
# data sheets: P100 4 links and 160 GB/s both ways, V100 6 and 300, A100 12 and 600,
# RTX 3090 4 and 112.5, H100 18 and 900, B200 18 and 1800.
_NVLINKS = ((100, 50.0), (90, 25.0), (87, 25.0), (86, 14.0625), (70, 25.0), (60, 20.0))
# Source: AMD's data sheets: MI355X 153.6 GB/s a link both ways, MI300 128, MI250 100,
# MI100 and MI60 92.
_XGMI = (("95", 76.8), ("94", 64.0), ("90a", 50.0), ("910", 50.0), ("", 46.0))

_HOST_BRIDGE = 0x0600
# One lane of 2.5 GT/s: what virtual machines report for links they know nothing of.
_NOTHING_GB_PER_S = 0.25


class PciFigures(NamedTuple):
    """One direction of a link, in GB/s."""

    theory: float  # By its standard; infinite where that is unknown.
    practical: float  # NCCL's.

    def plus(self, other: "PciFigures") -> "PciFigures":
        return PciFigures(*map(sum, zip(self, other, strict=True)))

    def capped(self, other: "PciFigures") -> "PciFigures":
        return PciFigures(*map(min, self, other))


_NO_FIGURES = PciFigures(0.0, 0.0)
_UNLIMITED = PciFigures(math.inf, math.inf)


def pci_figures(device: PciDevice) -> PciFigures | None:
    """Return what the link above a device carries; None where unknown.

    A host bridge has no link above it, though NCCL counts one where a file says so, and
    of the least link that there is nobody knows the limit: virtual machines have it.
    """
    theory = pci_theory_gb_per_s(device.speed, device.width)
    if not device.speed:
        theory = device.gb_per_s
    if theory <= 0:
        return None
    practical = min(theory, pci_gb_per_s(device))
    is_bridge = device.class_code >> 8 == _HOST_BRIDGE
    is_limit = theory > _NOTHING_GB_PER_S and not is_bridge
    return PciFigures(theory if is_limit else math.inf, practical)


_MBIT_PER_GB = 8000.0
# Modes of bonds in which each byte leaves by one port, or by all of them.
_NOT_SHARING = ("active-backup", "broadcast")
_Ways = dict[str, tuple[str, tuple[NetPort, ...]]]


def find_ways(host: HostTopology) -> _Ways:
    """Return all ways by which bytes leave, by title: up, and of known speed.

    Each has a name with what it stands on, ``bond0 over eth0+eth1``, and the ports that
    carry bytes at the same time: all below a bond that shares its load, else those of
    the best way.
    """
    ways: _Ways = {
        port.title: (port.title, (port,))
        for port in host.ports
        if port.is_up and port.mbit_per_s > 0
    }
    for each in host.interfaces:
        lower = [ways[title] for title in each.lower if title in ways]
        if lower:
            names = [name for name, _ in lower]
            sign = " + " if any(" " in name for name in names) else "+"
            ports = max((ports for _, ports in lower), key=known_gb_per_s)
            if each.bonding and each.bonding not in _NOT_SHARING:
                ports = tuple(dict.fromkeys(p for _, below in lower for p in below))
            ways[each.title] = f"{each.title} over {sign.join(names)}", ports
    return ways


def find_rdma_ports(host: HostTopology) -> list[NetPort]:
    """Return the ports of RDMA adapters that are up."""
    # Sources count their ports from 1, and interfaces' as 0 or not at all.
    ports = _hardware(host)
    return [port for port in ports if port.kind == "infiniband" or port.port > 0]


def _find_interfaces(host: HostTopology) -> list[NetPort]:
    """Return all ports that are hardware and up, without the spare ones of bonds."""
    ways = find_ways(host)
    spare: set[NetPort] = set()
    for each in host.interfaces:
        if each.bonding in _NOT_SHARING and each.title in ways:
            below = (ways[title][1] for title in each.lower if title in ways)
            spare |= {p for ports in below for p in ports} - {*ways[each.title][1]}
    return [port for port in _hardware(host) if port not in spare]


def known_gb_per_s(ports: Iterable[NetPort]) -> float:
    """Return what ports carry together, whatever is above them."""
    return sum(port.mbit_per_s / _MBIT_PER_GB for port in ports)


def _hardware(host: HostTopology) -> list[NetPort]:
    known = {device.bus_id for device in host.devices}
    # Software has no rate of its own, and what it says is a default.
    return [port for port in host.ports if port.bus_id in known and port.is_up]


_MAX_NAMES = 3
_ROUNDING = 1e-9


class NetworkRates(NamedTuple):
    """The network links of a host."""

    network: Rate | None  # All together; None where none is known.
    path: Rate | None  # The best one; None likewise.
    remark: str = ""  # What is not known of them, as a clause; empty where all is.


def network_rates(host: HostTopology, interface: str = "") -> NetworkRates:
    """Return what the network links of a host carry in one direction.

    Those are RDMA adapters where the source lists any, else all that are hardware.
    A port of unknown speed counts with its PCIe link: a bound, not more.
    """
    if interface:
        if interface not in (ways := find_ways(host)):
            why = f"{interface} is virtual, or its speed is unknown"
            why = f"the link rate is not known: {why}; --link-rate gives it"
            return NetworkRates(None, None, why)
        name, used = ways[interface]
        total = _total(host, {port: _path(host, port) or _UNLIMITED for port in used})
        rate = _rate(name, total, known_gb_per_s(used))
        return NetworkRates(rate, rate)
    ports = find_rdma_ports(host) or _find_interfaces(host)
    paths = {port: figures for port in ports if (figures := _path(host, port))}
    if not paths:
        why = "no network adapter with a rate was found; --link-rate gives it"
        return NetworkRates(None, None, why)
    unknown = [port.title for port in ports if port.mbit_per_s <= 0]
    remark = ""
    if unknown:
        remark = f"speed of {_names(unknown)} unknown: its PCIe link counts"
    total = _total(host, paths)
    best = max(paths, key=lambda port: paths[port].theory)
    return NetworkRates(
        _rate(_names([port.title for port in paths]), total, known_gb_per_s(paths)),
        _rate(best.title, paths[best], known_gb_per_s([best])),
        remark,
    )


def _total(host: HostTopology, paths: Mapping[NetPort, PciFigures]) -> PciFigures:
    """Return what all ports bring to the processors, or to GPUs on the way.

    Each PCI link lets through what it carries; a bridge with a GPU below is where
    bytes may end.
    """
    firsts: dict[str, str] = {}
    for device in host.devices:
        firsts.setdefault(device.bus_id.partition(".")[0], device.bus_id)
    # By device; what has arrived is at the empty name.
    arriving: defaultdict[str, PciFigures] = defaultdict(lambda: _NO_FIGURES)
    for port, figures in paths.items():
        # Functions of one device share its link.
        first = firsts.get(port.bus_id.partition(".")[0], "")
        arriving[first] = arriving[first].plus(figures)
    # GPUs and all bridges above them.
    ends = {gpu.bus_id for gpu in host.gpus}
    for device in reversed(host.devices):
        if device.bus_id in ends:
            ends.add(device.parent)
    listed = {device.bus_id for device in host.devices}
    for device in reversed(host.devices):
        own = arriving[device.bus_id]
        if device.bus_id not in ends:
            own = own.capped(pci_figures(device) or _UNLIMITED)
        is_end = device.bus_id in ends or device.parent not in listed
        above = "" if is_end else device.parent
        arriving[above] = arriving[above].plus(own)
    return arriving[""]


def _path(host: HostTopology, port: NetPort) -> PciFigures | None:
    """Return what one port carries through its own PCIe link; None where unknown."""
    own = (pci_figures(each) for each in host.devices if each.bus_id == port.bus_id)
    link = next(own, None)
    if port.mbit_per_s <= 0:
        return link if link and link.theory < math.inf else None
    rate = known_gb_per_s([port])
    return PciFigures(rate, rate).capped(link or _UNLIMITED)


def _rate(names: str, figures: PciFigures, plain_gb_per_s: float) -> Rate:
    link = f"{names}, {figures.theory:.4g} GB/s"
    if figures.theory < plain_gb_per_s * (1 - _ROUNDING):
        link += f" (PCIe lets through no more of {plain_gb_per_s:.8g})"
    return Rate(link, figures.theory, figures.practical)


def _names(names: Sequence[str]) -> str:
    if len(names) <= _MAX_NAMES:
        return "+".join(names)
    return f"{len(names)} ports from {names[0]}"


_NAMES = {LinkKind.NVLINK: "NVLinks", LinkKind.XGMI: "xGMI links"}
_SWITCHES = ""
"""Stands for all switches of a host, which are one to GPUs."""


class Mesh(NamedTuple):
    """Direct links among some GPUs."""

    # Names of GPUs that are joined, over any number of hops; each GPU is in one, alone
    # where nothing joins it.
    islands: tuple[frozenset[str], ...]
    # The way out of the GPU with the least; 0 GB/s if unknown.
    slowest: Rate
    has_switches: bool  # Links lead to switches.


def mesh_of(host: HostTopology, gpus: Sequence[GpuDevice]) -> Mesh:
    """Return what joins GPUs of a host; links to its other GPUs do not count.

    A GPU has direct links of one kind.
    """
    known = {gpu.name for gpu in host.gpus}
    used = {gpu.name for gpu in gpus}
    links = [
        link._replace(target=link.target if link.target in known else _SWITCHES)
        for link in host.links
        if link.kind in _NAMES and link.source in used and link.source != link.target
    ]
    links = [link for link in links if link.target in {*used, _SWITCHES}]
    ways = [_way_out(gpu, links) for gpu in gpus]
    slowest = min(ways, key=lambda way: way.gb_per_s)
    has_switches = any(link.target == _SWITCHES for link in links)
    return Mesh(_islands(used, links), slowest, has_switches)


def _way_out(gpu: GpuDevice, links: Sequence[Link]) -> Rate:
    """Return what direct links of a GPU carry together; 0 GB/s if unknown."""
    # Some sources list a link at one of its ends.
    own = [link for link in links if link.source == gpu.name]
    own = own or [link for link in links if link.target == gpu.name]
    if not own:
        return Rate("no direct links", 0.0)
    count = sum(link.num_links for link in own)
    reported = sum(link.gb_per_s for link in own)
    if own[0].kind is LinkKind.XGMI:
        name = gpu.gcn.strip().lower().removeprefix("gfx")
        each = next(rate for prefix, rate in _XGMI if name.startswith(prefix))
    else:
        # Virtual machines list more than the GPU can have.
        count = min(count, max_nvlinks(gpu.sm) or count)
        each = next((rate for least, rate in _NVLINKS if gpu.sm >= least), 0.0)
    theory = reported or count * each
    together = own[0]._replace(num_links=count, gb_per_s=reported)
    link = f"{count} {_NAMES[own[0].kind]}, {theory:.4g} GB/s a GPU"
    return Rate(link, theory, min(theory, link_gb_per_s(together, gpu)))


def _islands(gpus: set[str], links: Sequence[Link]) -> tuple[frozenset[str], ...]:
    islands = [{gpu} for gpu in gpus]
    for link in links:
        ends = {link.source, link.target}
        joined = [island for island in islands if island & ends]
        islands = [island for island in islands if not island & ends]
        islands.append(ends.union(*joined))
    return tuple(frozenset(island - {_SWITCHES}) for island in islands)


_SM_OF_NVLS = 90


class KnownRates(NamedTuple):
    """Rates that the user knows better than the source."""

    # All network links of a node together; None looks at the host.
    network_gb_per_s: float | None = None
    # The way out of each GPU; None looks at the host.
    gpu_gb_per_s: float | None = None
    # The network interface that carries all bytes; empty for those that NCCL takes.
    interface: str = ""


_NOTHING_GIVEN = KnownRates()


def world_of(
    host: HostTopology,
    num_nodes: int,
    ranks_per_node: int,
    given: KnownRates = _NOTHING_GIVEN,
) -> LimitWorld:
    """Return the world of ranks on nodes that are like a host.

    Where a node has GPUs, rank i of it has GPU i; more ranks than GPUs share them, and
    what carries the bytes between those is not known.
    """
    layout = RankLayout(num_nodes * ranks_per_node, num_nodes, ranks_per_node)
    has_gpus = bool(host.gpus) or given.gpu_gb_per_s is not None
    world = LimitWorld(layout, has_gpus=has_gpus)
    if num_nodes > 1:
        world = with_network(world, host, given)
    if ranks_per_node == 1:
        return world
    if given.gpu_gb_per_s is not None:
        link = f"as given, {given.gpu_gb_per_s:.4g} GB/s a GPU"
        return world._replace(gpu=Rate(link, given.gpu_gb_per_s), has_nvls=True)
    if not host.gpus:
        return world.lacking(
            "what memory carries is to be measured: ronde bench --limit does"
        )
    if ranks_per_node > len(host.gpus):
        return world.lacking(f"{ranks_per_node} ranks share {len(host.gpus)} GPUs")
    return with_gpus(world, host, host.gpus[:ranks_per_node])


def slowest(worlds: Sequence[LimitWorld]) -> LimitWorld:
    """Return the world where each link is the slowest of all nodes'."""
    first = worlds[0]
    rates = {
        name: min(
            (rate for world in worlds if (rate := getattr(world, name)) is not None),
            key=lambda r: (r.way_out if isinstance(r, Islands) else r).gb_per_s,
            default=None,
        )
        for name in ("network", "path", "gpu", "islands")
    }
    return first._replace(
        **rates,
        has_gpus=any(world.has_gpus for world in worlds),
        has_nvls=all(world.has_nvls for world in worlds),
        unknown=tuple(dict.fromkeys(why for world in worlds for why in world.unknown)),
    )


def with_network(
    world: LimitWorld, host: HostTopology, given: KnownRates
) -> LimitWorld:
    """Return a world with the network links of its nodes, which are like a host."""
    if given.network_gb_per_s is not None:
        link = f"as given, {given.network_gb_per_s:.4g} GB/s"
        return world._replace(network=Rate(link, given.network_gb_per_s))
    rates = network_rates(host, given.interface)
    world = world._replace(network=rates.network, path=rates.path)
    return world.lacking(rates.remark)


def with_gpus(
    world: LimitWorld, host: HostTopology, used: Sequence[GpuDevice]
) -> LimitWorld:
    """Return a world with the links of its nodes' GPUs, which are like a host's."""
    mesh = mesh_of(host, used)
    if len(mesh.islands) > 1:
        return _with_pcie(world, host, used, mesh.islands)
    if not mesh.slowest.gb_per_s:
        return world.lacking("the source does not show how fast a GPU's links are")
    # AMD's files have the number of units where others have the capability.
    are_able = all(gpu.sm >= _SM_OF_NVLS and not gpu.gcn for gpu in used)
    return world._replace(gpu=mesh.slowest, has_nvls=mesh.has_switches and are_able)


def _with_pcie(
    world: LimitWorld,
    host: HostTopology,
    used: Sequence[GpuDevice],
    islands: Sequence[Collection[str]],
) -> LimitWorld:
    sizes = sorted(len(island) for island in islands)
    size = sizes[0]
    devices = {device.bus_id: device for device in host.devices}
    links = [devices[gpu.bus_id] for gpu in used if gpu.bus_id in devices]
    known = [each for link in links if (each := pci_figures(link))]
    known = [each for each in known if each.theory < math.inf]
    # The kernel knows NVIDIA's models, and nothing of their links.
    is_kernel_alone = all(source.startswith(SYSFS) for source in host.sources)
    is_silent = host.sources and is_kernel_alone
    may_know = not is_silent and any(gpu.sm != UNKNOWN for gpu in used)
    if not may_know and not any(gpu.gcn for gpu in used):
        return world.lacking("the source does not show whether NVLink joins the GPUs")
    if len(known) < len(used):
        return world.lacking("the source does not show the PCIe link of a GPU")
    if size == 1:
        return world._replace(gpu=_alone(host, used, min(known)))
    if size < sizes[-1]:
        return world.lacking(
            f"direct links join {size} GPUs here and {sizes[-1]} there"
        )
    theory, practical = min(known)
    name = f"PCIe of {size} GPUs that have direct links, {theory * size:.4g} GB/s"
    way_out = Rate(name, theory * size, practical * size)
    return world._replace(islands=Islands(size, way_out))


def _alone(host: HostTopology, gpus: Sequence[GpuDevice], pcie: PciFigures) -> Rate:
    """Return the way out of a GPU that has none but PCIe and the processors."""
    bus_ids = {gpu.bus_id for gpu in gpus}
    near = {device.node for device in host.devices if device.bus_id in bus_ids}
    nodes = [node for node in host.numa_nodes if node.number in near]
    rates = (smp_gb_per_s(a, b) for a, b in permutations(nodes, 2))
    between = min(rates, default=pcie.practical)
    name = f"PCIe, {pcie.theory:.4g} GB/s a GPU"
    if between < pcie.practical:
        name += f" (NCCL counts {between:g} between processors)"
    return Rate(name, pcie.theory, min(between, pcie.practical))
