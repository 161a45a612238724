"""From a claim to a communicator: the one place where an engine is chosen.

An engine's own module is imported when that engine is asked for: some need a library
that is not always there.
"""

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch.distributed import PrefixStore, Store

from ronde.collectives.communicator import Communicator, ReduceOp
from ronde.collectives.engines.solo import SoloCommunicator
from ronde.collectives.objects import exchange_hosts
from ronde.collectives.rendezvous import meet
from ronde.collectives.routing import RoutedCommunicator
from ronde.errors import CollectiveError, UsageError
from ronde.world.value import Claim

_logger = logging.getLogger("ronde")
DEFAULT_TIMEOUT_S = 1800.0
"""How long a collective waits: rank 0 may evaluate or save meanwhile."""
_MEETING_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What an engine is asked for.

    Attributes:
        claim: This rank's place; ``size`` is at least 2.
        timeout_s: How long a collective may wait for another rank.
        algorithm: Name of a schedule, or empty.
    """

    claim: Claim
    timeout_s: float
    algorithm: str = ""

    @property
    def meeting_timeout_s(self) -> float:
        """How long the ranks wait for each other to connect."""
        return min(self.timeout_s, _MEETING_TIMEOUT_S)


def connect(
    claim: Claim,
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
    name = engine or claim.engine
    if name not in ENGINES:
        raise UsageError(f"engine must be one of {', '.join(ENGINES)}, got {name!r}.")
    asked = Asked(claim, timeout_s, algorithm or claim.algorithm)
    if claim.size == 1:
        return SoloCommunicator()
    return ENGINES[name](asked)


def _auto(asked: Asked) -> Communicator:
    """Choose for each call: shared memory for CPU tensors of the ranks of one host."""
    import torch

    from ronde.collectives.engines.shared_memory import SharedMemoryCommunicator

    claim = asked.claim
    if claim.local_size != claim.size:
        return _torch_distributed(asked)
    store = meet(claim, asked.meeting_timeout_s)
    try:
        first = SharedMemoryCommunicator(
            PrefixStore("shared_memory", store),
            claim.rank,
            claim.size,
            timeout_s=asked.timeout_s,
        )
    except CollectiveError as error:  # on all ranks, or none
        if claim.rank == 0:
            _logger.warning("Gloo moves the tensors, for %s", error)
        return _torch_distributed(asked)
    has_cuda = torch.tensor([float(torch.cuda.is_available())])
    first.all_reduce(has_cuda, ReduceOp.MAX).wait()

    def connect(name: str, communicator: str) -> Communicator:
        return _torch_distributed(asked, PrefixStore(f"{name}/{communicator}", store))

    def choose(collective: str, num_bytes: int | None, device: str) -> str:
        del collective, num_bytes
        return "shared_memory" if device == "cpu" else "nccl"

    others = ["nccl"] if has_cuda.item() else []
    return RoutedCommunicator(first, choose, connect, others=others)


def _torch_distributed(asked: Asked, store: Store | None = None) -> Communicator:
    from ronde.collectives.engines.torch_distributed import (
        TorchDistributedCommunicator,
    )

    claim = asked.claim
    return TorchDistributedCommunicator(
        store or meet(claim, asked.meeting_timeout_s),
        claim.rank,
        claim.size,
        timeout_s=asked.timeout_s,
        is_one_host=claim.local_size == claim.size,
    )


def _scheduled(asked: Asked) -> Communicator:
    from ronde.collectives.algorithms import find_algorithm
    from ronde.collectives.engines.scheduled import ScheduledCommunicator

    algorithm = find_algorithm(asked.algorithm or "ring")
    return ScheduledCommunicator(_torch_distributed(asked), algorithm.name)


def _hierarchical(asked: Asked) -> Communicator:
    return connect_two_levels(asked, socket.gethostname())


def connect_two_levels(asked: Asked, host: str) -> Communicator:
    """Connect each host's ranks by shared memory, and the hosts by Gloo; collective.

    Args:
        asked: What is asked for; an algorithm is followed between the hosts.
        host: The name of this rank's host.
    """
    from ronde.collectives.algorithms import find_algorithm
    from ronde.collectives.engines.hierarchical import HierarchicalCommunicator, Places

    if asked.algorithm:
        find_algorithm(asked.algorithm)
    store = meet(asked.claim, asked.meeting_timeout_s)
    world = _torch_distributed(asked, PrefixStore("world", store))
    places = Places.from_hosts(exchange_hosts(world, host))
    index, place = places.of(asked.claim.rank)
    local = _connect_host(
        asked, PrefixStore(f"host{index}", store), place, len(places.ranks[index])
    )
    cross = None
    if places.is_even or place == 0:
        column = PrefixStore(f"place{place}", store)
        cross = _connect_hosts(asked, column, index, places.num_hosts)
    return HierarchicalCommunicator(world, local, cross, places)


def _connect_host(asked: Asked, store: Store, place: int, size: int) -> Communicator:
    """Connect the ranks of one host."""
    from ronde.collectives.engines.shared_memory import SharedMemoryCommunicator

    if size == 1:
        return SoloCommunicator()
    try:
        return SharedMemoryCommunicator(
            PrefixStore("shared_memory", store), place, size, timeout_s=asked.timeout_s
        )
    except CollectiveError as error:  # on all ranks of the host, or none
        if place == 0:
            _logger.warning("Gloo moves the tensors on this host, for %s", error)
        claim = replace(asked.claim, rank=place, size=size, local_size=size)
        return _torch_distributed(replace(asked, claim=claim), store)


def _connect_hosts(asked: Asked, store: Store, index: int, size: int) -> Communicator:
    """Connect one rank of each host."""
    from ronde.collectives.engines.scheduled import ScheduledCommunicator

    if size == 1:
        return SoloCommunicator()
    is_one_host = asked.claim.local_size == asked.claim.size
    claim = replace(
        asked.claim, rank=index, size=size, local_size=size if is_one_host else 1
    )
    cross = _torch_distributed(replace(asked, claim=claim), store)
    if not asked.algorithm:
        return cross
    return ScheduledCommunicator(cross, asked.algorithm)


def _shared_memory(asked: Asked) -> Communicator:
    from ronde.collectives.engines.shared_memory import SharedMemoryCommunicator

    claim = asked.claim
    return SharedMemoryCommunicator(
        meet(claim, asked.meeting_timeout_s),
        claim.rank,
        claim.size,
        timeout_s=asked.timeout_s,
    )


def _mpi(asked: Asked) -> Communicator:
    from ronde.collectives.engines.mpi import connect_world

    return connect_world(asked.claim.rank, asked.claim.size, timeout_s=asked.timeout_s)


ENGINES: Mapping[str, Callable[[Asked], Communicator]] = MappingProxyType(
    {
        "auto": _auto,
        "shared_memory": _shared_memory,
        "gloo": _torch_distributed,
        "nccl": _torch_distributed,
        "mpi": _mpi,
        "scheduled": _scheduled,
        "hierarchical": _hierarchical,
    }
)
"""How a rank connects by each engine. ``gloo`` and ``nccl`` are one engine, which takes
the backend by the tensor's device."""
