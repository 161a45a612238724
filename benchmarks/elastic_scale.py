"""Print the controller's cost of one loss among many ranks of an elastic job.

The real policy, messages and frames run in this process; there are no wires. What
agents send is encoded beforehand, and what they get is not decoded, so only the
controller's own work is counted: the median of its CPU time, and in ``wall`` the least
by the clock.

    python benchmarks/elastic_scale.py [--ranks 10000,30000] [--slots 8] [--times 5]

``lost``: a rank is killed, and the others go on without it. ``spare``: a rank that
waited takes its place, and gets the whole view.
"""

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from ronde.launch.wire.messages import (
    FROM_AGENT,
    Exited,
    FromAgent,
    MessageDecoder,
    SendToWorkers,
    WorkerText,
    WorkerTexts,
    encode,
)
from ronde.membership import events
from ronde.membership.events import Order
from ronde.membership.policy import Membership, Rules
from ronde.membership.view import (
    FROM_RANK,
    NEW,
    NO_VIEW,
    Settled,
    Worker,
    decode_text,
    encode_text,
)

PARTS = ("start", "decide", "end", "frames", "texts", "policy", "begin")
_STEP = 1000


@dataclass(slots=True)
class Cost:
    """The cost of one loss: seconds of each part, and bytes.

    ``frames`` and ``texts`` are decoding what agents and ranks report, ``end`` and
    ``begin`` encoding what ends the old view and begins the new one.
    """

    took_s: dict[str, float] = field(default_factory=dict[str, float])  # CPU time
    wall_s: float = 0.0  # from the first frame to the last
    bytes_sent: int = 0
    bytes_received: int = 0
    num_frames: int = 0  # sent and received

    @property
    def total_s(self) -> float:
        return sum(s for part, s in self.took_s.items() if part != "start")

    @contextmanager
    def count(self, part: str) -> Iterator[None]:
        begun_s = time.process_time()
        yield
        took_s = time.process_time() - begun_s
        self.took_s[part] = self.took_s.get(part, 0.0) + took_s


class Controller:
    """The part of an elastic job's controller that sends, receives and decides."""

    def __init__(self, num_ranks: int, num_spares: int, slots: int) -> None:
        """Start all processes, and train in the first view."""
        self.cost = Cost()
        rules = Rules(1, num_ranks, num_spares)
        self.membership = Membership(rules, lambda: "0" * 32)
        num_hosts = -(-(num_ranks + num_spares) // slots)
        hosts = {f"node{number:04}": slots for number in range(num_hosts)}
        self._decoders = {name: MessageDecoder(FROM_AGENT) for name in hosts}
        with self.cost.count("start"):
            self._apply(events.HostsFound(hosts))
            started = [
                order.worker
                for name in hosts
                for order in self._apply(events.HostReady(name, slots))
                if isinstance(order, events.StartWorker)
            ]
            settled = Settled(NO_VIEW, NEW, NEW, "")
            for worker in started:
                self._apply(events.WorkerReport(worker.id, settled))
        self.workers = {worker.id: worker for worker in started}

    def _apply(self, event: events.Event) -> list[Order]:
        return self.membership.apply(event, time.monotonic())

    def receive(self, host: str, frame: bytes) -> list[Order]:
        """Follow an agent's messages."""
        with self.cost.count("frames"):
            messages = self._decoders[host].feed(frame)
        self.cost.num_frames += 1
        self.cost.bytes_received += len(frame)
        return [order for message in messages for order in self._take(message)]

    def _take(self, message: FromAgent) -> list[Order]:
        orders: list[Order] = []
        if isinstance(message, WorkerTexts):
            with self.cost.count("texts"):
                texts = [(n, decode_text(t, FROM_RANK)) for n, t in message.texts]
            with self.cost.count("policy"):
                for number, text in texts:
                    if text.view == self.membership.view.view:
                        orders += self._apply(events.WorkerReport(number, text))
        elif isinstance(message, Exited):
            with self.cost.count("decide"):
                how = "was killed by SIGKILL"
                event = events.WorkerLost(message.worker, message.status, how)
                orders = self._apply(event)
        return orders

    def send(self, part: str, orders: Iterable[Order]) -> None:
        """Send each text to its workers, in one frame an agent."""
        with self.cost.count(part):
            for tell in orders:
                if isinstance(tell, events.Send):
                    self._send(tell)

    def _send(self, tell: events.Send) -> None:
        text = encode_text(tell.message)
        by_host = defaultdict[str, list[int]](list)
        for number in tell.workers:
            by_host[self.workers[number].host].append(number)
        for numbers in by_host.values():
            frame = encode(SendToWorkers(tuple(numbers), text))
            self.cost.num_frames += 1
            self.cost.bytes_sent += len(frame)


def lose_one(num_ranks: int, num_spares: int, slots: int) -> tuple[Cost, list[Worker]]:
    """Return the cost of a loss in the middle, and the members of the next view."""
    controller = Controller(num_ranks, num_spares, slots)
    lost, view = controller.workers[num_ranks // 2], controller.membership.view
    exited = encode(Exited(lost.id, -9, 1.0, 0.0, 0.0, ""))
    settled = encode_text(Settled(view.view, _STEP, _STEP, ""))
    by_host = defaultdict[str, list[WorkerText]](list)
    for worker in view.members:
        if worker != lost:
            by_host[worker.host].append(WorkerText(worker.id, settled))
    answers = [(h, encode(WorkerTexts(tuple(texts)))) for h, texts in by_host.items()]
    gc.collect()
    begun_s = time.perf_counter()
    controller.send("end", controller.receive(lost.host, exited))
    orders: list[Order] = []
    for host, answer in answers:
        if orders:
            raise AssertionError("the view must not begin before all have settled")
        orders = controller.receive(host, answer)
    controller.send("begin", orders)
    controller.cost.wall_s = time.perf_counter() - begun_s
    if controller.membership.view.view != view.view + 1:
        raise AssertionError("the next view must have begun")
    return controller.cost, list(controller.membership.view.members)


def main() -> None:
    """Print one line for each number of ranks and kind of loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="10000,30000", help="comma-separated")
    parser.add_argument("--slots", type=int, default=8, help="ranks a host")
    parser.add_argument("--times", type=int, default=5)
    asked = parser.parse_args()
    columns = " ".join(f"{part:>7}" for part in (*PARTS, "total", "wall"))
    print(
        f"{'ranks':>6} {'loss':>5} {columns} {'frames':>7} {'sent':>9} {'received':>9}"
    )
    print(f"{'':>12} {'ms':>7}")
    for size in map(int, asked.ranks.split(",")):
        for kind, num_spares in (("lost", 0), ("spare", 1)):
            costs = [
                lose_one(size, num_spares, asked.slots)[0] for _ in range(asked.times)
            ]
            took = [median(c.took_s[part] for c in costs) for part in PARTS]
            least_s = min(cost.wall_s for cost in costs)
            shown = [*took, median(c.total_s for c in costs), least_s]
            columns = " ".join(f"{seconds * 1000:>7.1f}" for seconds in shown)
            last = costs[-1]
            print(
                f"{size:>6} {kind:>5} {columns} {last.num_frames:>7} "
                f"{last.bytes_sent:>9} {last.bytes_received:>9}",
                flush=True,
            )


if __name__ == "__main__":
    main()
