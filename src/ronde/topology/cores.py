"""The physical cores that this process may use."""

from ronde.topology.control_groups import read_cpuset
from ronde.topology.cpu_sets import members, parse_list, parse_mask
from ronde.topology.kernel_files import list_names, read_list, read_mask, read_text
from ronde.topology.machine import UNKNOWN_NODE, Core


def read_cores(root: str) -> tuple[Core, ...]:
    """Return the cores by memory node and number, each with its allowed threads.

    Args:
        root: Where ``proc`` and ``sys`` are; empty for this machine.
    """
    nodes = read_node_cpus(root)
    cores: list[Core] = []
    for cpus in split_cores(root, _allowed(root)):
        first = cpus[0]
        node = next((n for n, near in nodes.items() if near >> first & 1), UNKNOWN_NODE)
        cores.append(Core(cpus, node))
    return tuple(sorted(cores, key=lambda core: (core.node, core.cpus)))


def split_cores(root: str, cpus: int) -> list[tuple[int, ...]]:
    """Return those CPUs of a set that share a physical core, for each core, ascending.

    Args:
        root: Where ``sys`` is; empty for this machine.
        cpus: The set, as bits.
    """
    left = cpus
    cores: list[tuple[int, ...]] = []
    while left:
        cpu = (left & -left).bit_length() - 1
        directory = f"{root}/sys/devices/system/cpu/cpu{cpu}/topology"
        # Masks, not lists: every kernel has them, and core_id is no key, for it is
        # unique within one package only.
        threads = read_mask(f"{directory}/thread_siblings") & left
        threads |= 1 << cpu
        left ^= threads
        cores.append(tuple(members(threads)))
    return cores


def read_online(root: str) -> int:
    """Return the CPUs that are online, as bits.

    Args:
        root: Where ``sys`` is; empty for this machine.
    """
    directory = f"{root}/sys/devices/system/cpu"
    online = read_list(f"{directory}/online")
    if online:
        return online
    names = [name[3:] for name in list_names(directory) if name.startswith("cpu")]
    return parse_list(",".join(n for n in names if n.isdecimal() and len(n) < 5))


def read_node_cpus(root: str) -> dict[int, int]:
    """Return the CPUs of each memory node by its number, as bits; ids have gaps.

    Args:
        root: Where ``sys`` is; empty for this machine.
    """
    directory = f"{root}/sys/devices/system/node"
    names = [name[4:] for name in list_names(directory) if name.startswith("node")]
    numbers = sorted(int(name) for name in names if name.isdecimal())
    return {node: read_mask(f"{directory}/node{node}/cpumap") for node in numbers}


def _allowed(root: str) -> int:
    """Return the CPUs that are online, in the affinity mask and in the cpuset.

    Sandboxes show some of these files only, or the host's: what would leave nothing is
    not believed.
    """
    allowed = read_online(root)
    for limit in (_affinity(root), read_cpuset(root)):
        allowed = allowed & limit or allowed or limit
    return allowed


def _affinity(root: str) -> int:
    for line in read_text(f"{root}/proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "Cpus_allowed":
            try:
                return parse_mask(value.strip())
            except ValueError:
                return 0
    return 0
