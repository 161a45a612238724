"""From a rank's place to its channel: the one place where links are chosen."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from torch.distributed import PrefixStore, Store

from ronde.collectives.engine import ErrorContext
from ronde.collectives.engines.hierarchical import HostGroups
from ronde.collectives.engines.shared_memory.segment import through_store
from ronde.collectives.engines.torch_distributed.groups import Groups
from ronde.coordination.control.bell import FAR, NEAR, Bell, Ears
from ronde.coordination.control.channel import Channel
from ronde.coordination.control.gloo import GlooMedium
from ronde.coordination.control.link import Medium
from ronde.coordination.control.linked import LinkedChannel
from ronde.coordination.control.shared_memory import SharedMemoryMedium
from ronde.coordination.tree import Tree
from ronde.errors import CollectiveError

_logger = logging.getLogger("ronde")


def connect_channel(
    store: Store | None, rank: int, hosts: Sequence[str], *, timeout_s: float
) -> Channel:
    """Connect this rank to its neighbours in the tree of all hosts; collective.

    Shared memory carries what stays on a host, Gloo what goes between hosts, and both
    where ranks of a host cannot share memory, which is warned of.

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
        return LinkedChannel(Ears(Bell.of_its_own(), FAR), Tree.flat(0, 1))
    scene = ErrorContext("connecting", rank, len(hosts), timeout_s)
    connecting = _Connecting(store, rank, hosts, timeout_s)
    with ExitStack() as undoing, scene.guard():
        undoing.callback(connecting.close)
        connecting.connect_host()
        connecting.connect_hosts()
        connecting.open()
        undoing.pop_all()
    return connecting.channel()


class _Connecting:
    """The steps to a rank's channel."""

    def __init__(
        self, store: Store, rank: int, hosts: Sequence[str], timeout_s: float
    ) -> None:
        self._store = store
        self._rank = rank
        self._hosts = hosts
        self._timeout_s = timeout_s
        self._tree = Tree.of_hosts(rank, hosts)
        self._places = HostGroups.from_hosts(hosts)
        self._media: list[Medium] = []
        self._local: SharedMemoryMedium | None = None
        self._bell = Bell.of_its_own()
        self._num_looks = NEAR

    def connect_host(self) -> None:
        """Connect the ranks of this host."""
        host, place = self._places.of(self._rank)
        ranks = self._places.ranks[host]
        if len(ranks) == 1:
            return
        store = PrefixStore(f"host{host}", self._store)
        try:
            medium = SharedMemoryMedium(
                through_store(store, place, len(ranks), self._timeout_s),
                ranks,
                self._tree,
            )
        except CollectiveError as error:  # on all ranks of the host, or none
            if place == 0:
                _logger.warning("Gloo carries the ranks' agreements, for %s", error)
            self._connect_gloo(store, ranks, is_one_host=True)
        else:
            self._media.append(medium)
            self._local, self._bell = medium, medium.bell
            if place == 0:
                # The store may be this process's, and go with it at any time.
                medium.await_neighbours(self._timeout_s)
            else:
                medium.open()

    def connect_hosts(self) -> None:
        """Connect the first rank of each host."""
        leaders = tuple(ranks[0] for ranks in self._places.ranks)
        if len(leaders) == 1:
            return
        self._num_looks = FAR
        if self._rank in leaders:
            store = PrefixStore("hosts", self._store)
            self._connect_gloo(store, leaders, is_one_host=False)

    def open(self) -> None:
        """Have the first of a host tell the others that all hosts are connected."""
        if self._local is None:
            return
        if self._tree.parent in self._tree.local:
            self._local.await_neighbours(self._timeout_s)
        else:
            self._local.open()

    def channel(self) -> Channel:
        """Return what has been connected."""
        ears = Ears(self._bell, self._num_looks)
        is_one_host = self._local is not None and len(self._places.ranks) == 1
        rounds = self._local.rounds if self._local and is_one_host else None
        return LinkedChannel(ears, self._tree, self._media, rounds)

    def close(self) -> None:
        """Give back what has been connected."""
        for medium in self._media:
            medium.close()

    def _connect_gloo(
        self, store: Store, ranks: Sequence[int], *, is_one_host: bool
    ) -> None:
        """Connect some ranks by a process group of their own."""
        groups = Groups(
            PrefixStore("gloo", store),
            ranks.index(self._rank),
            len(ranks),
            self._timeout_s,
            is_one_host=is_one_host,
        )
        tree = self._tree
        neighbours = {
            index: (rank, self._hosts[rank])
            for index, rank in enumerate(ranks)
            if rank == tree.parent or rank in tree.children
        }
        self._media.append(GlooMedium(groups, neighbours, self._bell))
        self._num_looks = FAR
