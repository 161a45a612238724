"""Tensors between ranks: the interface, its engines, and how ranks find each other."""

from ronde.collectives.communicator import Communicator
from ronde.collectives.connections import Connections, connect
from ronde.collectives.engine import Look, ReduceOp, Work
from ronde.collectives.objects import (
    all_gather_json,
    all_gather_object,
    broadcast_object,
    exchange_hosts,
)
from ronde.collectives.shapes import rows
from ronde.lazy_exports import lazy_exports

__all__ = [
    "Communicator",
    "Connections",
    "Look",
    "ReduceOp",
    "Work",
    "all_gather_json",
    "all_gather_object",
    "broadcast_object",
    "connect",
    "exchange_hosts",
    "rows",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "adasum": "CHUNK adasum_all_reduce",
        "algorithms": (
            "ALGORITHMS Action Chunks Load Round Schedule ScheduleStep find_algorithm"
        ),
        "choice": (
            "CLASS_LIMITS_BYTES CLASS_SAMPLES_BYTES COLLECTIVES Choice EngineTable "
            "SIZED TableKey UNSIZED default_table explain from_json load save "
            "size_class to_json"
        ),
        "connections": "ENGINES EngineConfig two_levels",
        "engine": "Engine ErrorContext",
        "engines.hierarchical": "HostGroups",
        "engines.mpi": "MPI connect_world",
        "engines.scheduled": "ScheduledEngine ScheduledMessage compile_program",
        "engines.shared_memory.engine": "SharedMemoryEngine",
        "engines.shared_memory.shared_state": "through_store",
        "engines.shared_memory.waiting": "Contention",
        "engines.solo": "SoloEngine",
        "engines.torch_distributed": "Groups TorchDistributedEngine",
        "rendezvous": (
            "find_launcher join_at meet socket_name socket_prefix step_ports"
        ),
        "scope": "ABORTING AbortScope",
        "store": "RendezvousStore store_at store_beyond",
    },
)
