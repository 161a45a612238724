"""Any number of nodes in one process: the agreement, simulated by its own code."""

import random
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ronde.coordination.node import Node
from ronde.coordination.root import Root
from ronde.coordination.steps import Step
from ronde.coordination.tree import Tree


@dataclass(slots=True)
class Traffic:
    """What one rank has sent and received.

    Attributes:
        num_messages: How often.
        num_bytes: How much.
    """

    num_messages: int = 0
    num_bytes: int = 0

    def add(self, message: bytes) -> None:
        """Count a message."""
        self.num_messages += 1
        self.num_bytes += len(message)

    def copy(self) -> "Traffic":
        """Return what it is now."""
        return Traffic(self.num_messages, self.num_bytes)

    def since(self, before: "Traffic") -> "Traffic":
        """Return what has come since."""
        return Traffic(
            self.num_messages - before.num_messages, self.num_bytes - before.num_bytes
        )


@dataclass(slots=True)
class Network:
    """The real nodes of all ranks; edges keep order and nothing else.

    Attributes:
        nodes: One a rank.
        taken: The steps that each rank has taken.
        traffic: Of each rank.
    """

    nodes: list[Node]
    taken: list[list[Step]]
    traffic: list[Traffic]
    _edges: dict[tuple[int, int], deque[bytes]] = field(
        default_factory=lambda: defaultdict[tuple[int, int], deque[bytes]](deque)
    )

    @classmethod
    def of(cls, trees: Iterable[Tree], capacity: int = 1024) -> "Network":
        """Make a node for each tree, in rank order."""
        nodes = [
            Root(tree, capacity) if tree.parent is None else Node(tree)
            for tree in trees
        ]
        return cls(nodes, [[] for _ in nodes], [Traffic() for _ in nodes])

    def flush(self, rank: int) -> None:
        """Have a node send what it has to say, and take its steps."""
        node = self.nodes[rank]
        for to, message in node.flush():
            self.traffic[rank].add(message)
            self.traffic[to].add(message)
            self._edges[rank, to].append(message)
        while node.steps:
            self.taken[rank].append(node.steps.popleft())

    def deliver_any(self, choose: random.Random) -> bool:
        """Deliver one message along some edge; say whether there was one."""
        busy = [edge for edge, messages in self._edges.items() if messages]
        if not busy:
            return False
        sender, to = choose.choice(busy)
        self.nodes[to].receive(sender, self.take(sender, to))
        return True

    def take(self, sender: int, to: int) -> bytes:
        """Return the next message along an edge, taken off it."""
        return self._edges[sender, to].popleft()

    def deliver_round(self) -> bool:
        """Deliver all that was sent before, at once; say whether there was any."""
        under_way = [(edge, list(m)) for edge, m in self._edges.items() if m]
        self._edges.clear()
        for (sender, to), messages in under_way:
            for message in messages:
                self.nodes[to].receive(sender, message)
        for to in {to for (_, to), _ in under_way}:
            self.flush(to)
        return bool(under_way)

    def settle(self, choose: random.Random) -> None:
        """Deliver messages in a random order until there are none."""
        while True:
            for rank in range(len(self.nodes)):
                self.flush(rank)
            if not self.deliver_any(choose):
                return
