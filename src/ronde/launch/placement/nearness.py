"""Which network adapter is nearest to each rank's GPU."""

from collections.abc import Sequence

from ronde.topology.machine import Gpu, Machine, Nic
from ronde.topology.placement.machine_supply import supply_of_machine, training_nics
from ronde.topology.placement.placing import place
from ronde.topology.placement.policies import Policy
from ronde.topology.placement.request import Request


def nearest_nics(
    gpus: Sequence[Gpu | None], nics: Sequence[Nic]
) -> tuple[Nic | None, ...]:
    """Return each GPU's nearest adapter, None where nothing is known of it.

    Nearest is what shares most bridges with it, then what is near the same memory. Of
    equals each is given out as often, so that every GPU has a rail of its own.

    Args:
        gpus: Each rank's own, or None.
        nics: Those that are up; only those to train over count.
    """
    supply = supply_of_machine(Machine((), 0.0, (), tuple(nics)), gpus)
    candidates = training_nics(nics)
    places = place(supply, Request(len(gpus), policy=Policy.NONE))
    return tuple(candidates[each.nics[0]] if each.nics else None for each in places)
