"""Print what agreeing on one training step costs, from 2 to 27,600 ranks.

The coordinators' own nodes run, all in this process; only the wires are not there. So
bytes, messages and rounds are exact, and time is not measured at all.

    python benchmarks/coordination_scale.py [--tensors 161] [--slots 6] [--ranks 2,64]

``flat``: every rank reports to rank 0. ``hosts``: a host's ranks report to its first,
and up to 16 hosts to one host, as coordinators connect.
"""

import argparse
from dataclasses import dataclass

from ronde.coordination.control.transport import Tree
from ronde.coordination.node import RunCommand
from ronde.coordination.requests import OpKind, Request
from ronde.coordination.simulator import Simulator

_RANKS = "2,64,1024,27600"


@dataclass(frozen=True, slots=True)
class Cost:
    """What one step costs.

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
        flat = [Tree.flat(rank, size) for rank in range(size)]
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
