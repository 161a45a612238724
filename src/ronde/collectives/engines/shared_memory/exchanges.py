"""How ranks tell each other where their segments are."""

from datetime import timedelta

import torch
from torch.distributed import Store

from ronde.collectives.engine import Engine
from ronde.collectives.engines.shared_memory.segment import (
    ExchangeBytes,
    pack,
    unpack,
)


def through_store(
    store: Store, rank: int, size: int, timeout_s: float
) -> ExchangeBytes:
    """Return an exchange by way of a store, for ranks that have nothing else yet.

    Args:
        store: Empty under the keys used here.
        rank: This process.
        size: Number of processes.
        timeout_s: How long to wait for the others, each time.
    """
    limit = timedelta(seconds=timeout_s)
    turn = 0

    def exchange(message: bytes) -> list[bytes]:
        nonlocal turn
        turn += 1
        keys = [f"{turn}/{other}" for other in range(size)]
        store.set(keys[rank], message.hex())
        store.wait(keys, limit)
        told = [bytes.fromhex(text.decode()) for text in store.multi_get(keys)]
        if turn > 1:
            # Whoever has come to this turn has read all of the one before.
            store.delete_key(f"{turn - 1}/{rank}")
        return told

    return exchange


def among(engine: Engine) -> ExchangeBytes:
    """Return an exchange by way of an engine of the same ranks."""

    def exchange(message: bytes) -> list[bytes]:
        own = torch.frombuffer(pack(message), dtype=torch.int64)
        gathered = engine.gather_numbers(own, "connecting")
        return [unpack(each.numpy().tobytes()) for each in gathered]

    return exchange
