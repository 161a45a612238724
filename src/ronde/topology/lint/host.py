"""Rules on one host: what is wrong with it, or with the file that describes it."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ronde.topology.cpu_sets import format_list
from ronde.topology.graph import (
    UNKNOWN,
    Diagnostic,
    GpuDevice,
    HostTopology,
    Level,
    Link,
    LinkKind,
    NetPort,
    PciDevice,
)
from ronde.topology.limits.host import pci_figures
from ronde.topology.paths.network import (
    Path,
    PathKind,
    Paths,
    bridges_above,
    find_paths,
)
from ronde.topology.paths.speeds import (
    LOCAL_GB_PER_S,
    max_nvlinks,
    nvlink_gb_per_s,
    pci_gb_per_s,
    pci_theory_gb_per_s,
    port_gb_per_s,
    smp_gb_per_s,
    xgmi_gb_per_s,
)

_TINY_GB_PER_S = 1.0
# GT/s of a lane, by compute capability.
_CHIP_SPEEDS = {60: 8, 61: 8, 70: 8, 75: 8, 80: 16, 86: 16, 89: 16, 90: 32, 100: 32}
_SWITCH_CLASS = 0x068000
# Compute capability of the last chip whose number of NVLinks is known.
_LATEST_SM = 103
_RATES = (1000, 2500, 5000, 10000, 25000, 40000, 50000, 56000, 100000, 200000, 400000)
_HIGHEST = 1_600_000
_VIRTUAL = ("virbr", "docker", "veth", "br-", "vnet", "tap", "tun", "lo", "dummy")
# Slower adapters seldom have GPUDirect RDMA.
_RDMA_MBIT_PER_S = 25_000
# Lowest model of Intel's family 6 with lanes of that many GT/s: Ice Lake, Sapphire
# Rapids.
_FIRST_MODELS = ((16.0, 0x6A), (32.0, 0x8F))


class HostView:
    """One host with what its elements are to each other."""

    def __init__(self, host: HostTopology) -> None:
        self.host = host
        self.paths: Paths = find_paths(host)
        self.devices = {device.bus_id: device for device in host.devices}
        # GPUs with a PCI device, and the ports of each adapter, by bus address.
        self.gpus = {gpu.bus_id: gpu for gpu in host.gpus if gpu.bus_id}
        self.ports: defaultdict[str, list[NetPort]] = defaultdict(list)
        for port in host.ports:
            if port.bus_id:
                self.ports[port.bus_id].append(port)
        # NVLink and xGMI, by the GPU they leave.
        self.links: defaultdict[str, list[Link]] = defaultdict(list)
        for link in host.links:
            if link.kind in (LinkKind.NVLINK, LinkKind.XGMI):
                self.links[link.source].append(link)
        # GPUs and adapters below each bridge.
        self.ends: defaultdict[str, list[PciDevice]] = defaultdict(list)
        for bus_id in dict.fromkeys([*self.gpus, *self.ports]):
            for bridge in bridges_above(self.devices, bus_id)[1:]:
                self.ends[bridge.bus_id].append(self.devices[bus_id])

    def node_of(self, bus_id: str) -> int:
        """Return the NUMA node of a device, its bridges' where it has none."""
        nodes = (device.node for device in bridges_above(self.devices, bus_id))
        return next((node for node in nodes if node != UNKNOWN), UNKNOWN)

    def gpus_on_bus(self) -> dict[str, GpuDevice]:
        """Return the GPUs but those in one package with their processor."""
        links = [link for link in self.host.links if link.kind is LinkKind.C2C]
        in_package = {end for link in links for end in (link.source, link.target)}
        return {n: gpu for n, gpu in self.gpus.items() if n not in in_package}

    def devices_that_matter(self) -> list[PciDevice]:
        known = self.gpus.keys() | self.ports.keys() | self.ends.keys()
        return [device for device in self.host.devices if device.bus_id in known]

    def num_links(self, gpu: str) -> int:
        own = self.links.get(gpu, ())
        return sum(link.num_links for link in own if link.target != gpu)

    def link_rate(self, name: str) -> float:
        """Return NCCL's GB/s for one link of a GPU; 0 where its chip is unknown."""
        gpu = self.gpus.get(name)
        if gpu and gpu.gcn:
            return xgmi_gb_per_s(gpu.gcn)
        return nvlink_gb_per_s(gpu.sm) if gpu and gpu.sm > 0 else 0.0

    def bus_rate(self, name: str) -> float:
        """Return the GB/s of the best way from one GPU to any other; 0 for none."""
        others = (gpu.name for gpu in self.host.gpus if gpu.name != name)
        ways = (self.paths.between(name, other) for other in others)
        return max((way.gb_per_s for way in ways if way), default=0.0)

    def ways(self) -> Iterator[tuple[str, list[tuple[NetPort, Path]]]]:
        """Yield GPUs with their ways to the ports that carry traffic between hosts."""
        ports = [port for port in self.host.ports if port.bus_id and port.is_up]
        fastest = max((port.mbit_per_s for port in ports), default=0)
        # The one for management is slower.
        fast = [port for port in ports if 2 * port.mbit_per_s >= fastest]
        for gpu in self.gpus:
            ways = [(p, way) for p in fast if (way := self.paths.between(gpu, p.name))]
            if ways:
                yield gpu, ways


class Hit(NamedTuple):
    """One element that a rule found to be wrong."""

    element: str
    severity: Level
    has: float  # GB/s, as in a ``Diagnostic``; ``{has}`` and ``{should}`` in sentences.
    should: float
    words: dict[str, object]  # For the other places in the rule's sentences.


def hit(
    element: str,
    severity: Level,
    has: float = 0.0,
    should: float = 0.0,
    **words: object,
) -> Hit:
    return Hit(element, severity, has, should, words)


class Rule(NamedTuple):
    """One thing that may be wrong with a host."""

    name: str  # In findings and options.
    meaning: str  # What it looks for, one line.
    what: str  # Three sentences with places for a hit's words.
    consequence: str
    remedy: str
    hits: Callable[[HostView], Iterator[Hit]]

    def find(self, view: HostView) -> Iterator[Diagnostic]:
        for each in self.hits(view):
            rates = {"has": each.has, "should": each.should}
            what, consequence, remedy = (
                text.format(**rates, **each.words)
                for text in (self.what, self.consequence, self.remedy)
            )
            found = self.name, each.severity, each.element, what, consequence, remedy
            yield Diagnostic(*found, each.has, each.should)


def rule(
    name: str, meaning: str, what: str, consequence: str, remedy: str
) -> Callable[[Callable[[HostView], Iterator[Hit]]], Rule]:
    """Make a rule of a function that yields its hits."""
    return lambda hits: Rule(name, meaning, what, consequence, remedy, hits)


def rate_loss(has_gb_per_s: float, should_gb_per_s: float) -> Level:
    """Return how bad it is that bandwidth is lost: an error where most of it is."""
    return Level.ERROR if has_gb_per_s < should_gb_per_s / 2 else Level.WARNING


def known_gb_per_s(device: PciDevice) -> float:
    """Return NCCL's figure for the link above a device; 0 if no source has one."""
    is_known = bool(device.speed and device.width > 0) or device.gb_per_s > 0
    return pci_gb_per_s(device) if is_known else 0.0


def _is_tiny(device: PciDevice) -> bool:
    return 0 < known_gb_per_s(device) < _TINY_GB_PER_S


def _gt_per_s(speed: str) -> float:
    """Return the number in front of GT/s; 0 where there is none."""
    match = re.match(r"(\d{1,3}(?:\.\d{1,3})?) ?GT/s", speed)
    return float(match[1]) if match else 0.0


def _link_words(device: PciDevice) -> str:
    """Return the link above a device in words: ``16.0 GT/s PCIe x16``."""
    if not device.speed and device.gb_per_s:
        return f"{device.gb_per_s:g} GB/s"
    speed = device.speed if _gt_per_s(device.speed) else f'"{device.speed}"'
    return f"{speed} x{device.width}" if device.width >= 0 else speed


def _loss_words(has: float, should: float) -> str:
    is_loss = 0 < has < should
    return f": {has:g} instead of {should:g} GB/s (NCCL's figures)" if is_loss else ""


@rule(
    "slow-bridge",
    "a bridge whose own link is slower than that of a device below it",
    "The link above the bridge is slower ({link}) than the link of a device below it.",
    "What leaves the bridge upwards, to the processor and to other bridges, shares "
    "{has:g} GB/s where one device has {should:g} (NCCL's figures).",
    "Compare with lspci -vv: reseat the board where LnkSta is below LnkCap, correct "
    "the file where it has less than LnkSta; nothing, where slot or switch are of an "
    "older generation.",
)
def _slow_bridges(view: HostView) -> Iterator[Hit]:
    roots = [_gt_per_s(each.speed) for each in view.host.devices if not each.parent]
    for bus_id, ends in view.ends.items():
        bridge = view.devices[bus_id]
        has = known_gb_per_s(bridge)
        # A port with a rate alone (hwloc) has that of the link below it, which is the
        # device's own.
        farther = [end for end in ends if bridge.speed or end.parent != bus_id]
        should = max(map(known_gb_per_s, farther), default=0.0)
        if 0 < has < should and not _is_tiny(bridge):
            # Slow by its generation alone, and no slot of the host has a later one.
            is_as_built = (
                2 * has >= should
                and all(end.width <= bridge.width for end in farther)
                and all(speed <= _gt_per_s(bridge.speed) for speed in roots)
            )
            severity = Level.NOTE if is_as_built else rate_loss(has, should)
            yield hit(bus_id, severity, has, should, link=_link_words(bridge))


@rule(
    "tiny-link",
    "a GPU's link below 1 GB/s, as virtual machines report it",
    "The link is reported as {link}, as by virtual machines that pass none of the real "
    "one on.",
    "NCCL plans with {has:.1f} GB/s and leaves the device aside as far as it can.",
    "Give NCCL_TOPO_FILE with the host's real speeds, or give the virtual root port "
    "x-speed and x-width; on bare metal reseat the card.",
)
def _tiny_links(view: HostView) -> Iterator[Hit]:
    gpus = [bus_id for bus_id in view.gpus_on_bus() if bus_id in view.devices]
    above = [b for b, ends in view.ends.items() if any(e.bus_id in gpus for e in ends)]
    for device in (view.devices[bus_id] for bus_id in [*gpus, *above]):
        if _is_tiny(device):
            has, link = known_gb_per_s(device), _link_words(device)
            yield hit(device.name, Level.ERROR, has, link=link)


@rule(
    "unknown-link-speed",
    "an empty link speed or no lanes, which NCCL takes for PCIe 3 x16",
    "The link speed is unknown ({link}).",
    "NCCL takes it for {has:g} GB/s, PCIe 3 where the speed is missing and 16 lanes "
    "where the width is; PCIe 4 x16 would be 24, PCIe 5 x16 48.",
    "Write what lspci -vv shows on the bare machine, such as "
    'link_speed="16.0 GT/s PCIe" link_width="16".',
)
def _unknown_speeds(view: HostView) -> Iterator[Hit]:
    for device in view.devices_that_matter():
        # A source without either leaves it to others; an empty speed or no lanes are
        # a wrong answer.
        is_given = device.width >= 0 or device.speed
        is_known = _gt_per_s(device.speed) and device.width > 0
        if is_given and not is_known and not device.gb_per_s:
            has, link = pci_gb_per_s(device), _link_words(device)
            yield hit(device.name, Level.WARNING, has, link=link)


@rule(
    "trained-down",
    "a link that runs below what both of its ends can do",
    "The link runs at {now} and both ends can do {link}.",
    "It carries {has:.4g} of {should:.4g} GB/s (PCIe's limit one way).",
    "{remedy}",
)
def _trained_down(view: HostView) -> Iterator[Hit]:
    for device in view.devices_that_matter():
        now = device._replace(
            speed=device.speed_now or device.speed,
            width=device.width_now if device.width_now > 0 else device.width,
        )
        has, should = (
            pci_theory_gb_per_s(each.speed, each.width) or each.gb_per_s
            for each in (now, device)
        )
        if not 0 < has < should:
            continue
        leads_to_gpu = device.bus_id in view.gpus or any(
            end.parent == device.bus_id and end.bus_id in view.gpus
            for end in view.ends.get(device.bus_id, ())
        )
        severity = rate_loss(has, should)
        remedy = "Reseat the card or its riser, look for errors in dmesg (AER), and "
        remedy += "look at the slot's setting in the firmware."
        if leads_to_gpu and now.width >= device.width:
            severity = Level.NOTE
            remedy = "Look again under load: GPUs lower the speed at rest."
        words = {"now": _link_words(now), "link": _link_words(device)}
        yield hit(device.name, severity, has, should, **words, remedy=remedy)


@rule(
    "old-slot",
    "a GPU's link of an older generation than its chip's",
    "The link is reported as {link}, and the chip (sm {sm}) can do {chip} GT/s.",
    "It has {has:g} GB/s where {should:g} are possible (NCCL's figures).",
    "Nothing, where slot or processor are of that generation; else look at the slot's "
    "setting in the firmware, or correct the file.",
)
def _old_slots(view: HostView) -> Iterator[Hit]:
    for bus_id, gpu in view.gpus_on_bus().items():
        device = view.devices.get(bus_id)
        if device is None or gpu.gcn or _is_tiny(device):
            continue
        chip, speed = _CHIP_SPEEDS.get(gpu.sm, 0), _gt_per_s(device.speed)
        if 0 < speed < chip:
            has = known_gb_per_s(device)
            words = {"link": _link_words(device), "sm": gpu.sm, "chip": chip}
            yield hit(bus_id, Level.NOTE, has, has * chip / speed, **words)


@rule(
    "link-to-itself",
    "NVLink or xGMI that leads from a GPU to itself",
    "{num} links between GPUs lead from the GPU to itself.",
    "They connect it to no other GPU{loss}.",
    "Write the bus address of the GPU at the other end as target; nvidia-smi topo -m "
    "and nvidia-smi nvlink -R show it.",
)
def _to_itself(view: HostView) -> Iterator[Hit]:
    for name, links in view.links.items():
        own = [link for link in links if link.target == name]
        if own:
            num = sum(link.num_links for link in own)
            has, should = view.bus_rate(name), num * view.link_rate(name)
            loss = _loss_words(has, should)
            yield hit(name, Level.ERROR, has, should, num=num, loss=loss)


@rule(
    "gpu-listed-as-switch",
    "NVLink to a GPU whose class is given as that of a switch",
    "NVLinks lead to {num_gpus} GPUs whose class is given as that of an NVLink switch "
    "(0x068000).",
    "NCCL takes all {num} for links into one switch and adds them up.",
    'Write one line, target="fffffff:ff:ff.0", tclass="0x068000" and the GPU\'s own '
    'number of links, where there are switches; else tclass="0x030200".',
)
def _as_switches(view: HostView) -> Iterator[Hit]:
    for name, links in view.links.items():
        to_gpus = [link for link in links if link.target in view.gpus]
        wrong = [link for link in to_gpus if link.target_class == _SWITCH_CLASS]
        if wrong:
            num = sum(link.num_links for link in wrong)
            yield hit(name, Level.ERROR, num_gpus=len(wrong), num=num)


@rule(
    "too-many-nvlinks",
    "more NVLinks than the chip has",
    "{num} NVLinks are listed, and the chip (sm {sm}) has {most}.",
    "NCCL plans with {has:.1f} GB/s{cap}, where {should:.1f} exist, and chooses "
    "channels and algorithms by that.",
    "Let the counts of one GPU add up to what nvidia-smi nvlink -s shows.",
)
def _too_many(view: HostView) -> Iterator[Hit]:
    for gpu in view.gpus.values():
        num, most = view.num_links(gpu.name), max_nvlinks(gpu.sm)
        # Of later chips nobody knows yet how many they have.
        is_known = 0 < gpu.sm <= _LATEST_SM and not gpu.gcn
        if is_known and 0 < most < num:
            has, should = (n * nvlink_gb_per_s(gpu.sm) for n in (num, most))
            is_capped = has > LOCAL_GB_PER_S
            cap = f", over its cap of {LOCAL_GB_PER_S:g}" if is_capped else ""
            words = {"num": num, "sm": gpu.sm, "most": most, "cap": cap}
            yield hit(gpu.name, Level.ERROR, has, should, **words)


@rule(
    "gpu-without-links",
    "a GPU without NVLink or xGMI on a host where others have it",
    "The GPU has no links to other GPUs, and others of this host have.",
    "Every ring through it falls back to the PCI bus{loss}.",
    "Look at nvidia-smi nvlink -s and, with switches, at the fabric manager's log; "
    "reset or replace the GPU, or leave it out.",
)
def _missing(view: HostView) -> Iterator[Hit]:
    linked = {gpu.name for gpu in view.host.gpus if view.num_links(gpu.name)}
    # Some sources have them as ``NV4`` of a pair.
    bonded = [each for each in view.host.relations if each.path.startswith("NV")]
    linked |= {end for each in bonded for end in (each.source, each.target)}
    rates = [view.num_links(name) * view.link_rate(name) for name in linked]
    for gpu in view.host.gpus:
        if linked and gpu.name not in linked:
            has, should = view.bus_rate(gpu.name), max(rates)
            loss = _loss_words(has, should)
            yield hit(gpu.name, Level.ERROR, has, should, loss=loss)


@rule(
    "uneven-nvlinks",
    "a GPU with fewer NVLinks than others of its kind",
    "{num} NVLinks are up, and other GPUs of this host have {most}.",
    "Collectives run at the slowest GPU's rate{loss}.",
    "Look at nvidia-smi nvlink -s and -e for links that are down or count errors, and "
    "reset the GPU.",
)
def _uneven(view: HostView) -> Iterator[Hit]:
    totals = {
        gpu.name: num
        for gpu in view.gpus.values()
        if not gpu.gcn and (num := view.num_links(gpu.name))
    }
    kinds = {view.gpus[name].sm for name in totals}
    most = max(totals.values(), default=0)
    for name, num in totals.items():
        if num < most and len(kinds) == 1:
            has, should = (n * view.link_rate(name) for n in (num, most))
            words = {"num": num, "most": most, "loss": _loss_words(has, should)}
            yield hit(name, rate_loss(num, most), has, should, **words)


@rule(
    "no-peer-access",
    "GPUs that may not reach each other's memory",
    "The driver does not let it reach the memory of other GPUs ({counts}).",
    "NCCL copies through the host's shared memory instead.",
    "CNS: the processor's chipset does not; TNS: no bus between them does; GNS: this "
    "kind of GPU does not. In a virtual machine look whether the host passes peer "
    "access on; switch ACS off on the bridges.",
)
def _no_peer_access(view: HostView) -> Iterator[Hit]:
    bad: dict[str, Counter[str]] = {}
    for each in view.host.relations:
        if each.peer not in ("", "OK", "X") and each.source != each.target:
            bad.setdefault(each.source, Counter())[each.peer] += 1
    for name, words in bad.items():
        counts = ", ".join(f"{word} for {num}" for word, num in sorted(words.items()))
        yield hit(name, Level.WARNING, counts=counts)


@rule(
    "nic-faster-than-link",
    "a network adapter that carries more than its PCI link",
    "The adapter's {num} port(s) carry {should:.4g} GB/s, its PCI link ({link}) "
    "{limit}.",
    "{cost}",
    "{remedy}",
)
def _faster_than_link(view: HostView) -> Iterator[Hit]:
    for bus_id, ports in view.ports.items():
        device = view.devices.get(bus_id)
        figures = pci_figures(device) if device else None
        if device is None or figures is None:
            continue
        should = sum(port_gb_per_s(p) for p in ports if _has_likely_rate(p) and p.is_up)
        severity, has = rate_loss(figures.theory, should), figures.theory
        limit = f"{has:.4g} (PCIe's limit)"
        cost = f"The network is held to {has:.4g} GB/s through this adapter; NCCL "
        cost += f"plans with {known_gb_per_s(device):g}."
        remedy = "Move the adapter to a wider or newer slot, or use fewer of its "
        remedy += "ports; correct the file where adapters with links of their own are "
        remedy += "listed as one."
        if has == math.inf:
            # A link that is none, as virtual machines report it.
            severity, has = Level.WARNING, figures.practical
            limit = f"counts for {has:g} with NCCL, and is none that limits them: the "
            limit += "adapter is listed as a host bridge, or with the slowest link "
            limit += "there is"
            cost = f"NCCL plans with {has:g} GB/s through this adapter, whatever it "
            cost += "carries."
            remedy = "Correct the file: a link of its own for each adapter, as the "
            remedy += "bare machine has it."
        if has < should:
            words = {"num": len(ports), "link": f"{device.speed} x{device.width}"}
            words |= {"limit": limit, "cost": cost, "remedy": remedy}
            yield hit(bus_id, severity, has, should, **words)


@rule(
    "odd-nic-speed",
    "a port's speed that no hardware has",
    "Its speed is given as {mbit_per_s} Mb/s, which no port has{guess}.",
    "NCCL plans with {planned:g} GB/s for the port, whatever it has; {nearest} Mb/s "
    "would be {meant:g}.",
    "Write the rate in /sys/class/infiniband/*/ports/1/rate, in Mb/s.",
)
def _odd_speeds(view: HostView) -> Iterator[Hit]:
    for port in view.host.ports:
        if port.bus_id and port.mbit_per_s > 0 and not _has_likely_rate(port):
            # What is beyond all hardware was written in kb/s.
            is_huge = port.mbit_per_s > _HIGHEST
            wanted = port.mbit_per_s / 1000 if is_huge else port.mbit_per_s
            nearest = min(_RATES, key=lambda rate: abs(rate - wanted))
            has, should = port_gb_per_s(port), nearest / 8000
            yield hit(
                port.name,
                Level.WARNING,
                *((0.0, 0.0) if is_huge else (has, should)),
                mbit_per_s=port.mbit_per_s,
                guess=": it looks like kb/s" if is_huge else "",
                planned=has,
                nearest=nearest,
                meant=should,
            )


def _has_likely_rate(port: NetPort) -> bool:
    """Whether hardware has the rate, alone or as some links that are bound together."""
    return 0 < port.mbit_per_s <= _HIGHEST and any(
        port.mbit_per_s == rate * num for rate in _RATES for num in (1, 2, 3, 4)
    )


@rule(
    "nic-down",
    "a port of an adapter without link",
    "The port has no link.",
    "NCCL does not use it: the node has {rate} less.",
    "Look at ibstat or ip link, at the cable and at the switch's port.",
)
def _down(view: HostView) -> Iterator[Hit]:
    up_at = {port.bus_id for port in view.host.ports if port.is_up}
    for port in view.host.ports:
        # Of two ports often one has no cable, and Ethernet for management none.
        is_loss = port.kind == "infiniband" and port.bus_id not in up_at
        rate = f"{port_gb_per_s(port):g} GB/s" if port.mbit_per_s > 0 else "its rate"
        if port.bus_id and not port.is_up:
            yield hit(port.name, Level.WARNING if is_loss else Level.NOTE, rate=rate)


@rule(
    "virtual-nic",
    "a virtual interface among the network adapters",
    "A virtual interface is among the network adapters.",
    "NCCL may choose it, and other hosts cannot be reached over it.",
    "Leave it out: NCCL_SOCKET_IFNAME=^lo,docker,veth,virbr, or name the right one.",
)
def _virtual(view: HostView) -> Iterator[Hit]:
    for port in view.host.ports:
        if not port.bus_id and port.title.startswith(_VIRTUAL):
            yield hit(port.name, Level.NOTE)


@rule(
    "no-gpudirect",
    "a GPU whose memory adapters cannot reach though they could others'",
    "GPUDirect RDMA is off for the GPU (gdr 0), and on for adapters.",
    "Every byte to and from the network is copied through the host's memory and "
    "crosses the PCI bus twice.",
    "Load nvidia_peermem or use a kernel and driver with DMA-BUF (for AMD: a kernel "
    "with peer memory), and write the file anew.",
)
def _no_gpudirect(view: HostView) -> Iterator[Hit]:
    has_any = any(port.gdr == 1 for port in view.host.ports)
    for gpu in view.host.gpus:
        if has_any and gpu.gdr == 0:
            yield hit(gpu.name, Level.WARNING)


@rule(
    "far-nic",
    "a GPU for which NCCL prefers a far network adapter to a near one",
    "NCCL chooses {chosen}, and {port} is nearer ({kind}).",
    "It prefers {should:g} GB/s to {has:g}, and beyond PXB there is no GPUDirect RDMA: "
    "the data goes through the host's memory.",
    "Look why the way to the near adapter is slow (slow-bridge, trained-down, "
    "odd-nic-speed), or name the adapters in NCCL_IB_HCA.",
)
def _far_nics(view: HostView) -> Iterator[Hit]:
    for gpu, ways in view.ways():
        port, nearest = min(ways, key=lambda way: (way[1].kind, -way[1].gb_per_s))
        far_port, chosen = min(ways, key=lambda way: (-way[1].gb_per_s, way[1].kind))
        if nearest.kind <= PathKind.PXB < chosen.kind:
            has, should = nearest.gb_per_s, chosen.gb_per_s
            far = f"{far_port.title} ({chosen.kind})"
            words = {"chosen": far, "port": port.title, "kind": nearest.kind}
            yield hit(gpu, rate_loss(has, should), has, should, **words)


@rule(
    "nic-behind-processor",
    "a GPU without a network adapter on its own PCI switch",
    "Its nearest network adapter is behind {place} processor ({kind}).",
    "Up to {has:g} GB/s (NCCL's figure), and by default NCCL uses GPUDirect RDMA up to "
    "PXB alone: the data goes through the host's memory.",
    "Write the switches in, where a virtual machine's file leaves them out; else place "
    "adapters at every socket, or try NCCL_NET_GDR_LEVEL=PHB for those at its own.",
)
def _through_processor(view: HostView) -> Iterator[Hit]:
    for gpu, ways in view.ways():
        fastest = max(port.mbit_per_s for port, _ in ways)
        way = min((way for _, way in ways), key=lambda way: (way.kind, -way.gb_per_s))
        is_slow = 0 < fastest < _RDMA_MBIT_PER_S
        place = "another socket's" if way.kind > PathKind.PHB else "its own"
        if way.kind > PathKind.PXN and not is_slow:
            yield hit(gpu, Level.NOTE, way.gb_per_s, place=place, kind=way.kind)


@rule(
    "nic-without-gpu",
    "a network adapter that is near no GPU while others are",
    "No GPU is near the adapter (PIX or PXB), and other adapters have one.",
    "NCCL uses it for no GPU, or without GPUDirect RDMA.",
    "Nothing, where it is for storage or management; else move it to a switch with "
    "GPUs, and leave it out in NCCL_IB_HCA.",
)
def _without_gpus(view: HostView) -> Iterator[Hit]:
    near: dict[str, bool] = {}
    for _, ways in view.ways():
        for port, way in ways:
            near[port.name] = near.get(port.name, False) or way.kind <= PathKind.PXB
    for name, is_near in near.items():
        if not is_near and any(near.values()):
            yield hit(name, Level.NOTE)


@rule(
    "no-numa-node",
    "a device or processor whose NUMA node is -1",
    "{what}",
    "NCCL takes all such devices as next to one processor, and nothing is bound near "
    "them: traffic may cross the sockets' link unseen.",
    "Switch NUMA on in the firmware, or give the virtual machine its host's nodes; in "
    "a file write the numaid.",
)
def _no_node(view: HostView) -> Iterator[Hit]:
    nodes = view.host.numa_nodes
    for node in nodes:
        if node.number < 0:
            yield hit(node.name, Level.WARNING, what="The node's own number is -1.")
    for bus_id in [*view.gpus, *view.ports]:
        is_lost = bus_id in view.devices and view.node_of(bus_id) == UNKNOWN
        if is_lost and sum(1 for node in nodes if node.cpus) > 1:
            what = "The device's NUMA node is unknown (-1)."
            yield hit(bus_id, Level.WARNING, what=what)


@rule(
    "shared-cores",
    "cores that two NUMA nodes claim",
    "Its CPUs {cpus} are another node's, too.",
    "The threads of all these nodes' devices are bound to the same CPUs, far from most "
    "of the devices.",
    "Write each node's own cores; /sys/devices/system/node/node*/cpumap has them.",
)
def _shared_cores(view: HostView) -> Iterator[Hit]:
    counts = Counter(cpu for node in view.host.numa_nodes for cpu in node.cpus)
    for node in view.host.numa_nodes:
        if own := [cpu for cpu in node.cpus if counts[cpu] > 1]:
            yield hit(node.name, Level.WARNING, cpus=format_list(own))


@rule(
    "uneven-cores",
    "one NUMA node with another number of cores",
    "It has {num} CPUs ({cpus}), and every other node has {usual}.",
    "Its devices have another share of CPUs; in a file it is mostly a digit too few in "
    "the mask.",
    "Compare with /sys/devices/system/node/node*/cpumap.",
)
def _uneven_cores(view: HostView) -> Iterator[Hit]:
    nodes = [node for node in view.host.numa_nodes if node.cpus]
    counts = Counter(len(node.cpus) for node in nodes)
    if len(nodes) < 3 or len(counts) != 2 or 1 not in counts.values():
        return
    usual = counts.most_common(1)[0][0]
    (node,) = (node for node in nodes if len(node.cpus) != usual)
    words = {"num": len(node.cpus), "cpus": format_list(node.cpus), "usual": usual}
    yield hit(node.name, Level.NOTE, 0.0, 0.0, **words)


@rule(
    "implausible-processor",
    "a processor that is too old for the links below it",
    "The processor is given as Intel family {family} model {model}, {why}.",
    "One of both is wrong, and NCCL believes both:{between} the given speed.",
    "Let the virtual machine see the host's model (QEMU: -cpu host), or correct "
    "modelid or link_speed in the file; from Sapphire Rapids on NCCL counts 22 or 40 "
    "GB/s between sockets.",
)
def _old_processors(view: HostView) -> Iterator[Hit]:
    roots = (_gt_per_s(each.speed) for each in view.host.devices if not each.parent)
    speed = max(roots, default=0.0)
    for node in view.host.numa_nodes if view.gpus else ():
        if node.vendor != "GenuineIntel" or node.model < 0:
            continue
        if node.family not in (6, UNKNOWN):
            why = "which no host of such GPUs has"
        elif any(speed >= r and node.model < m for r, m in _FIRST_MODELS):
            why = f"and links of {speed:g} GT/s below it, which it lacks"
        else:
            continue
        others = [o for o in view.host.numa_nodes if o.number != node.number and o.cpus]
        rate = min((smp_gb_per_s(node, other) for other in others), default=0.0)
        between = f" {rate:g} GB/s between sockets and" if rate else ""
        words = {"family": node.family, "model": node.model, "why": why}
        yield hit(node.name, Level.WARNING, rate, 0.0, between=between, **words)


@rule(
    "one-sided-host",
    "all GPUs and adapters near one of several sockets",
    "All GPUs and network adapters are near one of {num} sockets.",
    "The other sockets' memory and cores reach them over the link between sockets "
    "alone.",
    "Nothing, where the machine is built so; else look whether the virtual machine "
    "hides the second root. Bind to it: ronde run --bind numa.",
)
def _one_sided(view: HostView) -> Iterator[Hit]:
    packages = {node.package for node in view.host.numa_nodes if node.cpus} - {UNKNOWN}
    ends = [bus_id for bus_id in [*view.gpus, *view.ports] if bus_id in view.devices]
    nodes = {view.node_of(bus_id) for bus_id in ends}
    is_one = len(nodes) == 1 and UNKNOWN not in nodes
    if len(packages) > 1 and len(view.gpus) > 1 and is_one:
        yield hit(f"numa/{nodes.pop()}", Level.NOTE, num=len(packages))


@rule(
    "odd-source",
    "what was odd in a source",
    "{remark}",
    "It was read all the same; what is shown here may not be what the source meant.",
    "Correct the source, or make it anew.",
)
def _remarks(view: HostView) -> Iterator[Hit]:
    return (hit("source", Level.NOTE, remark=each) for each in view.host.remarks)


@rule(
    "mixed-gpus",
    "GPUs of several kinds in one host",
    "It is {kind}, and most GPUs of the host are {usual}.",
    "A job over all runs at the slowest GPU's rate.",
    "Leave it out with CUDA_VISIBLE_DEVICES where that matters.",
)
def _mixed_gpus(view: HostView) -> Iterator[Hit]:
    kinds = {
        gpu.name: f"gfx{gpu.gcn}" if gpu.gcn else f"sm {gpu.sm}"
        for gpu in view.host.gpus
        if gpu.sm > 0
    }
    usual = Counter(kinds.values()).most_common(1)[0][0] if kinds else ""
    for name, kind in kinds.items():
        if kind != usual:
            yield hit(name, Level.NOTE, kind=kind, usual=usual)


HOST_RULES = tuple(each for each in list(vars().values()) if isinstance(each, Rule))


def lint_host(host: HostTopology) -> tuple[Diagnostic, ...]:
    """Return what is wrong with a host, or looks so, in the order of the rules."""
    view = HostView(host)
    return tuple(finding for rule in HOST_RULES for finding in rule.find(view))
