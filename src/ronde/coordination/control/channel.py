"""The control channel between coordinators, separate from tensor data.

* Messages of any length go along the edges of a ``Tree``. Messages
  from one neighbour to another arrive exactly once, whole and in order.
* ``send``, ``receive`` and ``find_losses`` are called by one thread at a time, ``wait``
  by several at once, ``wake`` by any thread.
* A wait takes no processor time while no message arrives. Call ``receive`` after
  ``wait``, as messages that have arrived make every ``wait`` return.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from torch.distributed import PrefixStore, Store

from ronde.collectives.engine import ErrorContext
from ronde.collectives.engines.hierarchical import HostGroups
from ronde.collectives.engines.shared_memory.shared_state import (
    ExchangeBytes,
    NoSharedMemoryError,
    through_store,
)
from ronde.collectives.engines.torch_distributed import Groups
from ronde.collectives.store import scope_of
from ronde.coordination.control.doorbell import FAR, NEAR, Doorbell, Waiter
from ronde.coordination.control.gloo import GlooTransport
from ronde.coordination.control.shared_memory import SharedMemoryTransport
from ronde.coordination.messages import Loss, Tree

_logger = logging.getLogger("ronde")
Transport = SharedMemoryTransport | GlooTransport
"""A rank's connections of one kind; each is used by one thread at a time.

After a connection's ``find_loss`` returns a loss, no further message arrives.
"""


class ControlChannel:
    """Sends messages between one rank and its neighbours in a tree.

    Every event of a connection notifies ``waiter``. ``shared`` is the shared memory of
    all ranks if they are on one host.
    """

    def __init__(
        self,
        waiter: Waiter,
        tree: Tree,
        transports: Sequence[Transport] = (),
        shared: SharedMemoryTransport | None = None,
    ) -> None:
        self.tree = tree
        self.shared = shared
        self.waiter = waiter
        self._transports = tuple(transports)
        self._connections = {c.rank: c for t in transports for c in t.connections}
        self.wait, self.wake = waiter.wait, waiter.wake

    def send(self, to: int, message: bytes) -> None:
        """Send a message, or drop it if the neighbour is lost. Never waits.

        A part that does not fit now is sent by a later ``send`` or ``receive``.
        """
        if connection := self._connections.get(to):
            connection.send(message)

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the messages that have arrived, with their senders. Never waits."""
        received: list[tuple[int, bytes]] = []
        self.waiter.read()
        for connection in self._connections.values():
            connection.receive(received)
        return received

    def find_losses(self) -> list[Loss]:
        """Return each lost neighbour once, after all of its messages were received."""
        losses: list[Loss] = []
        for connection in tuple(self._connections.values()):
            loss = connection.find_loss()
            if loss is not None and connection.has_unread():
                # The neighbour ended between writing and notifying.
                self.waiter.doorbell.notify()
            elif loss is not None:
                losses.append(loss)
                del self._connections[connection.rank]
        return losses

    def close(self) -> None:
        """Close the connections; every ``wait`` returns. May be called repeatedly.

        Messages already sent are delivered if that needs no waiting for the receiver.
        """
        transports, self._transports = self._transports, ()
        self._connections = {}
        for transport in transports:
            transport.close()
        self.waiter.close()


def connect_channel(
    store: Store | None,
    rank: int,
    hosts: Sequence[str],
    *,
    timeout_s: float,
    exchange: ExchangeBytes | None = None,
) -> ControlChannel:
    """Connect this rank to its neighbours in ``Tree.of_hosts(hosts)``; collective.

    Ranks of a host exchange messages through shared memory, hosts through Gloo. If the
    ranks of a host cannot share memory, a warning is logged and they use Gloo, too.

    Args:
        store: Empty under the keys used here; None for one rank.
        exchange: Given if all ranks are on one host; it is faster than the store.

    Raises:
        CollectiveError: Not all ranks connected in time.
    """
    tree = Tree.of_hosts(hosts)[rank]
    if store is None or len(hosts) == 1:
        return ControlChannel(Waiter(Doorbell.private(), FAR), tree)
    groups_by_host = HostGroups.from_hosts(hosts)
    host, local_rank = groups_by_host.of(rank)
    ranks = groups_by_host.ranks[host]
    leaders = [each[0] for each in groups_by_host.ranks]
    on_host = PrefixStore(f"host{host}", store)
    transports: list[Transport] = []
    scope = scope_of(store)
    with (
        ExitStack() as undoing,
        ErrorContext("connecting", rank, len(hosts), timeout_s, scope),
    ):
        undoing.callback(lambda: [each.close() for each in transports])
        on_store = through_store(on_host, local_rank, len(ranks), timeout_s)
        local = _share_memory(exchange or on_store, ranks, tree)
        doorbell = local.doorbell if local else Doorbell.private()
        if local is not None:
            transports.append(local)
            if local_rank:
                local.open()
            else:
                # First, as this process may serve the store that other ranks need.
                local.await_neighbours(timeout_s, scope)
        near: list[tuple[Store, Sequence[int]]] = []
        if len(ranks) > 1 and local is None:
            near.append((on_host, ranks))
        if len(leaders) > 1 and local_rank == 0:
            near.append((PrefixStore("hosts", store), leaders))
        for common, others in near:
            groups = Groups(
                PrefixStore("gloo", common),
                others.index(rank),
                len(others),
                timeout_s,
                is_one_host=others is ranks,
            )
            neighbours = {
                others.index(other): (other, hosts[other])
                for other in tree.neighbours(others)
            }
            transports.append(GlooTransport(groups, neighbours, doorbell))
        if local is not None:
            if local_rank:
                local.await_neighbours(timeout_s, scope)
            else:
                local.open()
        undoing.pop_all()
    shared = local if len(leaders) == 1 else None
    waiter = Waiter(doorbell, FAR if shared is None else NEAR)
    return ControlChannel(waiter, tree, transports, shared)


def _share_memory(
    exchange: ExchangeBytes, ranks: Sequence[int], tree: Tree
) -> SharedMemoryTransport | None:
    if len(ranks) == 1:
        return None
    try:
        return SharedMemoryTransport(exchange, ranks, tree)
    except NoSharedMemoryError as error:  # on all ranks of the host, or none
        if ranks[0] == tree.rank:
            _logger.warning("Falling back to Gloo for coordination messages: %s", error)
        return None
