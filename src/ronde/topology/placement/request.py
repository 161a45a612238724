"""What ranks are to get, and what is asked of nobody."""

from enum import StrEnum
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.topology.placement.policies import Policy
from ronde.topology.placement.supply import Supply

DEFAULT_NODES = 8
"""As many memory nodes are always allowed."""

MOST_NODES = 16
"""More are never allowed: each has twice as many sets as one less."""


class Scope(StrEnum):
    """What is aligned as one."""

    RANK = "rank"
    """Each rank by itself."""

    JOB = "job"
    """All ranks of the host together."""


class Request(NamedTuple):
    """What each rank of a host is to get.

    Attributes:
        num_ranks: Ranks of the host.
        policy: What becomes of ranks that cannot be aligned.
        scope: What is aligned as one.
        is_closest: Of equally many nodes, those near each other are better.
        max_numa_nodes: Most nodes with cores that a host may have.
        num_cores: Physical cores of a rank; 0 for an even part, of those near its GPU
            where every rank has one.
        memory_bytes: Memory of a rank; 0 for none in particular.
        num_gpus: GPUs of a rank, chosen and aligned with the rest. None for the one of
            its local rank where there are enough, else for none.
        num_nics: Adapters of a rank that are to be aligned as well, all its own where
            there are enough. With 0 it gets the nearest to its GPU, wherever that is.
    """

    num_ranks: int
    policy: Policy = Policy.BEST_EFFORT
    scope: Scope = Scope.RANK
    is_closest: bool = False
    max_numa_nodes: int = DEFAULT_NODES
    num_cores: int = 0
    memory_bytes: int = 0
    num_gpus: int | None = None
    num_nics: int = 0


def check_request(supply: Supply, request: Request) -> None:
    """Refuse what no placement could meet.

    Raises:
        UsageError: There is not so much, or more nodes than may be.
    """
    _check_numbers(request)
    _check_nodes(supply, request)
    _check_enough("gpus", len(supply.gpus), request.num_ranks * (request.num_gpus or 0))
    _check_enough("nics", len(supply.nics), request.num_nics)
    _check_enough("cores", len(supply.cores), request.num_ranks * request.num_cores)
    if not request.memory_bytes:
        return
    free = [node.free_bytes for node in supply.nodes]
    if not free or min(free) < 0:
        raise UsageError(
            "memory must be asked of a source that tells what is free, got one that "
            "does not. Leave it out, or read the machine itself."
        )
    wanted = request.num_ranks * request.memory_bytes
    if wanted > sum(free):
        # Takes long to import, and the memory is seldom asked for.
        from ronde.units import format_size

        raise UsageError(
            f"memory of {request.num_ranks} ranks must be at most what is free, got "
            f"{format_size(wanted)} of {format_size(sum(free))}. Ask for less."
        )


def _check_numbers(request: Request) -> None:
    least = {
        "num_ranks": (request.num_ranks, 1),
        "cores": (request.num_cores, 0),
        "memory": (request.memory_bytes, 0),
        "gpus": (request.num_gpus or 0, 0),
        "nics": (request.num_nics, 0),
    }
    for name, (value, smallest) in least.items():
        if value < smallest:
            raise UsageError(f"{name} must be at least {smallest}, got {value}.")
    if not DEFAULT_NODES <= request.max_numa_nodes <= MOST_NODES:
        raise UsageError(
            f"max_numa_nodes must be {DEFAULT_NODES} to {MOST_NODES}, got "
            f"{request.max_numa_nodes}. Leave it out for {DEFAULT_NODES}."
        )


def _check_nodes(supply: Supply, request: Request) -> None:
    num_nodes = len(supply.nodes)
    is_strict = request.policy in {Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE}
    if is_strict and not num_nodes:
        raise UsageError(
            f"policy {request.policy} must have CPUs to align with, got none from any "
            "source. Read the machine itself, or take best-effort."
        )
    if request.policy is not Policy.NONE and num_nodes > request.max_numa_nodes:
        raise UsageError(
            f"memory nodes with cores must be at most {request.max_numa_nodes}, got "
            f"{num_nodes}: every set of them is tried. Raise max-numa-nodes to "
            f"{num_nodes} where that is at most {MOST_NODES}, or take policy none."
        )


def _check_enough(name: str, num_there: int, num_wanted: int) -> None:
    if num_wanted > num_there:
        raise UsageError(
            f"{name} must be at most {num_there} in all, got {num_wanted}. Ask for "
            "fewer, or for fewer ranks."
        )
