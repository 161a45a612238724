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
