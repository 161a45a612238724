"""The cores of a host whose source may tell hardware threads alone."""

from collections import Counter
from collections.abc import Sequence

from ronde.topology.cpu_sets import format_list
from ronde.topology.graph import HostTopology
from ronde.topology.machine import Core

_MOST_THREADS = 4


def told_cores(host: HostTopology) -> tuple[tuple[Core, ...], tuple[str, ...]]:
    """Return the cores of a graph, and what had to be taken for granted.

    CPUs that are said to be on two nodes are on none: placeholders in clouds' files
    give all nodes the same. Where nobody tells which threads share a core, those at the
    same place in a node's runs of numbers do, as Linux counts all first threads before
    all second ones. Where that is wrong, ranks get other cores of the same node.
    """
    counts = Counter(cpu for node in host.numa_nodes for cpu in node.cpus)
    twice = {cpu for cpu, count in counts.items() if count > 1}
    cores: list[Core] = []
    is_taken = False
    for node in host.numa_nodes:
        of_node = node.cores
        if not of_node:
            of_node = _threads_by_place([cpu for cpu in node.cpus if cpu not in twice])
            is_taken |= bool(of_node)
        left = [tuple(c for c in cpus if c not in twice) for cpus in of_node]
        cores += [Core(cpus, node.number) for cpus in left if cpus]
    notices: list[str] = []
    if twice:
        notices.append(
            f"CPUs {format_list(twice)} are said to be on several NUMA nodes, so that "
            "no rank gets them."
        )
    if is_taken:
        notices.append(
            "No source tells which hardware threads share a core: they are taken to be "
            "numbered as Linux does."
        )
    return tuple(cores), tuple(notices)


def _threads_by_place(cpus: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the CPUs at the same place in each run of numbers: a core each."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    # Many short runs are no threads: every other CPU is of this node, or some are off.
    if len(runs) > _MOST_THREADS:
        return tuple((cpu,) for cpu in cpus)
    longest = max(map(len, runs), default=0)
    return tuple(
        tuple(run[place] for run in runs if place < len(run))
        for place in range(longest)
    )
