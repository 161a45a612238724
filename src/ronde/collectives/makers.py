"""How each engine is made.

Its module is imported when it is asked for: some need a library that is not always
there.
"""

import logging
import socket
from dataclasses import replace

from ronde.collectives.asked import Asked
from ronde.collectives.communicator import Communicator
from ronde.collectives.engines.solo import SoloCommunicator
from ronde.collectives.objects import exchange_hosts
from ronde.errors import CollectiveError

_logger = logging.getLogger("ronde")


def torch_distributed(asked: Asked) -> Communicator:
    """Connect by Gloo, and by NCCL where tensors need it; collective."""
    from ronde.collectives.engines.torch_distributed import (
        TorchDistributedCommunicator,
    )

    claim = asked.claim
    return TorchDistributedCommunicator(
        asked.meet(),
        claim.rank,
        claim.size,
        timeout_s=asked.timeout_s,
        is_one_host=claim.local_size == claim.size,
    )


def shared_memory(asked: Asked) -> Communicator:
    """Connect the ranks of one machine; collective."""
    from ronde.collectives.engines.shared_memory import SharedMemoryCommunicator

    claim = asked.claim
    return SharedMemoryCommunicator(
        asked.meet(), claim.rank, claim.size, timeout_s=asked.timeout_s
    )


def shared_memory_or_gloo(asked: Asked) -> Communicator:
    """Connect by shared memory, or say why not and connect by Gloo; collective."""
    store = asked.meet()
    try:
        return shared_memory(asked.at(store, "shared_memory"))
    except CollectiveError as error:  # on all ranks, or none
        if asked.claim.rank == 0:
            _logger.warning("Gloo moves the tensors, for %s", error)
        return torch_distributed(asked.at(store, "gloo"))


def mpi(asked: Asked) -> Communicator:
    """Connect by MPI; collective."""
    from ronde.collectives.engines.mpi import connect_some, connect_world

    claim = asked.claim
    if asked.ranks:
        return connect_some(claim.rank, asked.ranks, timeout_s=asked.timeout_s)
    return connect_world(claim.rank, claim.size, timeout_s=asked.timeout_s)


def scheduled(asked: Asked) -> Communicator:
    """Follow a schedule by Gloo's messages; collective."""
    from ronde.collectives.algorithms import find_algorithm
    from ronde.collectives.engines.scheduled import ScheduledCommunicator

    algorithm = find_algorithm(asked.algorithm or "ring")
    return ScheduledCommunicator(torch_distributed(asked), algorithm.name)


def hierarchical(asked: Asked) -> Communicator:
    """Connect in two levels, by the hosts' names; collective."""
    return two_levels(asked, socket.gethostname())


def two_levels(asked: Asked, host: str) -> Communicator:
    """Connect each host's ranks by shared memory, and the hosts by Gloo; collective.

    Args:
        asked: What is asked for; an algorithm is followed between the hosts.
        host: The name of this rank's host.
    """
    from ronde.collectives.algorithms import find_algorithm
    from ronde.collectives.engines.hierarchical import HierarchicalCommunicator, Places

    if asked.algorithm:
        find_algorithm(asked.algorithm)
    store = asked.meet()
    world = torch_distributed(asked.at(store, "world"))
    places = Places.from_hosts(exchange_hosts(world, host))
    index, place = places.of(asked.claim.rank)
    size = len(places.ranks[index])
    claim = replace(asked.claim, rank=place, size=size, local_size=size)
    own_host = replace(asked, claim=claim).at(store, f"host{index}")
    local = SoloCommunicator() if size == 1 else shared_memory_or_gloo(own_host)
    cross = None
    if places.is_even or place == 0:
        column = asked.at(store, f"place{place}")
        cross = _connect_hosts(column, index, places.num_hosts)
    return HierarchicalCommunicator(world, local, cross, places)


def _connect_hosts(asked: Asked, index: int, size: int) -> Communicator:
    """Connect one rank of each host."""
    if size == 1:
        return SoloCommunicator()
    is_one_host = asked.claim.local_size == asked.claim.size
    claim = replace(
        asked.claim, rank=index, size=size, local_size=size if is_one_host else 1
    )
    asked = replace(asked, claim=claim)
    return scheduled(asked) if asked.algorithm else torch_distributed(asked)
