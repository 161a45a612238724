"""From a rank's place to its channel: the one place where links are chosen."""

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from ronde.collectives.engines.shared_memory.segment import Exchange
from ronde.collectives.failures import Scene
from ronde.coordination.control.bell import Bell, Ears
from ronde.coordination.control.channel import Channel
from ronde.coordination.control.linked import LinkedChannel
from ronde.coordination.control.shared_memory import SharedMemoryMedium
from ronde.coordination.tree import Tree


def connect_channel(
    store: Store | None, rank: int, hosts: Sequence[str], *, timeout_s: float
) -> Channel:
    """Connect this rank to its neighbours in the tree of all hosts; collective.

    Args:
        store: Where the ranks meet, empty under the keys used here; None for one rank.
        rank: This process.
        hosts: The host of every rank, in rank order.
        timeout_s: How long this call may wait for any rank.

    Returns:
        A channel along ``Tree.of_hosts(rank, hosts)``.

    Raises:
        CollectiveError: Not all ranks came in time.
    """
    if store is None or len(hosts) == 1:
        return LinkedChannel(Ears(Bell.of_its_own(), is_crowded=False))
    tree = Tree.of_hosts(rank, hosts)
    ranks = tuple(r for r, host in enumerate(hosts) if host == hosts[rank])
    with Scene("connecting", rank, len(hosts), timeout_s).guard():
        own_host = PrefixStore(f"host{ranks[0]}", store)
        exchange = _through(own_host, ranks.index(rank), len(ranks), timeout_s)
        medium = SharedMemoryMedium(
            exchange,
            ranks.index(rank),
            ranks,
            parent=tree.parent,
            children=tree.children,
        )
    return LinkedChannel(Ears(medium.bell, is_crowded=medium.is_crowded), [medium])


def _through(store: Store, index: int, size: int, timeout_s: float) -> Exchange:
    """Return an exchange by way of a store."""
    limit = timedelta(seconds=timeout_s)
    turn = 0

    def exchange(message: bytes) -> list[bytes]:
        nonlocal turn
        turn += 1
        keys = [f"{turn}/{other}" for other in range(size)]
        store.set(keys[index], message.hex())
        store.wait(keys, limit)
        return [bytes.fromhex(text.decode()) for text in store.multi_get(keys)]

    return exchange
