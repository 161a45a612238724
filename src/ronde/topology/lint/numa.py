"""Rules on NUMA nodes, processors and what is near them."""

from collections import Counter
from collections.abc import Iterator

from ronde.topology.cpu_sets import format_list
from ronde.topology.findings import Finding, Severity
from ronde.topology.graph import UNKNOWN, NumaNode
from ronde.topology.lint.host_view import HostView, gt_per_s, is_many_noded, node_of
from ronde.topology.lint.rule import Rule
from ronde.topology.paths.speeds import smp_gb_per_s

_INTEL = "GenuineIntel"
_FIRST_MODELS = ((16.0, 0x6A), (32.0, 0x8F))
"""Lowest model of Intel's family 6 with lanes of that many GT/s: Ice Lake, Sapphire
Rapids."""


def _no_node(view: HostView) -> Iterator[Finding]:
    for node in view.host.numa_nodes:
        if node.number < 0:
            yield _no_node_finding(node.name, "The node's own number is -1.")
    if not is_many_noded(view.host):
        return
    for bus_id in [*view.gpus, *view.ports]:
        device = view.devices.get(bus_id)
        if device and node_of(view, device) == UNKNOWN:
            yield _no_node_finding(
                device.name, "The device's NUMA node is not known (-1)."
            )


def _no_node_finding(element: str, what: str) -> Finding:
    return Finding(
        rule="no-numa-node",
        severity=Severity.WARNING,
        element=element,
        what=what,
        consequence="NCCL takes all such devices as next to one processor, and nothing "
        "is bound near them: traffic may cross the sockets' link unseen.",
        remedy="Switch NUMA on in the firmware, or give the virtual machine its host's "
        "nodes; in a file write the numaid.",
    )


def _no_cores(view: HostView) -> Iterator[Finding]:
    used = {device.node for device in view.host.devices}
    for node in view.host.numa_nodes:
        if node.number in used and not node.cpus:
            yield Finding(
                rule="empty-affinity",
                severity=Severity.WARNING,
                element=node.name,
                what="Devices are near the node, and it has no cores.",
                consequence="NCCL's threads for these devices run anywhere, on another "
                "socket too.",
                remedy="Write the node's cores as affinity; "
                f"/sys/devices/system/node/node{node.number}/cpumap has them.",
            )


def _shared_cores(view: HostView) -> Iterator[Finding]:
    counts = Counter(cpu for node in view.host.numa_nodes for cpu in node.cpus)
    shared = {cpu for cpu, num in counts.items() if num > 1}
    for node in view.host.numa_nodes:
        own = shared.intersection(node.cpus)
        if own:
            yield Finding(
                rule="shared-cores",
                severity=Severity.WARNING,
                element=node.name,
                what=f"Its CPUs {format_list(own)} are another node's, too.",
                consequence="The threads of all these nodes' devices are bound to the "
                "same CPUs, far from most of the devices.",
                remedy="Write each node's own cores; "
                "/sys/devices/system/node/node*/cpumap has them.",
            )


def _uneven_cores(view: HostView) -> Iterator[Finding]:
    nodes = [node for node in view.host.numa_nodes if node.cpus]
    if len(nodes) < 3:
        return
    usual, num_usual = Counter(len(node.cpus) for node in nodes).most_common(1)[0]
    odd = [node for node in nodes if len(node.cpus) != usual]
    if len(odd) != 1 or num_usual != len(nodes) - 1:
        return
    node = odd[0]
    yield Finding(
        rule="uneven-cores",
        severity=Severity.NOTE,
        element=node.name,
        what=f"It has {len(node.cpus)} CPUs ({format_list(node.cpus)}), and every "
        f"other node has {usual}.",
        consequence="Its devices have another share of CPUs; in a file it is mostly a "
        "digit too few in the mask.",
        remedy=f"Compare with /sys/devices/system/node/node{node.number}/cpumap.",
    )


def _old_processors(view: HostView) -> Iterator[Finding]:
    if not view.gpus:
        return
    told = max(
        (gt_per_s(each.speed) for each in view.host.devices if not each.parent),
        default=0.0,
    )
    for node in view.host.numa_nodes:
        if node.vendor != _INTEL or node.model < 0:
            continue
        is_old = any(told >= r and node.model < m for r, m in _FIRST_MODELS)
        if node.family not in (6, UNKNOWN):
            yield _old_processor(view, node, "which no host of such GPUs has")
        elif is_old:
            yield _old_processor(
                view, node, f"and links of {told:g} GT/s below it, which it lacks"
            )


def _old_processor(view: HostView, node: NumaNode, why: str) -> Finding:
    others = [o for o in view.host.numa_nodes if o.number != node.number and o.cpus]
    rate = min((smp_gb_per_s(node, other) for other in others), default=0.0)
    between = f" {rate:g} GB/s between sockets and" if rate else ""
    return Finding(
        rule="implausible-processor",
        severity=Severity.WARNING,
        element=node.name,
        what=f"The processor is told as Intel family {node.family} model {node.model}, "
        f"{why}.",
        consequence=f"One of both is wrong, and NCCL believes both:{between} the "
        "speed that is told.",
        remedy="Let the virtual machine see the host's model (QEMU: -cpu host), or "
        "correct modelid or link_speed in the file; from Sapphire Rapids on NCCL "
        "counts 22 or 40 GB/s between sockets.",
        has_gb_per_s=rate,
    )


def _one_sided(view: HostView) -> Iterator[Finding]:
    packages = {node.package for node in view.host.numa_nodes if node.cpus} - {UNKNOWN}
    nodes = {
        node_of(view, view.devices[bus_id])
        for bus_id in [*view.gpus, *view.ports]
        if bus_id in view.devices
    }
    if len(packages) < 2 or len(view.gpus) < 2 or len(nodes) != 1 or UNKNOWN in nodes:
        return
    yield Finding(
        rule="one-sided-host",
        severity=Severity.NOTE,
        element=f"numa/{nodes.pop()}",
        what=f"All GPUs and network adapters are near one of {len(packages)} sockets.",
        consequence="The other sockets' memory and cores reach them over the link "
        "between sockets alone.",
        remedy="Nothing, where the machine is built so; else look whether the virtual "
        "machine hides the second root. Bind to it: ronde run --bind numa.",
    )


RULES = (
    Rule("no-numa-node", "a device or processor whose NUMA node is -1", _no_node),
    Rule("empty-affinity", "a NUMA node with devices and without cores", _no_cores),
    Rule("shared-cores", "cores that two NUMA nodes claim", _shared_cores),
    Rule("uneven-cores", "one NUMA node with another number of cores", _uneven_cores),
    Rule(
        "implausible-processor",
        "a processor that is too old for the links below it",
        _old_processors,
    ),
    Rule(
        "one-sided-host",
        "all GPUs and adapters near one of several sockets",
        _one_sided,
    ),
)
