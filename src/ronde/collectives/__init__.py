"""Tensors between ranks: the interface, its engines, and how ranks find each other."""

from ronde.collectives.communicator import (
    Communicator,
    Done,
    Look,
    ReduceOp,
    Work,
    rows,
)
from ronde.collectives.connection import connect
from ronde.collectives.connections import Connections
from ronde.collectives.objects import (
    all_gather_json,
    all_gather_object,
    broadcast_object,
    exchange_hosts,
)

__all__ = [
    "Communicator",
    "Connections",
    "Done",
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
