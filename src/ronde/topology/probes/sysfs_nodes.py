"""NUMA nodes and their cores, as the kernel shows them in /sys and /proc."""

from typing import NamedTuple

from ronde.topology.cores import read_node_cpus, read_online, split_cores
from ronde.topology.cpu_sets import format_list, members
from ronde.topology.graph import UNKNOWN, NumaNode
from ronde.topology.kernel_files import read_list, read_number, read_text

_NODES = "sys/devices/system/node"
# The first processor is told in less; for all of them the kernel takes milliseconds.
_ONE_PROCESSOR_BYTES = 4096
_EXTENDED_FAMILY = 15


class Processor(NamedTuple):
    """What the processors of a machine are; fields as a ``NumaNode`` has them."""

    arch: str = ""
    vendor: str = ""
    family: int = UNKNOWN
    model: int = UNKNOWN


def read_nodes(root: str) -> tuple[tuple[NumaNode, ...], tuple[str, ...]]:
    """Return the nodes that are online, by number, and what is odd about them.

    CPUs that are online and on none of them are a node of unknown number. Without any
    node, as kernels without NUMA show it, all is one node 0.

    Args:
        root: Where ``proc`` and ``sys`` are; empty for this machine.
    """
    left = read_online(root)
    remarks: list[str] = []
    nodes: list[NumaNode] = []
    processor = read_processor(root)
    cpus_of = _online_nodes(root)
    for number, listed in cpus_of.items():
        nodes.append(_read_node(root, number, listed & left, processor))
        left &= ~listed
    if not nodes and left:
        node = _node(root, 0, left, processor)
        memory, free = _memory(read_text(f"{root}/proc/meminfo"))
        nodes.append(node._replace(memory_bytes=memory, free_bytes=free))
    elif left:
        nodes.insert(0, _node(root, UNKNOWN, left, processor))
        remarks.append(
            f"CPUs {format_list(members(left))} are online, but their NUMA node is not."
        )
    distances = _read_distances(root, list(cpus_of))
    undistanced = [node for node in cpus_of if node not in distances]
    if undistanced and len(cpus_of) > 1:
        listed_nodes = ", ".join(f"numa/{node}" for node in undistanced)
        remarks.append(f"The kernel tells no distances of {listed_nodes}.")
    return (
        tuple(n._replace(distances=distances.get(n.number, ())) for n in nodes),
        tuple(remarks),
    )


def read_processor(root: str) -> Processor:
    """Return what the first processor is; what is not told is empty or unknown.

    Args:
        root: Where ``proc`` is; empty for this machine.
    """
    text = read_text(f"{root}/proc/cpuinfo", _ONE_PROCESSOR_BYTES)
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    # One blank stands after the colon; more belong to the name: "  Shanghai  ".
    told = {name.strip(): value.removeprefix(" ") for name, _, value in pairs}
    if "vendor_id" in told and "cpu family" in told:
        family = _number(told["cpu family"])
        if family > _EXTENDED_FAMILY:
            # The kernel adds the extended family to 15, NCCL adds 16 times as much.
            # Source: ``ncclTopoGetXmlFromCpu`` of NCCL's src/graph/xml.cc.
            family = _EXTENDED_FAMILY + 16 * (family - _EXTENDED_FAMILY)
        model = _number(told.get("model", ""))
        return Processor("x86_64", told["vendor_id"], family, model)
    if "CPU implementer" in told:
        return Processor("arm64")
    return Processor("ppc64" if told.get("cpu", "").startswith("POWER") else "")


def _online_nodes(root: str) -> dict[int, int]:
    nodes = read_node_cpus(root)
    online = read_list(f"{root}/{_NODES}/online")
    return {n: cpus for n, cpus in nodes.items() if not online or online >> n & 1}


def _read_node(root: str, number: int, cpus: int, processor: Processor) -> NumaNode:
    """Return a node with its memory."""
    memory, free = _memory(read_text(f"{root}/{_NODES}/node{number}/meminfo"))
    node = _node(root, number, cpus, processor)
    return node._replace(memory_bytes=memory, free_bytes=free)


def _node(root: str, number: int, cpus: int, processor: Processor) -> NumaNode:
    """Return a node of some CPUs, as bits; what it is made of if it has any."""
    cores = split_cores(root, cpus)
    if not cores:
        return NumaNode(number)
    topology = f"{root}/sys/devices/system/cpu/cpu{cores[0][0]}/topology"
    return NumaNode(
        number,
        cpus=tuple(members(cpus)),
        cores=tuple(cores),
        package=max(UNKNOWN, read_number(f"{topology}/physical_package_id", UNKNOWN)),
        **processor._asdict(),
    )


def _memory(text: str) -> tuple[int, int]:
    """Return the bytes in all and free of lines such as ``Node 0 MemFree: 8 kB``."""
    told: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit.strip() == "kB":
            told[name.rpartition(" ")[2]] = max(UNKNOWN, _number(number) * 1024)
    return told.get("MemTotal", UNKNOWN), told.get("MemFree", UNKNOWN)


def _read_distances(
    root: str, nodes: list[int]
) -> dict[int, tuple[tuple[int, int], ...]]:
    """Return the distances from each node to the listed ones.

    A row has a column for each node that is online, in the order of their numbers, and
    from some kernels for each that may ever be; else nobody knows what it means.
    """
    possible = members(read_list(f"{root}/{_NODES}/possible"))
    columns_by_num = {len(possible): possible, len(nodes): nodes}
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    for node in nodes:
        text = read_text(f"{root}/{_NODES}/node{node}/distance")
        row = [_number(part) for part in text.split()]
        pairs = zip(columns_by_num.get(len(row), ()), row, strict=False)
        told = tuple((n, distance) for n, distance in pairs if n in nodes)
        if told and all(distance > 0 for _, distance in told):
            found[node] = told
    return found


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return UNKNOWN
