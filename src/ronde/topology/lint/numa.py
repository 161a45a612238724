"""Rules on NUMA nodes and processors, and on what names elements."""

from collections import Counter
from collections.abc import Iterator

from ronde.topology.cpu_sets import format_list
from ronde.topology.findings import Level
from ronde.topology.graph import UNKNOWN
from ronde.topology.lint.view import Hit, HostView, gt_per_s, node_of, rule
from ronde.topology.paths.speeds import smp_gb_per_s

# Lowest model of Intel's family 6 with lanes of that many GT/s: Ice Lake, Sapphire
# Rapids.
_FIRST_MODELS = ((16.0, 0x6A), (32.0, 0x8F))


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
        is_lost = bus_id in view.devices and node_of(view, bus_id) == UNKNOWN
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
    shared = {cpu for cpu, num in counts.items() if num > 1}
    for node in view.host.numa_nodes:
        if own := shared.intersection(node.cpus):
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
    nodes = {
        node_of(view, bus_id)
        for bus_id in [*view.gpus, *view.ports]
        if bus_id in view.devices
    }
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
    for remark in view.host.remarks:
        yield Hit(
            "source",
            Level.NOTE,
            remark,
            "It was read all the same; what is shown here may not be what the source "
            "meant.",
        )


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
    gpus = [gpu for gpu in view.host.gpus if gpu.sm > 0]
    kinds = {g.name: f"gfx{g.gcn}" if g.gcn else f"sm {g.sm}" for g in gpus}
    counts = Counter((gpu.gcn, gpu.sm) for gpu in gpus)
    usual = counts.most_common(1)[0][0] if counts else ()
    usual_kind = next((kinds[g.name] for g in gpus if (g.gcn, g.sm) == usual), "")
    for gpu in gpus:
        if (gpu.gcn, gpu.sm) != usual:
            yield Hit(
                gpu.name,
                Level.NOTE,
                f"It is {kinds[gpu.name]}, and most GPUs of the host are {usual_kind}.",
                "A job over all runs at the slowest GPU's rate.",
            )


RULES = (
    _no_node,
    _no_cores,
    _shared_cores,
    _uneven_cores,
    _old_processors,
    _one_sided,
    _remarks,
    _repeated_ranks,
    _mixed_gpus,
)
