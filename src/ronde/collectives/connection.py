"""From a claim to a communicator: the one place where an engine is chosen."""

from ronde.collectives.communicator import Communicator
from ronde.collectives.engines.solo import SoloCommunicator
from ronde.collectives.engines.torch_distributed import TorchDistributedCommunicator
from ronde.collectives.rendezvous import meet
from ronde.world.value import Claim

DEFAULT_TIMEOUT_S = 1800.0
"""How long a collective waits: rank 0 may evaluate or save meanwhile."""
_MEETING_TIMEOUT_S = 300.0


def connect(claim: Claim, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Communicator:
    """Connect this rank to all others; collective.

    Args:
        claim: This rank's place among the others.
        timeout_s: How long any collective may wait for another rank. The ranks wait at
            most 300 s for each other here.

    Returns:
        A communicator of all ranks; of this one alone, with no process group, where
        ``claim.size`` is 1.

    Raises:
        WorldError: The ranks are on several hosts and nobody said where to meet.
        CollectiveError: Not all ranks came in time, or the port is in use.
    """
    if claim.size == 1:
        return SoloCommunicator()
    store = meet(claim, min(timeout_s, _MEETING_TIMEOUT_S))
    return TorchDistributedCommunicator(
        store,
        claim.rank,
        claim.size,
        timeout_s=timeout_s,
        is_one_host=claim.local_size == claim.size,
    )
