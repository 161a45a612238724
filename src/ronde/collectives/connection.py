"""From a claim to a communicator: the one place where an engine is chosen."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ronde.collectives import makers
from ronde.collectives.asked import Asked
from ronde.collectives.automatic import connect_automatically
from ronde.collectives.communicator import Communicator
from ronde.collectives.engines.solo import SoloCommunicator
from ronde.errors import UsageError
from ronde.world.value import RankInfo

DEFAULT_TIMEOUT_S = 1800.0
"""How long a collective waits: rank 0 may evaluate or save meanwhile."""


def connect(
    claim: RankInfo,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    engine: str = "",
    algorithm: str = "",
) -> Communicator:
    """Connect this rank to all others; collective.

    Args:
        claim: This rank's place among the others.
        timeout_s: How long any collective may wait for another rank. The ranks wait at
            most 300 s for each other here.
        engine: One of ``ENGINES``, equal on all ranks; empty takes the claim's.
        algorithm: The schedule to follow, for engines that have several; empty takes
            the claim's.

    Returns:
        A communicator of all ranks; of this one alone, with no process group, where
        ``claim.size`` is 1.

    Raises:
        UsageError: There is no such engine, or what it needs is not installed.
        WorldError: The ranks are on several hosts and nobody said where to meet.
        CollectiveError: Not all ranks came in time, or the port is in use.
    """
    name, asked = ask(claim, timeout_s=timeout_s, engine=engine, algorithm=algorithm)
    return SoloCommunicator() if claim.size == 1 else ENGINES[name](asked)


def ask(
    claim: RankInfo, *, timeout_s: float, engine: str, algorithm: str
) -> tuple[str, Asked]:
    """Return the name of an engine and what it is asked for: see ``connect``."""
    name = engine or claim.engine
    if name not in ENGINES:
        raise UsageError(f"engine must be one of {', '.join(ENGINES)}, got {name!r}.")
    return name, Asked(claim, timeout_s, algorithm or claim.algorithm)


def _auto(asked: Asked) -> Communicator:
    return connect_automatically(asked, ENGINES)


ENGINES: Mapping[str, Callable[[Asked], Communicator]] = MappingProxyType(
    {
        "auto": _auto,
        "shared_memory": makers.shared_memory,
        "gloo": makers.torch_distributed,
        "nccl": makers.torch_distributed,
        "mpi": makers.mpi,
        "scheduled": makers.scheduled,
        "hierarchical": makers.hierarchical,
    }
)
"""How a rank connects by each engine. ``gloo`` and ``nccl`` are one engine, which takes
the backend by the tensor's device."""
