"""From a rank's place to a communicator: the one place where an engine is chosen."""

import json
import logging
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, Store

from ronde.collectives.choice import (
    Choice,
    EngineTable,
    TableKey,
    default_table,
    load,
)
from ronde.collectives.communicator import Communicator, Routes
from ronde.collectives.engine import Engine, ErrorContext
from ronde.collectives.engines.solo import SoloEngine
from ronde.collectives.objects import (
    all_gather_json,
    broadcast_json,
    exchange_hosts,
)
from ronde.collectives.rendezvous import meet
from ronde.collectives.scope import AbortScope
from ronde.collectives.store import clone_of
from ronde.errors import UsageError
from ronde.plain_values import from_plain
from ronde.world import Launcher, RankInfo
from ronde.world.environment import read_cache_directory

DEFAULT_TIMEOUT_S = 1800.0  # rank 0 may evaluate or save meanwhile
_MEETING_TIMEOUT_S = 300.0
_AUTO = "auto"
_logger = logging.getLogger("ronde")


class PeerFacts(NamedTuple):
    """What the others must know of a rank to choose engines alike."""

    host: str
    has_cuda: bool


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is asked for, and where its ranks meet."""

    info: RankInfo
    timeout_s: float
    algorithm: str = ""
    store: Store | None = None  # where the ranks meet; None: where ``info`` says
    ranks: tuple[int, ...] = ()  # which of the job's ranks they are; empty for all
    scope: AbortScope | None = None  # None: nobody breaks off
    peers: tuple[PeerFacts, ...] = ()  # of all ranks; empty where they must be asked

    def meet(self) -> Store:
        if self.store is not None:
            return self.store
        return meet(self.info, min(self.timeout_s, _MEETING_TIMEOUT_S), self.scope)

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
        info: This rank's place among the others.
        timeout_s: How long a collective may wait for another rank; this, at most 300 s.
        engine: One of ``ENGINES``, equal on all ranks; empty takes ``info``'s.
        algorithm: The schedule to follow, for engines that have several; empty takes
            ``info``'s.

    Raises:
        UsageError: There is no such engine, or what it needs is not installed.
        WorldError: The ranks are on several hosts, and it is unknown where to meet.
        CollectiveError: Not all ranks came in time, or the port is in use.
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
    """Connect ranks that have a store, empty under the keys used here; collective.

    The other arguments, and what is raised, are those of ``connect``.
    """
    from ronde.collectives.engines.shared_memory.shared_state import through_store

    own = PeerFacts(socket.gethostname(), torch.cuda.is_available())
    peers = [own]
    if size > 1:
        limit_s = min(timeout_s, _MEETING_TIMEOUT_S)
        with ErrorContext("meeting", rank, size, limit_s):
            exchange = through_store(PrefixStore("hosts", store), rank, size, limit_s)
            texts = exchange(json.dumps(own).encode())
            peers = [PeerFacts(*json.loads(text)) for text in texts]
    here = [other for other in range(size) if peers[other].host == own.host]
    local_rank = here.index(rank)
    info = RankInfo(Launcher.PLAIN, rank, size, local_rank, len(here))
    name, config = _config(info, timeout_s, engine, algorithm)
    return _connect(name, replace(config, store=store, peers=tuple(peers)))


class Connections:
    """Makes communicators of all ranks of a job, and of some of them."""

    def __init__(
        self,
        info: RankInfo,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        engine: str = "",
        algorithm: str = "",
        scope: AbortScope | None = None,
    ) -> None:
        """Meet the other ranks; collective. The arguments are those of ``connect``.

        What is connected can be broken off by the ``scope``.
        """
        self.info = info
        self.scope = scope or AbortScope()
        self._engine, config = _config(info, timeout_s, engine, algorithm)
        self._config = replace(config, scope=scope)
        self._store = self._config.meet() if info.size > 1 else None

    def connect(
        self, name: str, ranks: Sequence[int], hosts: Sequence[str] = ()
    ) -> Communicator:
        """Connect these ranks; in the communicator ``ranks[i]`` is rank i; collective.

        Args:
            name: Equal on all of them and used once.
            ranks: Ascending; this one is among them.
            hosts: The host of every rank of the job, where it is known.
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
        """Return the same with its own connection to the store: see ``clone_of``."""
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
        return _connect_by_table(config)
    return Communicator(ENGINES[name](config))


def _connect_by_table(config: EngineConfig) -> Communicator:
    """Connect by what suits most calls, and by other engines when they are needed."""
    store = config.meet()
    make_first = _shared_memory_or_gloo if config.is_one_host else _torch_distributed
    first = make_first(config.at(store, "first"))
    everybody = Communicator(first)
    own = PeerFacts(socket.gethostname(), torch.cuda.is_available())
    peers = config.peers or all_gather_json(everybody, own)
    hosts, has_cuda = zip(*peers, strict=True)
    table = agree_on_table(everybody, hosts)

    def choose(collective: str, num_bytes: int | None, device: str) -> str:
        label = str(table.choose(collective, num_bytes, device))
        # Gloo's engine has NCCL too, and stands in where memory is not shared.
        stands_in = label in ("shared_memory", "nccl")
        return "gloo" if first.name == "gloo" and stands_in else label

    def connect_other(label: str, name: str) -> Engine:
        choice = Choice.of(label)
        own = replace(config, algorithm=choice.algorithm)
        return ENGINES[choice.engine](own.at(clone_of(store), f"{label}/{name}"))

    nccl = None
    if any(has_cuda) and first.name != "gloo":
        nccl = connect_other("nccl", "0")
    return Communicator(first, Routes(first, choose, connect_other, nccl))


def agree_on_table(communicator: Communicator, hosts: Sequence[str]) -> EngineTable:
    """Return one table on all ranks, rank 0's where it has measured one; collective."""
    ranks_of = Counter(hosts)

    def find() -> dict[str, Any] | None:
        table, note = load(TableKey.here(ranks_of), read_cache_directory())
        if note:
            _logger.warning("%s", note)
        return table and asdict(table)

    found = broadcast_json(communicator, find, 0)
    if found is None:
        return default_table([*ranks_of.values()])
    return from_plain(EngineTable, found)


# How a rank connects by each engine. Modules are imported when they are asked for: some
# need a library that is not always there.


def _torch_distributed(config: EngineConfig) -> Engine:
    from ronde.collectives.engines.torch_distributed import TorchDistributedEngine

    place, is_one_host = (config.info.rank, config.info.size), config.is_one_host
    return TorchDistributedEngine(
        config.meet(), *place, timeout_s=config.timeout_s, is_one_host=is_one_host
    )


def _shared_memory(config: EngineConfig) -> Engine:
    from ronde.collectives.engines.shared_memory import SharedMemoryEngine

    place = config.info.rank, config.info.size
    return SharedMemoryEngine(config.meet(), *place, timeout_s=config.timeout_s)


def _shared_memory_or_gloo(config: EngineConfig) -> Engine:
    from ronde.collectives.engines.shared_memory.shared_state import NoSharedMemoryError

    store = config.meet()
    try:
        return _shared_memory(config.at(store, "shared_memory"))
    except NoSharedMemoryError as error:  # on all ranks, or none
        if config.info.rank == 0:
            _logger.warning("Gloo moves the tensors, for %s", error)
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


def _hierarchical(config: EngineConfig) -> Engine:
    return two_levels(config, socket.gethostname())


def two_levels(config: EngineConfig, host: str) -> Engine:
    """Connect each host's ranks by shared memory, and the hosts by Gloo; collective."""
    from ronde.collectives.algorithms import find_algorithm
    from ronde.collectives.engines.hierarchical import (
        EvenHostsEngine,
        HostGroups,
        LeadersEngine,
    )

    if config.algorithm:
        find_algorithm(config.algorithm)
    store = config.meet()
    world = _torch_distributed(config.at(store, "world"))
    groups = HostGroups.from_hosts(exchange_hosts(Communicator(world), host))
    index, place = groups.of(config.info.rank)
    size = len(groups.ranks[index])
    info = config.info._replace(rank=place, size=size, local_size=size)
    own_host = replace(config, info=info).at(store, f"host{index}")
    local = SoloEngine() if size == 1 else _shared_memory_or_gloo(own_host)
    cross = None
    if groups.is_even or place == 0:
        size = len(groups.ranks)
        local_size = size if config.is_one_host else 1
        info = config.info._replace(rank=index, size=size, local_size=local_size)
        column = replace(config, info=info).at(store, f"place{place}")
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
        "hierarchical": _hierarchical,
    }
)
"""How a rank connects by each engine. ``gloo`` and ``nccl`` are one engine, which takes
the backend by the tensor's device."""
