"""Connect ranks: choose and build the engines of a communicator."""

import json
import logging
import socket
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch.distributed import PrefixStore, Store

from ronde.collectives.communicator import (
    MEDIUM_BYTES,
    SMALL_BYTES,
    Communicator,
    Routes,
)
from ronde.collectives.engine import Engine, ErrorContext
from ronde.collectives.engines.solo import SoloEngine
from ronde.collectives.objects import all_gather_json, exchange_hosts
from ronde.collectives.rendezvous import open_store
from ronde.collectives.scope import AbortScope
from ronde.collectives.store import clone_of
from ronde.errors import UsageError
from ronde.world import Launcher, RankInfo

DEFAULT_TIMEOUT_S = 1800.0  # long, as rank 0 may evaluate or save meanwhile
_RENDEZVOUS_TIMEOUT_S = 300.0
_AUTO = "auto"
_logger = logging.getLogger("ronde")


class PeerInfo(NamedTuple):
    """The properties of a rank that determine the choice of engines."""

    host: str
    has_cuda: bool


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The arguments of an engine, and the store where its ranks rendezvous."""

    info: RankInfo
    timeout_s: float
    algorithm: str = ""
    store: Store | None = None  # None: the job's store
    ranks: tuple[int, ...] = ()  # ranks of the job in the group; empty for all
    scope: AbortScope | None = None  # None: never aborted
    peers: tuple[PeerInfo, ...] = ()  # all ranks'; empty if unknown

    def open_store(self) -> Store:
        if self.store is not None:
            return self.store
        timeout_s = min(self.timeout_s, _RENDEZVOUS_TIMEOUT_S)
        return open_store(self.info, timeout_s, self.scope)

    def at(self, store: Store, name: str) -> "EngineConfig":
        return replace(self, store=PrefixStore(name, store))

    @property
    def is_one_host(self) -> bool:
        return self.info.local_size == self.info.size


def connect(
    info: RankInfo,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    engine: str = "",
    algorithm: str = "",
) -> Communicator:
    """Connect this rank to all others; collective.

    Args:
        timeout_s: The longest time that a collective waits for another rank.
            Connecting takes at most 300 s.
        engine: ``auto`` or one of ``ENGINES``, equal on all ranks; if empty, the
            engine of ``info``.
        algorithm: For engines with several algorithms; if empty, that of ``info``.

    Raises:
        UsageError: The engine is unknown, or a library that it needs is missing.
        WorldError: The ranks are on several hosts without a rendezvous address.
        CollectiveError: Not all ranks connected in time, or the port is in use.
    """
    return _connect(*_config(info, timeout_s, engine, algorithm))


def connect_at(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    engine: str = _AUTO,
    algorithm: str = "",
) -> Communicator:
    """Connect ranks through a shared store; collective.

    The store must be empty under the keys used here. The other arguments and the
    errors are those of ``connect``.
    """
    from ronde.collectives.engines.shared_memory.shared_state import through_store

    own = PeerInfo(socket.gethostname(), torch.cuda.is_available())
    peers = [own]
    if size > 1:
        limit_s = min(timeout_s, _RENDEZVOUS_TIMEOUT_S)
        with ErrorContext("rendezvous", rank, size, limit_s):
            exchange = through_store(PrefixStore("hosts", store), rank, size, limit_s)
            texts = exchange(json.dumps(own).encode())
            peers = [PeerInfo(*json.loads(text)) for text in texts]
    here = [other for other in range(size) if peers[other].host == own.host]
    local_rank = here.index(rank)
    info = RankInfo(Launcher.PLAIN, rank, size, local_rank, len(here))
    name, config = _config(info, timeout_s, engine, algorithm)
    return _connect(name, replace(config, store=store, peers=tuple(peers)))


class Connections:
    """Makes communicators of all ranks of a job, or of a subset."""

    def __init__(
        self,
        info: RankInfo,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        engine: str = "",
        scope: AbortScope | None = None,
    ) -> None:
        """Rendezvous with the other ranks; collective. Arguments as for ``connect``.

        Aborting ``scope`` aborts every communicator made here.
        """
        self.info = info
        self.scope = scope or AbortScope()
        self._engine, config = _config(info, timeout_s, engine, "")
        self._config = replace(config, scope=scope)
        self._store = self._config.open_store() if info.size > 1 else None

    def connect(
        self, name: str, ranks: Sequence[int], hosts: Sequence[str] = ()
    ) -> Communicator:
        """Connect the given ranks of the job; collective over these ranks.

        Args:
            name: A new name for the group, equal on all of these ranks.
            ranks: Ascending; includes this rank. ``ranks[i]`` becomes rank i.
            hosts: The host of every rank of the job, if known.
        """
        info = self.info
        is_part = len(ranks) < info.size
        if is_part:
            here = {hosts[info.rank]} if hosts else set[str]()
            local = [r for r in ranks if hosts and hosts[r] in here]
            is_one_host = info.local_size == info.size or len(local) == len(ranks)
            rank, size = list(ranks).index(info.rank), len(ranks)
            local_size = size if is_one_host else max(len(local), 1)
            info = info._replace(rank=rank, size=size, local_size=local_size)
        some = tuple(ranks) if is_part else ()
        config = replace(self._config, info=info, store=self.store(name), ranks=some)
        return _connect(self._engine, config)

    def clone(self) -> "Connections":
        """Return a copy with its own connection to the store: see ``clone_of``."""
        other = copy(self)
        if self._store is not None:
            other._store = clone_of(self._store)  # noqa: SLF001  another of this class
        return other

    def store(self, name: str) -> Store | None:
        return None if self._store is None else PrefixStore(name, self._store)


def _config(
    info: RankInfo, timeout_s: float, engine: str, algorithm: str
) -> tuple[str, EngineConfig]:
    name = engine or info.engine
    if name not in (*ENGINES, _AUTO):
        known = ", ".join((_AUTO, *ENGINES))
        raise UsageError(f"engine must be one of {known}, got {name!r}.")
    return name, EngineConfig(info, timeout_s, algorithm or info.algorithm)


def _connect(name: str, config: EngineConfig) -> Communicator:
    if config.info.size == 1:
        return Communicator(SoloEngine())
    if name == _AUTO:
        return connect_auto(config)
    return Communicator(ENGINES[name](config))


def choose_engine(
    ranks_per_host: Collection[int], call: str, num_bytes: int | None, device_type: str
) -> str:
    """Return the engine that ``auto`` uses for a tensor.

    All ranks must choose the same engine, or they wait for each other for ever. So
    ``num_bytes`` is None for a collective whose tensors may differ in size.
    """
    if device_type != "cpu":
        return "nccl"
    if len(ranks_per_host) == 1:
        return "shared_memory"
    if num_bytes is None or num_bytes <= SMALL_BYTES:
        return "gloo"
    if max(ranks_per_host) > 1:
        return "hierarchical"  # each byte crosses the network once per host
    # Gloo's all-to-all sends and receives alternately, a ring does both at once.
    is_long = call == "reduce_scatter" and num_bytes > MEDIUM_BYTES
    return "scheduled" if is_long else "gloo"


def connect_auto(config: EngineConfig) -> Communicator:
    """Connect one engine now, and each other engine when a call first needs it."""
    store = config.open_store()
    make_first = _shared_memory_or_gloo if config.is_one_host else _torch_distributed
    first = make_first(config.at(store, "first"))
    own = PeerInfo(socket.gethostname(), torch.cuda.is_available())
    peers = config.peers or all_gather_json(Communicator(first), own)
    hosts, has_cuda = zip(*peers, strict=True)
    ranks_per_host = Counter(hosts).values()

    def choose(call: str, num_bytes: int | None, device_type: str) -> str:
        name = choose_engine(ranks_per_host, call, num_bytes, device_type)
        # Gloo's engine includes NCCL, and serves ranks that cannot share memory.
        is_replaced = first.name == "gloo" and name in ("shared_memory", "nccl")
        return "gloo" if is_replaced else name

    def connect_other(name: str, communicator: str) -> Engine:
        other = replace(config, algorithm="")
        return ENGINES[name](other.at(clone_of(store), f"{name}/{communicator}"))

    nccl = None
    if any(has_cuda) and first.name != "gloo":
        nccl = connect_other("nccl", "0")
    return Communicator(first, Routes(first, choose, connect_other, nccl))


# Engines are imported when first used: some need a library that may be missing.


def _torch_distributed(config: EngineConfig) -> Engine:
    from ronde.collectives.engines.torch_distributed import TorchDistributedEngine

    return TorchDistributedEngine(
        config.open_store(),
        config.info.rank,
        config.info.size,
        timeout_s=config.timeout_s,
        is_one_host=config.is_one_host,
    )


def _shared_memory(config: EngineConfig) -> Engine:
    from ronde.collectives.engines.shared_memory import SharedMemoryEngine

    info, store = config.info, config.open_store()
    return SharedMemoryEngine(store, info.rank, info.size, timeout_s=config.timeout_s)


def _shared_memory_or_gloo(config: EngineConfig) -> Engine:
    from ronde.collectives.engines.shared_memory.shared_state import NoSharedMemoryError

    store = config.open_store()
    try:
        return _shared_memory(config.at(store, "shared_memory"))
    except NoSharedMemoryError as error:  # on all ranks, or none
        if config.info.rank == 0:
            _logger.warning("Falling back to Gloo for collectives: %s", error)
        return _torch_distributed(config.at(store, "gloo"))


def _mpi(config: EngineConfig) -> Engine:
    from ronde.collectives.engines.mpi import connect_some, connect_world

    info = config.info
    if config.ranks:
        return connect_some(config.ranks, timeout_s=config.timeout_s)
    return connect_world(info.rank, info.size, timeout_s=config.timeout_s)


def _scheduled(config: EngineConfig) -> Engine:
    from ronde.collectives.algorithms import find_algorithm
    from ronde.collectives.engines.scheduled import ScheduledEngine

    algorithm = find_algorithm(config.algorithm or "ring")
    return ScheduledEngine(_torch_distributed(config), algorithm.name)


def two_levels(config: EngineConfig, host: str = "") -> Engine:
    """Connect ranks within hosts by shared memory, hosts by Gloo; collective."""
    from ronde.collectives.algorithms import find_algorithm
    from ronde.collectives.engines.hierarchical import (
        EvenHostsEngine,
        HostGroups,
        LeadersEngine,
    )

    if config.algorithm:
        find_algorithm(config.algorithm)
    store = config.open_store()
    world = _torch_distributed(config.at(store, "world"))
    hosts = exchange_hosts(Communicator(world), host or socket.gethostname())
    groups = HostGroups.from_hosts(hosts)
    index, local_rank = groups.of(config.info.rank)
    size = len(groups.ranks[index])
    info = config.info._replace(rank=local_rank, size=size, local_size=size)
    own_host = replace(config, info=info).at(store, f"host{index}")
    local = SoloEngine() if size == 1 else _shared_memory_or_gloo(own_host)
    cross = None
    if groups.is_even or local_rank == 0:
        size = len(groups.ranks)
        local_size = size if config.is_one_host else 1
        info = config.info._replace(rank=index, size=size, local_size=local_size)
        column = replace(config, info=info).at(store, f"column{local_rank}")
        connect_hosts = _scheduled if config.algorithm else _torch_distributed
        cross = Communicator(SoloEngine() if size == 1 else connect_hosts(column))
    engine = EvenHostsEngine if groups.is_even else LeadersEngine
    return engine(world, Communicator(local), cross, groups)


ENGINES: Mapping[str, Callable[[EngineConfig], Engine]] = MappingProxyType(
    {
        "shared_memory": _shared_memory,
        "gloo": _torch_distributed,
        "nccl": _torch_distributed,
        "mpi": _mpi,
        "scheduled": _scheduled,
        "hierarchical": two_levels,
    }
)
"""Engines by name. ``gloo`` and ``nccl`` are the same engine, which chooses the backend
for the tensor's device."""
