"""Any number of nodes in one process, and the messages between them."""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ronde.coordination.node import Node
from ronde.coordination.root import Root
from ronde.coordination.steps import Step
from ronde.coordination.tree import Tree


@dataclass(slots=True)
class Network:
    """The real nodes of all ranks; edges keep order and nothing else.

    Attributes:
        nodes: One a rank.
        taken: The steps that each rank has taken.
        num_bytes: Sent by each rank.
        num_messages: Likewise.
    """

    nodes: list[Node]
    taken: list[list[Step]]
    num_bytes: list[int]
    num_messages: list[int]
    _edges: dict[tuple[int, int], deque[bytes]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    answer: Callable[[int, Step], None] = lambda *_: None

    @classmethod
    def of(cls, trees: Iterable[Tree], capacity: int = 1024) -> "Network":
        """Make a node for each tree, in rank order."""
        nodes = [
            Root(tree, capacity) if tree.parent is None else Node(tree)
            for tree in trees
        ]
        size = len(nodes)
        return cls(nodes, [[] for _ in nodes], [0] * size, [0] * size)

    def flush(self, rank: int) -> None:
        """Have a node send what it has to say, and take its steps."""
        node = self.nodes[rank]
        for to, message in node.flush():
            self.num_bytes[rank] += len(message)
            self.num_messages[rank] += 1
            self._edges[rank, to].append(message)
        while node.steps:
            step = node.steps.popleft()
            self.taken[rank].append(step)
            self.answer(rank, step)

    def deliver_any(self, choose: random.Random) -> bool:
        """Deliver one message along some edge; say whether there was one."""
        busy = [edge for edge, messages in self._edges.items() if messages]
        if not busy:
            return False
        sender, to = choose.choice(busy)
        self.nodes[to].receive(sender, self._edges[sender, to].popleft())
        return True

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
