"""The engine ``auto``: each call goes to the engine that suits it."""

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ronde.collectives.asked import Asked
from ronde.collectives.choice import Choice, Table
from ronde.collectives.communicator import Communicator, ReduceOp
from ronde.collectives.makers import shared_memory_or_gloo, torch_distributed
from ronde.collectives.objects import broadcast_json, exchange_hosts
from ronde.collectives.routing import RoutedCommunicator
from ronde.collectives.tuned import find_table, table_from_plain, table_to_plain
from ronde.world.environment import read_cache_directory

_logger = logging.getLogger("ronde")
Make = Callable[[Asked], Communicator]


def connect_automatically(asked: Asked, makers: Mapping[str, Make]) -> Communicator:
    """Connect by what suits most calls, and by other engines when they are needed.

    Collective. The engine for a call comes from rank 0's table: the one that ``ronde
    bench --tune`` has measured for these hosts, ranks and versions, else sane rules.

    Args:
        asked: What is asked for.
        makers: How each engine is made.
    """
    store = asked.meet()
    is_one_host = asked.claim.local_size == asked.claim.size
    first_make = shared_memory_or_gloo if is_one_host else torch_distributed
    first = first_make(asked.at(store, "first"))
    table = agree_on_table(first)

    def choose(collective: str, num_bytes: int | None, device: str) -> str:
        label = str(table.choose(collective, num_bytes, device))
        # Gloo's communicator has NCCL too, and stands in where memory is not shared.
        stands_in = label in ("shared_memory", "nccl")
        return "gloo" if first.engine == "gloo" and stands_in else label

    def connect(label: str, communicator: str) -> Communicator:
        choice = Choice.of(label)
        own = replace(asked, algorithm=choice.algorithm)
        return makers[choice.engine](own.at(store, f"{label}/{communicator}"))

    has_cuda = torch.tensor([float(torch.cuda.is_available())], device="cpu")
    first.all_reduce(has_cuda, ReduceOp.MAX).wait()
    pairs = [choose("send", None, "cpu")]
    pairs += [choose("send", None, "cuda")] if has_cuda.item() else []
    others = {name: connect(name, "0") for name in pairs if name != first.engine}
    return RoutedCommunicator(first, choose, connect, others=others)


def agree_on_table(communicator: Communicator) -> Table:
    """Return rank 0's table on all ranks; collective."""
    hosts = exchange_hosts(communicator, socket.gethostname())

    def find() -> dict[str, Any]:
        table, note = find_table(hosts, read_cache_directory())
        if note:
            _logger.warning("%s", note)
        return table_to_plain(table)

    return table_from_plain(broadcast_json(communicator, find, 0))
