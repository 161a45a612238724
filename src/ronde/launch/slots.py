"""How many ranks fit a machine: one a GPU, else one a physical core."""

from collections.abc import Mapping

from ronde.topology.machine import Machine, read_cores, read_cpu_limit, read_gpus


def count_slots(environ: Mapping[str, str]) -> int:
    """Return one slot a GPU of this machine, else one a core that may be used.

    Args:
        environ: Says with ``CUDA_VISIBLE_DEVICES`` and the like which GPUs are hidden.
    """
    return len(read_gpus("", environ)) or count_cores()


def count_cores() -> int:
    """Return the physical cores that may be used here, cut to the CPU quota."""
    return usable_cores(Machine(read_cores(""), read_cpu_limit(""), (), ()))


def usable_cores(machine: Machine) -> int:
    """Return the physical cores of a machine, cut to the CPU quota; least 1."""
    limit = int(machine.cpu_limit) if machine.cpu_limit else len(machine.cores)
    return max(1, min(len(machine.cores), limit))
