"""Collectives between ranks: the communicator, its engines and the rendezvous."""

from typing import TYPE_CHECKING

from ronde.lazy_exports import lazy_exports

if TYPE_CHECKING:  # lazy, as schedules and prices do not need torch
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
        "communicator": "Communicator",
        "connections": (
            "Connections ENGINES EngineConfig PeerInfo choose_engine connect "
            "connect_auto two_levels"
        ),
        "engine": "Engine ErrorContext PollCallback ReduceOp Work",
        "engines.mpi": "MPI connect_world",
        "engines.scheduled": "ScheduledEngine ScheduledMessage compile_program",
        "engines.shared_memory.engine": "SharedMemoryEngine",
        "engines.shared_memory.waiting": "Contention",
        "engines.solo": "SoloEngine",
        "engines.torch_distributed": "Groups TorchDistributedEngine",
        "fitting": "LinkFit fit_link",
        "objects": (
            "all_gather_json all_gather_object broadcast_object exchange_hosts"
        ),
        "pricing": ("ALL_REDUCES LinkCost LinkCosts Seconds all_reduce_s price"),
        "rendezvous": (
            "find_launcher join_at open_store socket_name socket_prefix step_ports"
        ),
        "scope": "ABORTING AbortScope",
        "shapes": "rows",
        "store": "RendezvousStore remote_store store_at",
    },
)
