"""The store of one generation of ranks, kept by the controller for all hosts."""

from collections import Counter
from dataclasses import dataclass, field

from ronde.errors import StoreError
from ronde.launch.frames import Relayed
from ronde.launch.node import Node
from ronde.store.protocol import Splitter, max_connections
from ronde.store.state import StoreState

_MAX_UNSENT_BYTES = 256 << 20


@dataclass(eq=False, slots=True)
class _Client:
    """A connection that a rank has made to its agent."""

    node: Node
    number: int
    splitter: Splitter = field(default_factory=Splitter)


class StoreService:
    """Answers what agents relay from their ranks.

    Fencing: what was sent by ranks of another generation reaches nobody, since a
    generation has a store of its own and its number is in every frame.

    Args:
        epoch: The generation; negative for none, which answers nobody.
    """

    def __init__(self, epoch: int = -1) -> None:
        self._epoch = epoch
        self._state: StoreState[_Client] = StoreState()
        self._clients: dict[tuple[str, int], _Client] = {}
        self._num_clients: Counter[str] = Counter()

    def take(self, node: Node, relayed: Relayed) -> None:
        """Answer what came from a rank of a node, if it is of this generation."""
        if relayed.epoch != self._epoch:
            return
        client = self._clients.get((node.name, relayed.connection))
        if client is None and relayed.data:
            client = self._admit(node, relayed.connection)
        if client is None:
            return
        if not relayed.data:
            self._forget(client)
            return
        try:
            for body in client.splitter.feed(relayed.data):
                for answered, reply in self._state.handle(client, body):
                    self._reply(answered, reply)
        except StoreError:
            # What it says is no request: it is told so by the connection's end.
            self._dismiss(client)

    def forget(self, node: Node) -> None:
        """Drop all that a lost node's ranks wait for."""
        for client in [c for c in self._clients.values() if c.node is node]:
            self._forget(client)

    def _admit(self, node: Node, number: int) -> _Client | None:
        client = _Client(node, number)
        if self._num_clients[node.name] >= max_connections(len(node.ranks)):
            self._dismiss(client)
            return None
        self._num_clients[node.name] += 1
        self._clients[node.name, number] = client
        return client

    def _reply(self, client: _Client, reply: bytes) -> None:
        link = client.node.link
        if link.relayed_bytes > _MAX_UNSENT_BYTES:
            self._dismiss(client)
        else:
            link.relay(Relayed(self._epoch, client.number, reply))

    def _dismiss(self, client: _Client) -> None:
        client.node.link.relay(Relayed(self._epoch, client.number, b""))
        self._forget(client)

    def _forget(self, client: _Client) -> None:
        if self._clients.pop((client.node.name, client.number), None) is not None:
            self._num_clients[client.node.name] -= 1
            self._state.forget(client)
