"""Rules on network adapters, NUMA nodes and processors, and on names."""

import math
from collections import Counter
from collections.abc import Iterator

from ronde.topology.cpu_sets import format_list
from ronde.topology.graph import UNKNOWN, Level, NetPort
from ronde.topology.limits.host import pci_figures
from ronde.topology.lint.view import (
    Hit,
    HostView,
    gt_per_s,
    known_gb_per_s,
    rate_loss,
    rule,
)
from ronde.topology.paths.network import Path, PathKind
from ronde.topology.paths.speeds import port_gb_per_s, smp_gb_per_s

_RATES = (1000, 2500, 5000, 10000, 25000, 40000, 50000, 56000, 100000, 200000, 400000)
_HIGHEST = 1_600_000
_VIRTUAL = ("virbr", "docker", "veth", "br-", "vnet", "tap", "tun", "lo", "dummy")
# Slower adapters seldom have GPUDirect RDMA.
_RDMA_MBIT_PER_S = 25_000
# Lowest model of Intel's family 6 with lanes of that many GT/s: Ice Lake, Sapphire
# Rapids.
_FIRST_MODELS = ((16.0, 0x6A), (32.0, 0x8F))


@rule(
    "nic-faster-than-link",
    "a network adapter that carries more than its PCI link",
    "Move the adapter to a wider or newer slot, or use fewer of its ports; correct the "
    "file where adapters with links of their own are listed as one.",
)
def _faster_than_link(view: HostView) -> Iterator[Hit]:
    for bus_id, ports in view.ports.items():
        device = view.devices.get(bus_id)
        figures = pci_figures(device) if device else None
        if device is None or figures is None:
            continue
        should = sum(port_gb_per_s(p) for p in ports if _has_likely_rate(p) and p.is_up)
        rates = f"The adapter's {len(ports)} port(s) carry {should:.4g} GB/s, its "
        rates += f"PCI link ({device.speed} x{device.width})"
        if (has := figures.theory) < should:
            yield Hit(
                device.name,
                rate_loss(has, should),
                f"{rates} {has:.4g} (PCIe's limit).",
                f"The network is held to {has:.4g} GB/s through this adapter; NCCL "
                f"plans with {known_gb_per_s(device):g}.",
                has,
                should,
            )
        elif has == math.inf and (has := figures.practical) < should:
            # A link that is none, as virtual machines report it.
            yield Hit(
                device.name,
                Level.WARNING,
                f"{rates} counts for {has:g} with NCCL, and is none that limits them: "
                "the adapter is listed as a host bridge, or with the slowest link "
                "there is.",
                f"NCCL plans with {has:g} GB/s through this adapter, whatever it "
                "carries.",
                has,
                should,
                "Correct the file: a link of its own for each adapter, as the bare "
                "machine has it.",
            )


@rule(
    "odd-nic-speed",
    "a port's speed that no hardware has",
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
            yield Hit(
                port.name,
                Level.WARNING,
                f"Its speed is given as {port.mbit_per_s} Mb/s, which no port has"
                + (": it looks like kb/s." if is_huge else "."),
                f"NCCL plans with {has:g} GB/s for the port, whatever it has; "
                f"{nearest} Mb/s would be {should:g}.",
                *((0.0, 0.0) if is_huge else (has, should)),
            )


@rule(
    "nic-without-speed",
    "a port's speed below zero, which NCCL takes for 10 Gb/s",
    "Look whether the link is up; else write its speed into the file.",
)
def _no_speed(view: HostView) -> Iterator[Hit]:
    for port in view.host.ports:
        if port.mbit_per_s < 0:
            yield Hit(
                port.name,
                Level.WARNING if port.is_up else Level.NOTE,
                f"Its speed is given as {port.mbit_per_s}.",
                "NCCL takes it for 10000 Mb/s, 1.25 GB/s.",
                port_gb_per_s(port),
            )


@rule(
    "nic-down",
    "a port of an adapter without link",
    "Look at ibstat or ip link, at the cable and at the switch's port.",
)
def _down(view: HostView) -> Iterator[Hit]:
    up_at = {port.bus_id for port in view.host.ports if port.is_up}
    for port in view.host.ports:
        # Of two ports often one has no cable, and Ethernet for management none.
        is_loss = port.kind == "infiniband" and port.bus_id not in up_at
        rate = f"{port_gb_per_s(port):g} GB/s" if port.mbit_per_s > 0 else "its rate"
        if port.bus_id and not port.is_up:
            yield Hit(
                port.name,
                Level.WARNING if is_loss else Level.NOTE,
                "The port has no link.",
                f"NCCL does not use it: the node has {rate} less.",
            )


@rule(
    "virtual-nic",
    "a virtual interface among the network adapters",
    "Leave it out: NCCL_SOCKET_IFNAME=^lo,docker,veth,virbr, or name the right one.",
)
def _virtual(view: HostView) -> Iterator[Hit]:
    for port in view.host.ports:
        if not port.bus_id and port.title.startswith(_VIRTUAL):
            yield Hit(
                port.name,
                Level.NOTE,
                "A virtual interface is among the network adapters.",
                "NCCL may choose it, and other hosts cannot be reached over it.",
            )


@rule(
    "no-gpudirect",
    "a GPU whose memory adapters cannot reach though they could others'",
    "Load nvidia_peermem or use a kernel and driver with DMA-BUF (for AMD: a kernel "
    "with peer memory), and write the file anew.",
)
def _no_gpudirect(view: HostView) -> Iterator[Hit]:
    has_any = any(port.gdr == 1 for port in view.host.ports)
    for gpu in view.host.gpus:
        if has_any and gpu.gdr == 0:
            yield Hit(
                gpu.name,
                Level.WARNING,
                "GPUDirect RDMA is off for the GPU (gdr 0), and on for adapters.",
                "Every byte to and from the network is copied through the host's "
                "memory and crosses the PCI bus twice.",
            )


def _has_likely_rate(port: NetPort) -> bool:
    """Whether hardware has the rate, alone or as some links that are bound together."""
    return 0 < port.mbit_per_s <= _HIGHEST and any(
        port.mbit_per_s == rate * num for rate in _RATES for num in (1, 2, 3, 4)
    )


@rule(
    "far-nic",
    "a GPU for which NCCL prefers a far network adapter to a near one",
    "Look why the way to the near adapter is slow (slow-bridge, trained-down, "
    "odd-nic-speed), or name the adapters in NCCL_IB_HCA.",
)
def _far_nics(view: HostView) -> Iterator[Hit]:
    for gpu, ways in _ways(view):
        port, nearest = min(ways, key=lambda way: (way[1].kind, -way[1].gb_per_s))
        far_port, chosen = min(ways, key=lambda way: (-way[1].gb_per_s, way[1].kind))
        if nearest.kind <= PathKind.PXB < chosen.kind:
            has, should = nearest.gb_per_s, chosen.gb_per_s
            yield Hit(
                gpu,
                rate_loss(has, should),
                f"NCCL chooses {far_port.title} ({chosen.kind.name}), and "
                f"{port.title} is nearer ({nearest.kind.name}).",
                f"It prefers {should:g} GB/s to {has:g}, and beyond PXB there is no "
                "GPUDirect RDMA: the data goes through the host's memory.",
                has,
                should,
            )


@rule(
    "nic-behind-processor",
    "a GPU without a network adapter on its own PCI switch",
    "Write the switches in, where a virtual machine's file leaves them out; else place "
    "adapters at every socket, or try NCCL_NET_GDR_LEVEL=PHB for those at its own.",
)
def _through_processor(view: HostView) -> Iterator[Hit]:
    for gpu, ways in _ways(view):
        fastest = max(port.mbit_per_s for port, _ in ways)
        way = min((way for _, way in ways), key=lambda way: (way.kind, -way.gb_per_s))
        is_slow = 0 < fastest < _RDMA_MBIT_PER_S
        place = "another socket's" if way.kind > PathKind.PHB else "its own"
        if way.kind > PathKind.PXN and not is_slow:
            yield Hit(
                gpu,
                Level.NOTE,
                f"Its nearest network adapter is behind {place} processor "
                f"({way.kind.name}).",
                f"Up to {way.gb_per_s:g} GB/s (NCCL's figure), and by default NCCL "
                "uses GPUDirect RDMA up to PXB alone: the data goes through the host's "
                "memory.",
                way.gb_per_s,
            )


@rule(
    "nic-without-gpu",
    "a network adapter that is near no GPU while others are",
    "Nothing, where it is for storage or management; else move it to a switch with "
    "GPUs, and leave it out in NCCL_IB_HCA.",
)
def _without_gpus(view: HostView) -> Iterator[Hit]:
    near: dict[str, bool] = {}
    for _, ways in _ways(view):
        for port, way in ways:
            near[port.name] = near.get(port.name, False) or way.kind <= PathKind.PXB
    for name, is_near in near.items():
        if not is_near and any(near.values()):
            yield Hit(
                name,
                Level.NOTE,
                "No GPU is near the adapter (PIX or PXB), and other adapters have one.",
                "NCCL uses it for no GPU, or without GPUDirect RDMA.",
            )


def _ways(view: HostView) -> Iterator[tuple[str, list[tuple[NetPort, Path]]]]:
    """Yield GPUs with their ways to the ports that carry traffic between hosts.

    Those are hardware, up, and at least half as fast as the fastest: not the one for
    management.
    """
    ports = [port for port in view.host.ports if port.bus_id and port.is_up]
    fastest = max((port.mbit_per_s for port in ports), default=0)
    fast = [port for port in ports if 2 * port.mbit_per_s >= fastest]
    for gpu in view.gpus:
        ways = [(p, way) for p in fast if (way := view.paths.between(gpu, p.name))]
        if ways:
            yield gpu, ways


@rule(
    "no-numa-node",
    "a device or processor whose NUMA node is -1",
    "Switch NUMA on in the firmware, or give the virtual machine its host's nodes; in "
    "a file write the numaid.",
)
def _no_node(view: HostView) -> Iterator[Hit]:
    nodes = view.host.numa_nodes
    consequence = (
        "NCCL takes all such devices as next to one processor, and nothing is bound "
        "near them: traffic may cross the sockets' link unseen."
    )
    for node in nodes:
        if node.number < 0:
            what = "The node's own number is -1."
            yield Hit(node.name, Level.WARNING, what, consequence)
    for bus_id in [*view.gpus, *view.ports]:
        is_lost = bus_id in view.devices and view.node_of(bus_id) == UNKNOWN
        if is_lost and sum(1 for node in nodes if node.cpus) > 1:
            what = "The device's NUMA node is unknown (-1)."
            yield Hit(bus_id, Level.WARNING, what, consequence)


@rule(
    "empty-affinity",
    "a NUMA node with devices and without cores",
    "Write the node's cores as affinity; /sys/devices/system/node/node*/cpumap has "
    "them.",
)
def _no_cores(view: HostView) -> Iterator[Hit]:
    used = {device.node for device in view.host.devices}
    for node in view.host.numa_nodes:
        if node.number in used and not node.cpus:
            yield Hit(
                node.name,
                Level.WARNING,
                "Devices are near the node, and it has no cores.",
                "NCCL's threads for these devices run anywhere, on another socket too.",
            )


@rule(
    "shared-cores",
    "cores that two NUMA nodes claim",
    "Write each node's own cores; /sys/devices/system/node/node*/cpumap has them.",
)
def _shared_cores(view: HostView) -> Iterator[Hit]:
    counts = Counter(cpu for node in view.host.numa_nodes for cpu in node.cpus)
    for node in view.host.numa_nodes:
        if own := [cpu for cpu in node.cpus if counts[cpu] > 1]:
            yield Hit(
                node.name,
                Level.WARNING,
                f"Its CPUs {format_list(own)} are another node's, too.",
                "The threads of all these nodes' devices are bound to the same CPUs, "
                "far from most of the devices.",
            )


@rule(
    "uneven-cores",
    "one NUMA node with another number of cores",
    "Compare with /sys/devices/system/node/node*/cpumap.",
)
def _uneven_cores(view: HostView) -> Iterator[Hit]:
    nodes = [node for node in view.host.numa_nodes if node.cpus]
    counts = Counter(len(node.cpus) for node in nodes)
    if len(nodes) < 3 or len(counts) != 2 or 1 not in counts.values():
        return
    usual = counts.most_common(1)[0][0]
    (node,) = (node for node in nodes if len(node.cpus) != usual)
    yield Hit(
        node.name,
        Level.NOTE,
        f"It has {len(node.cpus)} CPUs ({format_list(node.cpus)}), and every other "
        f"node has {usual}.",
        "Its devices have another share of CPUs; in a file it is mostly a digit too "
        "few in the mask.",
    )


@rule(
    "implausible-processor",
    "a processor that is too old for the links below it",
    "Let the virtual machine see the host's model (QEMU: -cpu host), or correct "
    "modelid or link_speed in the file; from Sapphire Rapids on NCCL counts 22 or 40 "
    "GB/s between sockets.",
)
def _old_processors(view: HostView) -> Iterator[Hit]:
    roots = (gt_per_s(each.speed) for each in view.host.devices if not each.parent)
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
        yield Hit(
            node.name,
            Level.WARNING,
            f"The processor is given as Intel family {node.family} model {node.model}, "
            f"{why}.",
            f"One of both is wrong, and NCCL believes both:{between} the given speed.",
            rate,
        )


@rule(
    "one-sided-host",
    "all GPUs and adapters near one of several sockets",
    "Nothing, where the machine is built so; else look whether the virtual machine "
    "hides the second root. Bind to it: ronde run --bind numa.",
)
def _one_sided(view: HostView) -> Iterator[Hit]:
    packages = {node.package for node in view.host.numa_nodes if node.cpus} - {UNKNOWN}
    ends = [bus_id for bus_id in [*view.gpus, *view.ports] if bus_id in view.devices]
    nodes = {view.node_of(bus_id) for bus_id in ends}
    if len(packages) < 2 or len(view.gpus) < 2 or len(nodes) != 1 or UNKNOWN in nodes:
        return
    yield Hit(
        f"numa/{nodes.pop()}",
        Level.NOTE,
        f"All GPUs and network adapters are near one of {len(packages)} sockets.",
        "The other sockets' memory and cores reach them over the link between sockets "
        "alone.",
    )


@rule(
    "odd-source",
    "what was odd in a source",
    "Correct the source, or make it anew.",
)
def _remarks(view: HostView) -> Iterator[Hit]:
    consequence = (
        "It was read all the same; what is shown here may not be what the source meant."
    )
    for remark in view.host.remarks:
        yield Hit("source", Level.NOTE, remark, consequence)


@rule(
    "repeated-rank",
    "several GPUs with one rank",
    "Give each GPU its own rank, or write the file anew with NCCL_TOPO_DUMP_FILE.",
)
def _repeated_ranks(view: HostView) -> Iterator[Hit]:
    counts = Counter(gpu.rank for gpu in view.host.gpus if gpu.rank >= 0)
    for gpu in view.host.gpus:
        if counts[gpu.rank] > 1:
            yield Hit(
                gpu.name,
                Level.ERROR,
                f"{counts[gpu.rank]} GPUs have rank {gpu.rank}.",
                "NCCL refuses duplicate GPUs, or loses one of them.",
            )


@rule(
    "mixed-gpus",
    "GPUs of several kinds in one host",
    "Leave it out with CUDA_VISIBLE_DEVICES where that matters.",
)
def _mixed_gpus(view: HostView) -> Iterator[Hit]:
    kinds = {gpu.name: (gpu.gcn, gpu.sm) for gpu in view.host.gpus if gpu.sm > 0}
    words = {k: f"gfx{k[0]}" if k[0] else f"sm {k[1]}" for k in kinds.values()}
    usual = Counter(kinds.values()).most_common(1)[0][0] if kinds else ("", 0)
    for name, kind in kinds.items():
        if kind != usual:
            yield Hit(
                name,
                Level.NOTE,
                f"It is {words[kind]}, and most GPUs of the host are {words[usual]}.",
                "A job over all runs at the slowest GPU's rate.",
            )
