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
from ronde.collectives.engines.shared_memory.segment import through_store
from ronde.collectives.process_groups import Groups
from ronde.coordination.control.doorbell import FAR, NEAR, Doorbell, Waiter
from ronde.coordination.control.gloo import GlooTransport
from ronde.coordination.control.rounds import ExchangeRounds
from ronde.coordination.control.shared_memory import SharedMemoryTransport
from ronde.coordination.control.tree import Loss, Tree
from ronde.errors import CollectiveError

_logger = logging.getLogger("ronde")
Transport = SharedMemoryTransport | GlooTransport
"""What carries some of a rank's connections, and closes them all.

Each is the way to one neighbour and back, used by one thread at a time. Its ``receive``
also sends what was kept. Nothing arrives any more that had not when its ``find_loss``
returned a loss.
"""


class ControlChannel:
    """Carries messages between one rank and its neighbours in a tree.

    All that happens on a connection rings the doorbell, all that waits look at.

    Attributes:
        waiter: How this rank waits for messages.
        rounds: What all ranks share, where all of them are on one host; or None.
    """

    def __init__(
        self,
        waiter: Waiter,
        tree: Tree,
        transports: Sequence[Transport] = (),
        rounds: ExchangeRounds | None = None,
    ) -> None:
        self.tree = tree
        self.rounds = rounds
        self.waiter = waiter
        self._transports = tuple(transports)
        self._connections = {c.rank: c for t in transports for c in t.connections}
        self._losses: list[Loss] = []
        self.wait, self.wake = waiter.wait, waiter.wake
        self.add_waiter, self.remove_waiter = waiter.add_waiter, waiter.remove_waiter

    def send(self, to: int, message: bytes) -> None:
        """Send a message to a neighbour and return at once.

        What does not fit on its way yet is kept and goes off in a later ``receive`` or
        ``send``. To a neighbour that is gone it is dropped.
        """
        connection = self._connections.get(to)
        if connection is not None:
            connection.send(message)

    def receive(self) -> list[tuple[int, bytes]]:
        """Return what has arrived: pairs of sender and message. Never waits."""
        received: list[tuple[int, bytes]] = []
        self.waiter.read()
        for connection in self._connections.values():
            connection.receive(received)
        return received

    def find_losses(self) -> list[Loss]:
        """Return the neighbours that are gone.

        A neighbour is in the list once all its messages were received, and stays in it.
        """
        for connection in tuple(self._connections.values()):
            loss = connection.find_loss()
            if loss is None:
                continue
            if connection.has_unread():
                # It may have ended after it wrote and before it notified.
                self.waiter.doorbell.notify()
                continue
            self._losses.append(loss)
            del self._connections[connection.rank]
        return list(self._losses)

    def close(self) -> None:
        """Announce it to the neighbours and give all back; calls may be repeated.

        Not collective. What was sent before still arrives as far as the transport
        allows without waiting for the receiver. Every ``wait`` returns.
        """
        transports, self._transports = self._transports, ()
        self._connections = {}
        for transport in transports:
            transport.close()
        self.waiter.close()


def connect_channel(
    store: Store | None, rank: int, hosts: Sequence[str], *, timeout_s: float
) -> ControlChannel:
    """Connect this rank to its neighbours in ``Tree.of_hosts(hosts)``; collective.

    Shared memory carries what stays on a host, Gloo what goes between hosts, and both
    where ranks of a host cannot share memory, which is logged as a warning.

    Args:
        store: Where the ranks meet, empty under the keys used here; None for one rank.
        rank: This process.
        hosts: The host of every rank, in rank order.
        timeout_s: How long this call may wait for any rank.

    Raises:
        CollectiveError: Not all ranks came in time.
    """
    if store is None or len(hosts) == 1:
        return ControlChannel(Waiter(Doorbell.private(), FAR), Tree.flat(0, 1))
    context = ErrorContext("connecting", rank, len(hosts), timeout_s)
    connecting = _Connecting(store, rank, hosts, timeout_s)
    with ExitStack() as undoing, context.guard():
        undoing.callback(connecting.close)
        connecting.connect_host()
        connecting.connect_hosts()
        connecting.open()
        undoing.pop_all()
    return connecting.channel()


class _Connecting:
    def __init__(
        self, store: Store, rank: int, hosts: Sequence[str], timeout_s: float
    ) -> None:
        self._store = store
        self._rank = rank
        self._hosts = hosts
        self._timeout_s = timeout_s
        self._tree = Tree.of_hosts(hosts)[rank]
        self._places = HostGroups.from_hosts(hosts)
        self._transports: list[Transport] = []
        self._local: SharedMemoryTransport | None = None
        self._doorbell = Doorbell.private()
        self._num_looks = NEAR

    def connect_host(self) -> None:
        host, place = self._places.of(self._rank)
        ranks = self._places.ranks[host]
        if len(ranks) == 1:
            return
        store = PrefixStore(f"host{host}", self._store)
        exchange = through_store(store, place, len(ranks), self._timeout_s)
        try:
            local = SharedMemoryTransport(exchange, ranks, self._tree)
        except CollectiveError as error:  # on all ranks of the host, or none
            if place == 0:
                _logger.warning("Gloo carries the ranks' agreements, for %s", error)
            self._connect_gloo(store, ranks, is_one_host=True)
            return
        self._transports.append(local)
        self._local, self._doorbell = local, local.doorbell
        if place == 0:
            # The store may be this process's, and go with it at any time.
            local.await_neighbours(self._timeout_s)
        else:
            local.open()

    def connect_hosts(self) -> None:
        leaders = tuple(ranks[0] for ranks in self._places.ranks)
        if len(leaders) == 1:
            return
        self._num_looks = FAR
        if self._rank in leaders:
            store = PrefixStore("hosts", self._store)
            self._connect_gloo(store, leaders, is_one_host=False)

    def open(self) -> None:
        if self._local is None:
            return
        if self._tree.parent in self._tree.local:
            self._local.await_neighbours(self._timeout_s)
        else:
            self._local.open()

    def channel(self) -> ControlChannel:
        waiter = Waiter(self._doorbell, self._num_looks)
        is_one_host = self._local is not None and len(self._places.ranks) == 1
        rounds = self._local.rounds if self._local and is_one_host else None
        return ControlChannel(waiter, self._tree, self._transports, rounds)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()

    def _connect_gloo(
        self, store: Store, ranks: Sequence[int], *, is_one_host: bool
    ) -> None:
        index, gloo = ranks.index(self._rank), PrefixStore("gloo", store)
        groups = Groups(
            gloo, index, len(ranks), self._timeout_s, is_one_host=is_one_host
        )
        tree = self._tree
        neighbours = {
            index: (rank, self._hosts[rank])
            for index, rank in enumerate(ranks)
            if rank == tree.parent or rank in tree.children
        }
        self._transports.append(GlooTransport(groups, neighbours, self._doorbell))
        self._num_looks = FAR
