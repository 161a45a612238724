"""How coordinators talk; it never shares a path with the data.

* Messages go along the edges of a ``Tree``. Those from one neighbour to another arrive
  once, whole and in order; any length.
* ``send``, ``receive`` and ``find_losses`` are called by one thread at a time, ``wait``
  by several at once, ``wake`` by any.
* Whoever waits costs nothing: no processor time while nothing arrives. After a ``wait``
  comes a ``receive``; until then what has arrived makes every ``wait`` return.
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
"""What carries some of a rank's connections, each used by one thread at a time.

Nothing arrives any more that had not when a connection's ``find_loss`` returned a loss.
"""


class ControlChannel:
    """Carries messages between one rank and its neighbours in a tree.

    All that happens on a connection rings the doorbell of ``waiter``. ``shared`` is the
    memory of all ranks, where all of them are on one host.
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
        self.add_waiter, self.remove_waiter = waiter.add_waiter, waiter.remove_waiter

    def send(self, to: int, message: bytes) -> None:
        """Send at once, or what does not fit yet with a later ``send`` or ``receive``.

        To a neighbour that is gone it is dropped.
        """
        if connection := self._connections.get(to):
            connection.send(message)

    def receive(self) -> list[tuple[int, bytes]]:
        """Return what has arrived: pairs of sender and message. Never waits."""
        received: list[tuple[int, bytes]] = []
        self.waiter.read()
        for connection in self._connections.values():
            connection.receive(received)
        return received

    def find_losses(self) -> list[Loss]:
        """Return the neighbours that are gone, each once, all its messages received."""
        losses: list[Loss] = []
        for connection in tuple(self._connections.values()):
            loss = connection.find_loss()
            if loss is not None and connection.has_unread():
                # It may have ended after it wrote and before it notified.
                self.waiter.doorbell.notify()
            elif loss is not None:
                losses.append(loss)
                del self._connections[connection.rank]
        return losses

    def close(self) -> None:
        """Announce it to the neighbours; calls may be repeated. Every ``wait`` returns.

        What was sent before still arrives, where that needs no waiting for receivers.
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

    Shared memory carries what stays on a host, Gloo what goes between hosts, and both
    where ranks of a host cannot share memory, which is logged as a warning. The ranks
    meet at ``store``, empty under the keys used here; None for one rank. Where all are
    on one host, an ``exchange`` of theirs is faster.

    Raises:
        CollectiveError: Not all ranks came in time.
    """
    tree = Tree.of_hosts(hosts)[rank]
    if store is None or len(hosts) == 1:
        return ControlChannel(Waiter(Doorbell.private(), FAR), tree)
    places = HostGroups.from_hosts(hosts)
    host, place = places.of(rank)
    ranks, leaders = places.ranks[host], [each[0] for each in places.ranks]
    on_host = PrefixStore(f"host{host}", store)
    transports: list[Transport] = []
    scope = scope_of(store)
    with (
        ExitStack() as undoing,
        ErrorContext("connecting", rank, len(hosts), timeout_s, scope),
    ):
        undoing.callback(lambda: [each.close() for each in transports])
        on_store = through_store(on_host, place, len(ranks), timeout_s)
        local = _share_memory(exchange or on_store, ranks, tree)
        doorbell = local.doorbell if local else Doorbell.private()
        if local is not None:
            transports.append(local)
            if place:
                local.open()
            else:
                # The store may be this process's, and go with it at any time.
                local.await_neighbours(timeout_s, scope)
        near: list[tuple[Store, Sequence[int]]] = []
        if len(ranks) > 1 and local is None:
            near.append((on_host, ranks))
        if len(leaders) > 1 and place == 0:
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
            if place:
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
    """Return what carries the messages of a host's ranks; None if memory cannot."""
    if len(ranks) == 1:
        return None
    try:
        return SharedMemoryTransport(exchange, ranks, tree)
    except NoSharedMemoryError as error:  # on all ranks of the host, or none
        if ranks[0] == tree.rank:
            _logger.warning("Gloo carries the coordination messages: %s", error)
        return None
