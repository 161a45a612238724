"""Collectives between ranks: the communicator, its engines and the rendezvous."""

from ronde.collectives.communicator import Communicator
from ronde.collectives.connections import Connections, connect
from ronde.collectives.engine import PollCallback, ReduceOp, Work
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
    "PollCallback",
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
            "ALGORITHMS Action Chunks Round Schedule ScheduleStep find_algorithm"
        ),
        "connections": (
            "ENGINES EngineConfig PeerInfo choose_engine connect_auto two_levels"
        ),
        "engine": "Engine ErrorContext",
        "engines.mpi": "MPI connect_world",
        "engines.scheduled": "ScheduledEngine ScheduledMessage compile_program",
        "engines.shared_memory.engine": "SharedMemoryEngine",
        "engines.shared_memory.waiting": "Contention",
        "engines.solo": "SoloEngine",
        "engines.torch_distributed": "Groups TorchDistributedEngine",
        "rendezvous": (
            "find_launcher join_at open_store socket_name socket_prefix step_ports"
        ),
        "scope": "ABORTING AbortScope",
        "store": "RendezvousStore remote_store store_at",
    },
)
