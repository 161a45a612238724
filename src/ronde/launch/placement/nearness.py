"""Which network port is nearest to each rank's GPU."""

from collections.abc import Sequence

from ronde.topology.machine import Gpu, Machine
from ronde.topology.placement.inventory import inventory_of_machine
from ronde.topology.placement.placing import AlignmentRequest, place
from ronde.topology.placement.policies import Policy


def nearest_ports(machine: Machine, gpus: Sequence[Gpu | None]) -> tuple[str, ...]:
    """Return the name of each GPU's nearest port, empty where nothing is known of it.

    They are those that ``ronde topo place`` takes on the same machine: of equally near
    ones each is given out as often, so that every GPU has a rail of its own.

    Args:
        machine: As its agent tells.
        gpus: Each rank's own, or None.
    """
    inventory = inventory_of_machine(machine._replace(cores=()), gpus)
    places = place(inventory, AlignmentRequest(len(gpus), policy=Policy.NONE))
    return tuple(
        inventory.nics[each.nics[0]].name if each.nics else "" for each in places
    )
