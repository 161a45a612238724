"""Any number of nodes in one process: the agreement, simulated by its own code."""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from ronde.coordination.control.transport import Tree
from ronde.coordination.node import Command, Node, RunCommand
from ronde.coordination.root import RootNode


class Simulator:
    """The real nodes of all ranks; edges keep order and nothing else.

    Attributes:
        nodes: One a rank.
        taken: The commands that each rank has taken.
        num_messages: Sent and received by each rank.
        num_bytes: Likewise.
    """

    def __init__(self, trees: Iterable[Tree], capacity: int = 1024) -> None:
        """Make a node for each tree, in rank order."""
        self.nodes = [
            RootNode(tree, capacity) if tree.parent is None else Node(tree)
            for tree in trees
        ]
        self.taken: list[list[RunCommand | Command]] = [[] for _ in self.nodes]
        self.num_messages: Counter[int] = Counter()
        self.num_bytes: Counter[int] = Counter()
        self._edges = defaultdict[tuple[int, int], deque[bytes]](deque)

    def flush(self, rank: int) -> None:
        """Have a node send what it has to, and take its commands."""
        node = self.nodes[rank]
        for to, message in node.flush():
            for end in (rank, to):
                self.num_messages[end] += 1
                self.num_bytes[end] += len(message)
            self._edges[rank, to].append(message)
        self.taken[rank] += node.commands
        node.commands.clear()

    def deliver_any(self, choose: random.Random) -> bool:
        """Deliver one message along some edge; say whether there was one."""
        busy = [edge for edge, messages in self._edges.items() if messages]
        if not busy:
            return False
        self.deliver(*choose.choice(busy))
        return True

    def deliver(self, sender: int, to: int) -> None:
        self.nodes[to].receive(sender, self._edges[sender, to].popleft())

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
