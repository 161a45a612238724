"""What one rank gets of its host, and how many ranks fit there."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ronde.topology.machine import (
    UNKNOWN_NODE,
    Machine,
    read_cores,
    read_cpu_limit,
    read_gpus,
)


def count_slots(environ: Mapping[str, str]) -> int:
    """Return one slot a GPU of this machine, else one a core that may be used."""
    return len(read_gpus("", environ)) or count_cores()


def count_cores() -> int:
    """Return the physical cores that may be used here, cut to the CPU quota."""
    return usable_cores(Machine(read_cores(""), read_cpu_limit(""), (), ()))


def usable_cores(machine: Machine) -> int:
    """Return the physical cores of a machine, cut to the CPU quota; least 1."""
    limit = int(machine.cpu_limit) if machine.cpu_limit else len(machine.cores)
    return max(1, min(len(machine.cores), limit))


@dataclass(frozen=True, slots=True)
class RankResources:
    """Where one rank sits."""

    num_cores: int  # physical cores that it may count on, for its threads
    # hardware threads that it is bound to; empty for none in particular
    cpus: tuple[int, ...] = ()
    memory_node: int = UNKNOWN_NODE  # where its memory is to lie, or ``UNKNOWN_NODE``
    # variables that name its devices
    env: dict[str, str] = field(default_factory=dict[str, str])
    device: str = ""  # its device, for people; empty for none
    # the nearest network interface, for people; empty where that is not known
    nic: str = ""
    why: str = ""  # the reason for all that, for people
