"""Upper bounds for the bandwidth of collectives, set by a machine's slowest link.

Rates are in GB/s (1e9 bytes/s) and for one direction. All nodes are equal: n ranks run
on N nodes, g consecutive ranks on each. Formulas raise ``KeyError`` for unknown tests.
See docs/bench-limits.md.

Each bound follows from the bytes that any algorithm must send between nodes, send out
of a GPU, or read and write in memory.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from operator import itemgetter
from typing import NamedTuple

from ronde.parallel.layout import RankLayout
from ronde.topology.graph import (
    UNKNOWN,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    NetPort,
    PciDevice,
)
from ronde.topology.paths import speeds
from ronde.topology.probes.sysfs import SOURCE as SYSFS

_TO_ALL = ("all_reduce", "all_gather", "reduce_scatter")
_PAIRWISE = ("alltoall", "alltoallv")
_FROM_ROOT = ("broadcast", "reduce")
_SPLIT_BY_ROOT = ("scatter", "gather")

_OTHERS = (*_SPLIT_BY_ROOT, "sendrecv", "hypercube")
COLLECTIVES = (*_TO_ALL, *_FROM_ROOT, *_PAIRWISE, *_OTHERS)
"""Collectives with a formula, by their names in ``ronde bench``."""


def network_bound(
    test: str,
    layout: RankLayout,
    node_gb_per_s: float,
    *,
    is_reduced_in_network: bool = False,
) -> float:
    n, g, num_nodes = layout.num_ranks, layout.ranks_per_node, layout.num_nodes
    if test == "all_reduce" and is_reduced_in_network:
        return node_gb_per_s * 2 * layout.others
    share = layout.others / ((num_nodes - 1) / num_nodes)
    bounds = {
        **dict.fromkeys((*_TO_ALL, *_SPLIT_BY_ROOT), node_gb_per_s * share),
        **dict.fromkeys(_PAIRWISE, node_gb_per_s / g * share),
        **dict.fromkeys((*_FROM_ROOT, "sendrecv"), node_gb_per_s),
        "hypercube": node_gb_per_s / g * (n - 1) / (n - g),
    }
    return bounds[test]


def gpu_bound(test: str, layout: RankLayout, gpu_gb_per_s: float) -> float:
    """Return the bound set by each GPU's links within a node, without NVLS."""
    n, g = layout.num_ranks, layout.ranks_per_node
    bounds = {
        **dict.fromkeys(_TO_ALL, gpu_gb_per_s * layout.others * g / (g - 1)),
        **dict.fromkeys((*_PAIRWISE, "hypercube"), gpu_gb_per_s * (n - 1) / (g - 1)),
        **dict.fromkeys((*_FROM_ROOT, *_SPLIT_BY_ROOT, "sendrecv"), gpu_gb_per_s),
    }
    return bounds[test]


def nvls_bound(layout: RankLayout, gpu_gb_per_s: float) -> float:
    """Return the bound for all_reduce if the NVLink switches reduce (NVLS)."""
    g = layout.ranks_per_node
    return gpu_gb_per_s * 2 * layout.others * g / (g + 1)


def memory_bound(test: str, layout: RankLayout, memory_gb_per_s: float) -> float:
    """Return the bound set by a node's memory bandwidth.

    Every input byte is read and every output byte written at least once. The node that
    moves the most bytes sets the bound. In-place collectives do not write a rank's own
    part.
    """
    n, g = layout.num_ranks, layout.ranks_per_node
    # By test: busbw divided by the rate of reads and writes.
    shares = {
        **dict.fromkeys(("all_reduce", "all_gather", "hypercube"), (n - 1) / (n * g)),
        "reduce_scatter": (n - 1) / (g * (n + 1)),
        "broadcast": 1 / g,
        "reduce": 1 / (g + 1),
        **dict.fromkeys((*_PAIRWISE, "sendrecv"), 1 / (2 * g)),
        **dict.fromkeys(_SPLIT_BY_ROOT, (n - 1) / (n + g - 2)),
    }
    return memory_gb_per_s * shares[test]


@dataclass(frozen=True, slots=True)
class Limit:
    """Upper bound for a collective's busbw with any algorithm, and its cause."""

    bus_bandwidth_gb_per_s: float  # The bound.
    link: str  # The tightest link with its rate: ``eth0, 3.125 GB/s``.
    # Conditions under which the bound does not hold.
    note: str = ""
    # The same bound by NCCL's figures; None without NCCL.
    practical_gb_per_s: float | None = None
    practical_link: str = ""  # The tightest link by NCCL's figures.

    def percent(self, busbw_gb_per_s: float) -> float:
        """Return a busbw in percent of the bound; above 100, an assumption is wrong."""
        return 100.0 * busbw_gb_per_s / self.bus_bandwidth_gb_per_s

    def warning(self, busbw_gb_per_s: float) -> str:
        """Return a warning if a measured busbw exceeds the bound, else ""."""
        if busbw_gb_per_s <= self.bus_bandwidth_gb_per_s:
            return ""
        cause = "that no switch reduces (NVLS, SHARP), or the number or rate of links"
        if self.link.startswith("memory"):
            cause = "that the data does not fit into the caches"
        percent = self.percent(busbw_gb_per_s)
        return f"{percent:.0f} % of the bound: an assumption is wrong, such as {cause}"


class Rate(NamedTuple):
    """The total rate of one or more links, in one direction."""

    link: str  # Their name and rate, for output: ``eth0, 3.125 GB/s``.
    gb_per_s: float  # Of the hardware.
    practical_gb_per_s: float | None = None  # NCCL's, where it differs.
    note: str = ""  # A remark for output, if they bind.


class Islands(NamedTuple):
    """Groups of GPUs that NVLink joins inside each group, but not between groups."""

    num_gpus: int  # Of each.
    way_out: Rate  # The total of an island's PCIe links.


class LimitWorld(NamedTuple):
    """Ranks on equal nodes, and the rates of their links; None for unused links."""

    layout: RankLayout
    network: Rate | None = None  # All network links of a node together.
    path: Rate | None = None  # The best of these network links.
    gpu: Rate | None = None  # The way out of each GPU to the others of its node.
    islands: Islands | None = None  # Where NVLink does not join all GPUs of a node.
    memory: Rate | None = None  # Reads and writes of a node's memory together.
    has_gpus: bool = False  # Ranks are on GPUs, and NCCL carries their bytes.
    has_nvls: bool = False  # The NVLink switches may reduce.
    unknown: tuple[str, ...] = ()  # Links without a known rate, as clauses.

    def lacking(self, reason: str) -> "LimitWorld":
        return self._replace(unknown=(*self.unknown, reason)) if reason else self


class Bound(NamedTuple):
    """The limit of one collective, or the reason that there is none."""

    collective: str
    limit: Limit | None  # None where nothing that may bind is known.
    reason: str = ""  # Why there is no limit.


# Kinds of switches that may do reductions.
_NVLS, _SHARP = "NVLS", "SHARP"
_BY_RATE = itemgetter(0)


def bound_of(world: LimitWorld, collective: str) -> Bound:
    """Return the limit of one collective.

    It remains an upper bound even if a link in ``world.unknown`` is slower.
    """
    if world.layout.num_ranks < 2:
        return Bound(collective, None, "one rank exchanges nothing")
    if collective not in COLLECTIVES:
        return Bound(collective, None, f"{collective} has no formula")
    found = list(_candidates(world, collective))
    if not found:
        reason = "; ".join(world.unknown) or "no link of these ranks is known"
        return Bound(collective, None, reason)
    gb_per_s, rate = min(found, key=_BY_RATE)
    note = "; ".join(_notes(world, collective, gb_per_s, rate))
    limit = Limit(gb_per_s, rate.link, note)
    if world.has_gpus:
        planned = _candidates(world, collective, is_practical=True)
        gb_per_s, rate = min(planned, key=_BY_RATE)
        limit = replace(limit, practical_gb_per_s=gb_per_s, practical_link=rate.link)
    return Bound(collective, limit)


def _candidates(
    world: LimitWorld,
    test: str,
    switches: Sequence[str] = (),
    *,
    is_practical: bool = False,
) -> Iterator[tuple[float, Rate]]:
    """Yield the bound set by each kind of link.

    ``switches`` are the kinds of switches that do reductions.
    """
    layout = world.layout

    def rate(of: Rate) -> float:
        is_other = is_practical and of.practical_gb_per_s is not None
        return (of.practical_gb_per_s or 0.0) if is_other else of.gb_per_s

    if layout.num_nodes > 1 and world.network is not None:
        # In sendrecv one rank of a node sends to the next node, over one path.
        links = (test == "sendrecv" and world.path) or world.network
        is_sharp = _SHARP in switches
        bound = network_bound(test, layout, rate(links), is_reduced_in_network=is_sharp)
        yield bound, links
    if layout.ranks_per_node > 1 and world.gpu is not None:
        is_nvls = _NVLS in switches and test == "all_reduce"
        own = rate(world.gpu)
        bound = nvls_bound(layout, own) if is_nvls else gpu_bound(test, layout, own)
        yield bound, world.gpu
    if world.islands is not None:
        # PCIe between islands is like the network between nodes.
        num_gpus, way_out = world.islands
        num_islands = layout.num_ranks // num_gpus
        among = RankLayout(layout.num_ranks, num_islands, num_gpus)
        yield network_bound(test, among, rate(way_out)), way_out
    if world.memory is not None:
        yield memory_bound(test, layout, rate(world.memory)), world.memory


def _notes(world: LimitWorld, test: str, gb_per_s: float, rate: Rate) -> Iterator[str]:
    if rate.note:
        yield rate.note
    if world.has_gpus and test == "all_reduce":
        best = gb_per_s
        for switches in ((_NVLS,), (_SHARP,), (_NVLS, _SHARP)):
            bound, link = min(_candidates(world, test, switches), key=_BY_RATE)
            if bound > best and (world.has_nvls or _NVLS not in switches):
                best = bound
                yield (
                    f"switches that reduce ({' and '.join(switches)}) allow {best:.4g} "
                    f"GB/s, set by {link.link}"
                )
    if world.has_gpus and world.network is not None and test in _TO_ALL:
        ring = world.network.gb_per_s
        if ring < gb_per_s:
            yield f"a pure ring reaches at most {ring:.4g} GB/s"


# GB/s of one link in one direction, payload, by compute capability. Source: NVIDIA's
# data sheets: P100 4 links and 160 GB/s both ways, V100 6 and 300, A100 12 and 600,
# RTX 3090 4 and 112.5, H100 18 and 900, B200 18 and 1800.
_NVLINKS = ((100, 50.0), (90, 25.0), (87, 25.0), (86, 14.0625), (70, 25.0), (60, 20.0))
# Source: AMD's data sheets: MI355X 153.6 GB/s a link both ways, MI300 128, MI250 100,
# MI100 and MI60 92.
_XGMI = (("95", 76.8), ("94", 64.0), ("90a", 50.0), ("910", 50.0), ("", 46.0))

_HOST_BRIDGE = 0x0600
# One lane of 2.5 GT/s, which virtual machines report for unknown links.
_NOTHING_GB_PER_S = 0.25
_MBIT_PER_GB = 8000.0
# Bonding modes without load sharing.
_NOT_SHARING = ("active-backup", "broadcast")
_MAX_NAMES = 3
_ROUNDING = 1e-9
_NAMES = {LinkKind.NVLINK: "NVLinks", LinkKind.XGMI: "xGMI links"}
_SWITCHES = ""  # Stands for all switches of a host, which are one to GPUs.
_SM_OF_NVLS = 90
_Ways = dict[str, tuple[str, tuple[NetPort, ...]]]


class PciFigures(NamedTuple):
    """The rate of a PCI link in one direction, in GB/s."""

    theory: float  # From the PCIe standard; infinite if unknown.
    practical: float  # NCCL's.

    def plus(self, other: "PciFigures") -> "PciFigures":
        return PciFigures(*map(sum, zip(self, other, strict=True)))

    def capped(self, other: "PciFigures | None") -> "PciFigures":
        return PciFigures(*map(min, self, other)) if other else self


def pci_figures(device: PciDevice) -> PciFigures | None:
    """Return the rate of the link above a device; None if unknown.

    A host bridge has no link above it, but NCCL counts one if a file lists it. The
    slowest PCIe link counts as unlimited, because virtual machines report it in place
    of the real one.
    """
    device = speeds.as_running(device)
    theory = speeds.pci_theory_gb_per_s(device.speed, device.width)
    if not device.speed:
        theory = device.gb_per_s
    if theory <= 0:
        return None
    practical = min(theory, speeds.pci_gb_per_s(device))
    is_bridge = device.class_code >> 8 == _HOST_BRIDGE
    is_limit = theory > _NOTHING_GB_PER_S and not is_bridge
    return PciFigures(theory if is_limit else math.inf, practical)


def find_ways(host: HostTopology) -> _Ways:
    """Return the usable ports, and the interfaces on top of them, by title.

    Usable ports are up and have a known speed. Each entry has a name such as ``bond0
    over eth0+eth1`` and the ports that carry its traffic: all ports of a bond that
    shares load, otherwise the fastest.
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
    # RDMA ports are numbered from 1; numbers of other interfaces are 0 or unknown.
    return [p for p in _find_hardware(host) if p.kind == "infiniband" or p.port > 0]


def _find_hardware(host: HostTopology) -> list[NetPort]:
    known = {device.bus_id for device in host.devices}
    # Virtual interfaces have no rate of their own and report a default.
    return [port for port in host.ports if port.bus_id in known and port.is_up]


def _find_spare(host: HostTopology) -> set[NetPort]:
    ways = find_ways(host)
    spare: set[NetPort] = set()
    for each in host.interfaces:
        if each.bonding in _NOT_SHARING and each.title in ways:
            below = (ways[title][1] for title in each.lower if title in ways)
            spare |= {p for ports in below for p in ports} - {*ways[each.title][1]}
    return spare


def known_gb_per_s(ports: Iterable[NetPort]) -> float:
    """Return the sum of the ports' own rates, ignoring their PCI links."""
    return sum(port.mbit_per_s / _MBIT_PER_GB for port in ports)


def _paths(host: HostTopology, ports: Iterable[NetPort]) -> dict[NetPort, PciFigures]:
    links = {device.bus_id: pci_figures(device) for device in host.devices}
    paths: dict[NetPort, PciFigures] = {}
    for port in ports:
        link = links.get(port.bus_id)
        if port.mbit_per_s > 0:
            rate = known_gb_per_s([port])
            paths[port] = PciFigures(rate, rate).capped(link)
        elif link and link.theory < math.inf:
            paths[port] = link
    return paths


def _total(host: HostTopology, paths: Mapping[NetPort, PciFigures]) -> PciFigures:
    """Return the total rate at which the ports reach the processors or GPUs."""
    firsts: dict[str, str] = {}
    for device in host.devices:
        firsts.setdefault(device.bus_id.partition(".")[0], device.bus_id)
    # Rates by device; the empty name gets the total.
    arriving: defaultdict[str, PciFigures] = defaultdict(lambda: PciFigures(0.0, 0.0))
    for port, figures in paths.items():
        # Functions of one device share its link.
        first = firsts.get(port.bus_id.partition(".")[0], "")
        arriving[first] = arriving[first].plus(figures)
    # GPUs and all bridges above them.
    ends = {gpu.bus_id for gpu in host.gpus}
    listed = {device.bus_id for device in host.devices}
    for device in reversed(host.devices):
        own, above = arriving[device.bus_id], ""
        if device.bus_id in ends:
            ends.add(device.parent)
        else:
            own = own.capped(pci_figures(device))
            above = device.parent if device.parent in listed else ""
        arriving[above] = arriving[above].plus(own)
    return arriving[""]


def _rate(names: str, figures: PciFigures, ports: Iterable[NetPort]) -> Rate:
    link = f"{names}, {figures.theory:.4g} GB/s"
    plain_gb_per_s = known_gb_per_s(ports)
    if figures.theory < plain_gb_per_s * (1 - _ROUNDING):
        link += f" (PCIe lets through no more of {plain_gb_per_s:.8g})"
    return Rate(link, *figures)


def _names(names: Sequence[str]) -> str:
    if len(names) <= _MAX_NAMES:
        return "+".join(names)
    return f"{len(names)} ports from {names[0]}"


def _way_out(gpu: GpuDevice, links: Sequence[Link]) -> Rate:
    """Return the total rate of a GPU's direct links; 0 GB/s if unknown."""
    # Some sources list a link at only one of its ends.
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
        # Virtual machines list more links than the GPU can have.
        count = min(count, speeds.max_nvlinks(gpu.sm) or count)
        each = next((rate for least, rate in _NVLINKS if gpu.sm >= least), 0.0)
    theory = reported or count * each
    together = own[0]._replace(num_links=count, gb_per_s=reported)
    link = f"{count} {_NAMES[own[0].kind]}, {theory:.4g} GB/s a GPU"
    return Rate(link, theory, min(theory, speeds.link_gb_per_s(together, gpu)))


class KnownRates(NamedTuple):
    """Rates given by the user; None means the hardware's rate."""

    network_gb_per_s: float | None = None  # All network links of a node together.
    gpu_gb_per_s: float | None = None  # The way out of each GPU.
    # The network interface that carries all bytes; empty for NCCL's choice.
    interface: str = ""


_NOTHING_GIVEN = KnownRates()


def world_of(
    host: HostTopology,
    num_nodes: int,
    ranks_per_node: int,
    given: KnownRates = _NOTHING_GIVEN,
) -> LimitWorld:
    """Return the links that limit ranks on nodes equal to this host.

    Rank i of a node has GPU i. If ranks must share GPUs, their rate is unknown.
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
        why = "memory bandwidth is unknown: ronde bench --limit measures it"
        return world.lacking(why)
    if ranks_per_node > len(host.gpus):
        return world.lacking(f"{ranks_per_node} ranks share {len(host.gpus)} GPUs")
    return with_gpus(world, host, host.gpus[:ranks_per_node])


def slowest(worlds: Sequence[LimitWorld]) -> LimitWorld:
    """Combine several worlds by taking the slowest link of each kind."""
    rates = {
        name: min(
            (rate for world in worlds if (rate := getattr(world, name)) is not None),
            key=lambda r: (r.way_out if isinstance(r, Islands) else r).gb_per_s,
            default=None,
        )
        for name in ("network", "path", "gpu", "islands")
    }
    return worlds[0]._replace(
        **rates,
        has_gpus=any(world.has_gpus for world in worlds),
        has_nvls=all(world.has_nvls for world in worlds),
        unknown=tuple(dict.fromkeys(why for world in worlds for why in world.unknown)),
    )


def with_network(
    world: LimitWorld, host: HostTopology, given: KnownRates
) -> LimitWorld:
    """Return a world with the network links of nodes equal to this host.

    These are the RDMA ports, or all hardware ports if there are none. The PCIe link is
    the upper bound for a port of unknown speed.
    """
    if given.network_gb_per_s is not None:
        link = f"as given, {given.network_gb_per_s:.4g} GB/s"
        return world._replace(network=Rate(link, given.network_gb_per_s))
    if name := given.interface:
        way, used = find_ways(host).get(name, ("", ()))
        if not used:
            why = f"{name} is virtual, or its speed is unknown; --link-rate gives it"
            return world.lacking(f"the link rate is not known: {why}")
        rate = _rate(way, _total(host, _paths(host, used)), used)
        return world._replace(network=rate, path=rate)
    spare = _find_spare(host)
    ports = find_rdma_ports(host) or [p for p in _find_hardware(host) if p not in spare]
    paths = _paths(host, ports)
    if not paths:
        why = "no network adapter with a rate was found; --link-rate gives it"
        return world.lacking(why)
    best = max(paths, key=lambda port: paths[port].theory)
    names = _names([port.title for port in paths])
    world = world._replace(
        network=_rate(names, _total(host, paths), paths),
        path=_rate(best.title, paths[best], [best]),
    )
    unknown = [port.title for port in ports if port.mbit_per_s <= 0]
    why = f"speed of {_names(unknown)} unknown: its PCIe link counts" if unknown else ""
    return world.lacking(why)


def _find_islands(used: Sequence[GpuDevice], links: Iterable[Link]) -> list[set[str]]:
    """Group GPUs that direct links connect, over any number of hops.

    A group that switches connect also contains ``_SWITCHES``.
    """
    islands = [{gpu.name} for gpu in used]
    for link in links:
        ends = {link.source, link.target}
        joined = [island for island in islands if island & ends]
        islands = [island for island in islands if not island & ends]
        islands.append(ends.union(*joined))
    return islands


def with_gpus(
    world: LimitWorld, host: HostTopology, used: Sequence[GpuDevice]
) -> LimitWorld:
    """Return a world with the links between the used GPUs of a host.

    Links to unused GPUs do not count. All direct links of a GPU are of the same kind.
    """
    known, names = {gpu.name for gpu in host.gpus}, {gpu.name for gpu in used}
    links = [
        link if link.target in known else link._replace(target=_SWITCHES)
        for link in host.links
        if link.kind in _NAMES
        and link.source in names
        and link.target not in {"", link.source, *(known - names)}
    ]
    islands = _find_islands(used, links)
    if len(islands) > 1:
        sizes = sorted(len(island - {_SWITCHES}) for island in islands)
        return _with_pcie(world, host, used, sizes)
    slowest = min((_way_out(gpu, links) for gpu in used), key=lambda way: way.gb_per_s)
    if not slowest.gb_per_s:
        return world.lacking("the source does not show how fast a GPU's links are")
    # AMD's files have the number of compute units in place of the capability.
    are_able = all(gpu.sm >= _SM_OF_NVLS and not gpu.gcn for gpu in used)
    has_switches = any(link.target == _SWITCHES for link in links)
    return world._replace(gpu=slowest, has_nvls=has_switches and are_able)


def _with_pcie(
    world: LimitWorld,
    host: HostTopology,
    used: Sequence[GpuDevice],
    sizes: Sequence[int],
) -> LimitWorld:
    """Return a world with PCIe links between islands of GPUs of these sorted sizes."""
    # The kernel shows the models of NVIDIA's GPUs, but not their NVLinks.
    is_kernel_alone = all(source.startswith(SYSFS) for source in host.sources)
    may_know = not (host.sources and is_kernel_alone)
    if not any(gpu.gcn or (may_know and gpu.sm != UNKNOWN) for gpu in used):
        return world.lacking("the source does not show whether NVLink joins the GPUs")
    bus_ids = {gpu.bus_id for gpu in used}
    devices = [device for device in host.devices if device.bus_id in bus_ids]
    found = filter(None, map(pci_figures, devices))
    links = [each for each in found if each.theory < math.inf]
    if len(links) < len(used):
        return world.lacking("the source does not show the PCIe link of a GPU")
    (theory, practical), size = min(links), sizes[0]
    if size < sizes[-1] and size > 1:
        why = f"direct links join {size} GPUs here and {sizes[-1]} there"
        return world.lacking(why)
    if size > 1:
        name = f"PCIe of {size} GPUs that have direct links, {theory * size:.4g} GB/s"
        way_out = Rate(name, theory * size, practical * size)
        return world._replace(islands=Islands(size, way_out))
    near = {device.node for device in devices}
    pairs = permutations((n for n in host.numa_nodes if n.number in near), 2)
    between = min((speeds.smp_gb_per_s(*pair) for pair in pairs), default=practical)
    name = f"PCIe, {theory:.4g} GB/s a GPU"
    if between < practical:
        name += f" (NCCL counts {between:g} between processors)"
    return world._replace(gpu=Rate(name, theory, min(between, practical)))
