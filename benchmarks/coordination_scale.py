"""Print the cost of agreeing on one training step, from 2 to 27,600 ranks.

The coordinators' own nodes run, all in this process; only the wires are not there. So
bytes, messages and rounds are exact, and time is not measured at all.

    python benchmarks/coordination_scale.py [--tensors 161] [--slots 6] [--ranks 2,64]

``flat``: every rank reports to rank 0. ``hosts``: a host's ranks report to its first,
and up to 16 hosts to one host, as coordinators connect.
"""

import argparse
import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from ronde.coordination.messages import Tree
from ronde.coordination.node import Command, Node, RootNode, RunCommand
from ronde.coordination.requests import OpKind, Request

_RANKS = "2,64,1024,27600"


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one step.

    Attributes:
        rounds: Messages one after the other, from the last submission to the last rank
            that knows.
        most_messages: Sent and received by the busiest rank.
        most_bytes: Likewise.
        median_bytes: By the rank in the middle.
        total_bytes: Sent by all.
    """

    rounds: int
    most_messages: int
    most_bytes: int
    median_bytes: int
    total_bytes: int


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
        self.taken: list[list[Command]] = [[] for _ in self.nodes]
        self.num_messages: Counter[int] = Counter()
        self.num_bytes: Counter[int] = Counter()
        self._edges = defaultdict[tuple[int, int], deque[bytes]](deque)

    def flush(self, rank: int) -> None:
        """Have a node send its messages, and carry out its commands."""
        node = self.nodes[rank]
        for to, message in node.flush():
            for end in (rank, to):
                self.num_messages[end] += 1
                self.num_bytes[end] += len(message)
            self._edges[rank, to].append(message)
        self.taken[rank] += node.commands
        node.commands.clear()

    def deliver_any(self, choose: random.Random) -> bool:
        """Deliver one message along some edge; return True if there was one."""
        busy = [edge for edge, messages in self._edges.items() if messages]
        if not busy:
            return False
        self.deliver(*choose.choice(busy))
        return True

    def deliver(self, sender: int, to: int) -> None:
        self.nodes[to].receive(sender, self._edges[sender, to].popleft())

    def deliver_round(self) -> bool:
        """Deliver all earlier messages at once; return True if there were any."""
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


def main() -> None:
    """Print one line for each number of ranks, tree and step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=161, help="ResNet-50 has 161")
    parser.add_argument("--slots", type=int, default=6, help="ranks a host")
    parser.add_argument("--ranks", default=_RANKS, help="comma-separated")
    asked = parser.parse_args()
    print(f"{asked.tensors} tensors a step, {asked.slots} ranks a host")
    print(
        f"{'ranks':>6} {'tree':>5} {'step':>6} {'rounds':>6} {'messages':>9} "
        f"{'bytes':>11} {'bytes':>8} {'bytes':>13}"
    )
    print(f"{'':>26} {'busiest':>9} {'busiest':>11} {'median':>8} {'of all':>13}")
    for size in map(int, asked.ranks.split(",")):
        hosts = [str(rank // asked.slots) for rank in range(size)]
        flat = Tree.of_hosts(["one"] * size)
        for name, trees in (("flat", flat), ("hosts", Tree.of_hosts(hosts))):
            network = Simulator(trees)
            for step in ("first", "steady"):
                cost = run_step(network, asked.tensors)
                print(
                    f"{size:>6} {name:>5} {step:>6} {cost.rounds:>6} "
                    f"{cost.most_messages:>9} {cost.most_bytes:>11} "
                    f"{cost.median_bytes:>8} {cost.total_bytes:>13}",
                    flush=True,
                )


def run_step(network: Simulator, num_tensors: int) -> Cost:
    """Have every rank submit all tensors at once, and count until all may run."""
    network.num_messages.clear()
    network.num_bytes.clear()
    for rank, node in enumerate(network.nodes):
        for number in range(num_tensors):
            name = f"allreduce.layer{number}.weight"
            known = node.cache.find(name)
            if known is not None:
                node.hit(*known)
            else:
                node.submit(_request(name, number))
        network.flush(rank)
    rounds = 0
    while network.deliver_round():
        rounds += 1
    for taken in network.taken:
        num_run = sum(len(s.requests) for s in taken if isinstance(s, RunCommand))
        if num_run != num_tensors:
            raise SystemExit(f"{num_run} of {num_tensors} tensors were agreed on")
        taken.clear()
    num_bytes = sorted(network.num_bytes[rank] for rank in range(len(network.nodes)))
    return Cost(
        rounds,
        max(network.num_messages.values()),
        num_bytes[-1],
        num_bytes[len(num_bytes) // 2],
        sum(num_bytes) // 2,
    )


def _request(name: str, number: int) -> Request:
    return Request(
        kind=OpKind.ALLREDUCE,
        name=name,
        dtypes=("float32",),
        shapes=((64, number),),
        device="cpu",
        number=0,
        prescale=1.0,
        postscale=1.0,
        root=-1,
        is_cached=True,
    )


if __name__ == "__main__":
    main()
