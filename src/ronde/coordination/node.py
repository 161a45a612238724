"""One rank's part in the agreement: messages in, messages and steps out.

It neither waits nor sends: it can be run for any number of ranks in one process.

Note [A tree that counts]
    Every rank has a node in a tree. A node tells its parent of a name once the rank
    itself and all its children have told of it, so one message stands for all ranks
    below, however many. What reaches the root from everywhere is agreed: the root
    decides, and its word goes down the same edges. Edges keep the order of messages,
    so all ranks take the same steps in the same order, and a node hears the root's
    word before it hears what those below answered to it.

Note [Two ways]
    A request is told of by its text the first time, and by its bit later
    (Note [Cached requests are bits]). When one rank's request of a cached name has
    changed, the root has all forget that name: whoever waits for its bit asks anew by
    text, so that all texts meet at the root and can be compared.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from ronde.coordination import messages
from ronde.coordination.cache import Cache
from ronde.coordination.messages import Pending, Report
from ronde.coordination.ranges import bits_of, decode_ranks, encode_ranks
from ronde.coordination.requests import Request
from ronde.coordination.steps import (
    Asked,
    Connect,
    Failed,
    Gone,
    Inquired,
    Joined,
    Run,
    Step,
    Stopped,
    ToldToGiveWay,
    Tuned,
)
from ronde.coordination.tally import Tally
from ronde.coordination.tree import Tree

_STEPS: dict[str, Callable[..., Step]] = {
    "connect": Connect,
    "failed": Failed,
    "gone": Gone,
    "ask": Asked,
    "inquire": Inquired,
    "give way": ToldToGiveWay,
    "stop": Stopped,
    "tune": Tuned,
}
"""What orders become that are carried out as they are."""


class Node:
    """A rank that reports to another one; ``Root`` is the one that decides.

    Attributes:
        tree: Its neighbours.
        steps: What was agreed and is to be carried out, in this order.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.steps: deque[Step] = deque()
        self._cache = Cache()
        self._tally = Tally((tree.rank, *tree.children))
        self._is_absence_told = False
        self._own: dict[int, Request] = {}
        self._report = Report()
        self._out: list[tuple[int, bytes]] = []

    @property
    def num_cached(self) -> int:
        """Requests that are remembered."""
        return len(self._cache)

    def find(self, name: str) -> tuple[int, Request] | None:
        """Return the cached request of a name and its number."""
        return self._cache.find(name)

    def tag(self, number: int) -> int:
        """Return what tells a cached request from all others, ever; never 0."""
        return self._cache.epoch << 32 | number + 1

    def used(self, name: str) -> None:
        """Note that a cached request was run without having been agreed on."""
        self._cache.use(name)

    def hit(self, number: int, request: Request) -> None:
        """Have this rank be ready for a cached request."""
        self._own[number] = request
        self._tally.hit(self.tree.rank, 1 << number)

    def submit(self, request: Request) -> None:
        """Have this rank be ready for a request that is not cached."""
        rank = self.tree.rank
        self._tally.hear(rank, request.name, request.text, 1 << rank)

    def change(self, number: int, request: Request) -> None:
        """Have this rank be ready for a request where another one is cached."""
        self._report.changed.append(number)
        self.submit(request)

    def join(self) -> None:
        """Have this rank be ready for everything until all have joined."""
        self._report.joined.append(self.tree.rank)
        self._tally.leave(self.tree.rank)

    def ask(self) -> None:
        """Have everyone tell what it waits for."""
        self._report.is_asking = True

    def answer(self, pending: Pending) -> None:
        """Tell what this rank waits for."""
        self._report.pending.append(pending)

    def say(self, *words: Any) -> None:  # noqa: ANN401 - what JSON takes
        """Tell the root of this rank's waits: see ``Inquiry``."""
        self._report.heard.append([*words])

    def lose(self, rank: int, reason: str, *, is_orderly: bool) -> None:
        """Tell that a rank is gone."""
        if rank == self.tree.parent:
            # Nobody above can tell those below any more.
            self._order([("gone", rank, reason, is_orderly)])
            return
        self._report.lost.append((rank, reason, is_orderly))

    def receive(self, sender: int, message: bytes) -> None:
        """Take in a neighbour's message."""
        kind = message[:1]
        if kind == messages.HITS:
            epoch, bits = messages.decode_bits(message)
            if epoch == self._cache.epoch & 0xFFFF:
                self._tally.hit(sender, bits & self._cache.live)
        elif kind == messages.REPORT:
            self._take(sender, Report.decode(message))
        else:
            self._obey(message)

    def flush(self) -> list[tuple[int, bytes]]:
        """Return what to send now: pairs of neighbour and message, in order."""
        while self._tally.is_stirred or not self._report.is_empty():
            self._advance()
        out, self._out = self._out, []
        return out

    def _advance(self) -> None:
        """Pass on what this rank and all below are ready for, and what they say."""
        ready = self._tally.take_ready(self._cache.live)
        for asking in self._tally.take_complete():
            for text, ranks in asking.told.items():
                self._report.requests.append((text, encode_ranks(ranks)))
        if self._tally.is_all_absent and not self._is_absence_told:
            self._is_absence_told = True
            self._report.is_absent = True
        if ready:
            bits = messages.encode_bits(messages.HITS, self._cache.epoch, ready)
            self._send_up(bits)
        if not self._report.is_empty():
            self._send_up(self._report.encode())
            self._report = Report()

    def _send_up(self, message: bytes) -> None:
        if self.tree.parent is not None:
            self._out.append((self.tree.parent, message))

    def _take(self, sender: int, report: Report) -> None:
        """Take in what a child has told."""
        for text, ranks in report.requests:
            name = Request.decode(text).name
            self._tally.hear(sender, name, text, decode_ranks(ranks))
        if report.is_absent:
            self._tally.leave(sender)
        own = self._report
        own.changed += report.changed
        own.joined += report.joined
        own.lost += report.lost
        own.pending += report.pending
        own.heard += report.heard
        own.is_asking |= report.is_asking

    def _obey(self, message: bytes) -> None:
        """Take the root's word in, and pass it on."""
        self._out += [(child, message) for child in self.tree.children]
        if message[:1] == messages.RUNS:
            _, bits = messages.decode_bits(message)
            self._run(bits)
            return
        run = Run([], None)
        for word, *values in messages.decode_orders(message):
            if word == "run":
                run.requests.append(self._learn(*values))
                continue
            # What comes after one order is not fused with what came before it.
            if run.requests:
                self.steps.append(run)
                run = Run([], None)
            self._follow(word, values)
        if run.requests:
            self.steps.append(run)

    def _run(self, bits: int) -> None:
        for number in bits_of(bits):
            self._own.pop(number, None)
        self.steps.append(Run(self._cache.get(bits), (self._cache.epoch, bits)))

    def _learn(self, text: str, number: int) -> Request:
        request = Request.decode(text)
        if number >= 0:
            self._cache.add(number, request)
        return request

    def _follow(self, word: str, values: list[Any]) -> None:
        match word:
            case "forget":
                self._forget(values[0])
            case "reset":
                self._reset()
            case "joined":
                self._tally.return_all()
                self._is_absence_told = False
                self.steps.append(Joined(values[0]))
            case _:
                self.steps.append(_STEPS[word](*values))

    def _forget(self, number: int) -> None:
        """Forget a cached request; if this rank waits for it, ask by text."""
        self._cache.remove(number)
        self._tally.forget(number)
        request = self._own.pop(number, None)
        if request is not None:
            self.submit(request)

    def _reset(self) -> None:
        """Forget all cached requests."""
        self._cache.reset()
        self._tally.forget_all()
        waiting, self._own = self._own, {}
        for request in waiting.values():
            self.submit(request)

    def _order(self, orders: list[tuple[Any, ...]]) -> None:
        """Give orders to this rank and to all below."""
        self._obey(messages.encode_orders(orders))
