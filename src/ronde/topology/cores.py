"""The physical cores that this process may use."""

from ronde.topology.control_groups import read_cpuset
from ronde.topology.cpu_sets import members, parse_list, parse_mask
from ronde.topology.kernel_files import list_names, read_text
from ronde.topology.machine import UNKNOWN_NODE, Core


def read_cores(root: str) -> tuple[Core, ...]:
    """Return the cores by memory node and number, each with its allowed threads.

    Args:
        root: Where ``proc`` and ``sys`` are; empty for this machine.
    """
    left = _allowed(root)
    nodes = _nodes(root)
    cores: list[Core] = []
    while left:
        cpu = (left & -left).bit_length() - 1
        directory = f"{root}/sys/devices/system/cpu/cpu{cpu}/topology"
        # Masks, not lists: every kernel has them, and core_id is no key, for it is
        # unique within one package only.
        threads = parse_mask(read_text(f"{directory}/thread_siblings")) & left
        threads |= 1 << cpu
        left ^= threads
        node = next((n for n, cpus in nodes if cpus >> cpu & 1), UNKNOWN_NODE)
        cores.append(Core(tuple(members(threads)), node))
    return tuple(sorted(cores, key=lambda core: (core.node, core.cpus)))


def _allowed(root: str) -> int:
    """Return the CPUs that are online, in the affinity mask and in the cpuset.

    Sandboxes show some of these files only, or the host's: what would leave nothing is
    not believed.
    """
    allowed = _online(root)
    for limit in (_affinity(root), read_cpuset(root)):
        allowed = allowed & limit or allowed or limit
    return allowed


def _online(root: str) -> int:
    directory = f"{root}/sys/devices/system/cpu"
    text = read_text(f"{directory}/online")
    if text:
        return parse_list(text)
    names = [name[3:] for name in list_names(directory) if name.startswith("cpu")]
    return sum(1 << int(number) for number in names if number.isdigit())


def _affinity(root: str) -> int:
    for line in read_text(f"{root}/proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "Cpus_allowed":
            return parse_mask(value.strip())
    return 0


def _nodes(root: str) -> list[tuple[int, int]]:
    """Return each memory node that has CPUs, with the set of them; ids have gaps."""
    directory = f"{root}/sys/devices/system/node"
    numbers = [name[4:] for name in list_names(directory) if name.startswith("node")]
    nodes = [
        (int(number), parse_mask(read_text(f"{directory}/node{number}/cpumap")))
        for number in numbers
        if number.isdigit()
    ]
    return [(node, cpus) for node, cpus in nodes if cpus]
