"""The node that decides."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from ronde.coordination import messages
from ronde.coordination.messages import Pending, Report
from ronde.coordination.node import Node
from ronde.coordination.operations import Kind
from ronde.coordination.requests import Request
from ronde.coordination.tally import Asking
from ronde.coordination.tree import Tree
from ronde.coordination.validation import Told, find_mismatch
from ronde.coordination.waits import Place

Order = tuple[Any, ...]
"""A word and its values: see ``Node``."""
_EPOCHS_CAPACITIES = 16
"""Numbers given in an epoch, in capacities of the cache: then they begin at 0 again, so
that bits stay few."""


class Root(Node):
    """Rank 0's node.

    Attributes:
        answers: What the ranks wait for, as far as they have answered.
        is_asked: Whether a rank wants to know for whom it waits, and nobody has
            looked into that yet.
        heard: What ranks have said of their waits, and nobody has looked into yet.
    """

    def __init__(self, tree: Tree, capacity: int) -> None:
        """Decide for all ranks of ``tree``.

        Args:
            tree: Rank 0's neighbours.
            capacity: Number of requests to remember; 0 for none.
        """
        super().__init__(tree)
        self.answers: dict[int, Pending] = {}
        self.is_asked = False
        self.heard: list[list[Any]] = []
        self._capacity = capacity
        self._next_number = 0
        self._num_questions = 0
        self._joined: list[int] = []

    def question(self) -> int:
        """Have every rank answer what it waits for; return the question's number."""
        self.is_asked = False
        self.answers.clear()
        self._num_questions += 1
        self._order([("ask", self._num_questions)])
        return self._num_questions

    def inquire(self, number: int, places: Sequence[Place]) -> None:
        """Have every rank say what it waits for, or if it has come to these places."""
        self._order([("inquire", number, places)])

    def give_way(
        self, told: Sequence[tuple[int, list[int]]], where: Sequence[tuple[int, str]]
    ) -> None:
        """Have ranks give way: see ``ToldToGiveWay``."""
        self._order([("give way", told, where)])

    def stop(self, text: str) -> None:
        """End the job on all ranks."""
        self._order([("stop", text)])

    def tune(self, fusion_threshold_bytes: int) -> None:
        """Have all ranks fuse up to so many bytes from here on."""
        self._order([("tune", fusion_threshold_bytes)])

    def _advance(self) -> None:
        """Decide on all that every rank is ready for."""
        orders = self._look_into(self._report)
        self._report = Report()
        if orders:
            self._order(orders)
        ready = self._tally.take_ready(self._cache.live)
        if ready:
            self._cache.touch(ready)
            self._obey(messages.encode_bits(messages.RUNS, self._cache.epoch, ready))
        orders = self._judge(self._tally.take_complete())
        if self._tally.is_all_absent:
            orders.append(("joined", self._joined[-1]))
            self._joined = []
        if orders:
            self._order(orders)

    def _look_into(self, report: Report) -> list[Order]:
        self._joined += report.joined
        self.is_asked |= report.is_asking
        self.heard += report.heard
        for pending in report.pending:
            if pending.number == self._num_questions:
                self.answers[pending.rank] = pending
        live = self._cache.live
        changed = [n for n in sorted(set(report.changed)) if live >> n & 1]
        gone: list[Order] = [("gone", *lost) for lost in report.lost]
        return gone + [("forget", number) for number in changed]

    def _judge(self, complete: list[Asking]) -> list[Order]:
        """Return the orders for names that every rank has asked for."""
        verdicts: list[Order] = []
        runs: list[Request] = []
        for asking in complete:
            told = [Told(Request.decode(text), r) for text, r in asking.told.items()]
            told.sort(key=lambda each: each.ranks & -each.ranks)
            request = told[0].request
            text = find_mismatch(told, has_joined=bool(self._joined))
            if text:
                verdicts.append(("failed", request.name, text))
            elif request.kind is Kind.CONNECT:
                verdicts.append(("connect", request.name))
            else:
                runs.append(request)
        to_cache = [r for r in runs if r.is_cached][: self._capacity]
        orders = self._make_room(to_cache)
        names = {request.name for request in to_cache}
        for request in runs:
            number = self._number() if request.name in names else -1
            orders.append(("run", request.text, number))
        return verdicts + orders

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def _make_room(self, requests: list[Request]) -> list[Order]:
        """Return the orders after which these can be remembered."""
        if self._next_number + len(requests) > _EPOCHS_CAPACITIES * self._capacity:
            self._next_number = 0
            return [("reset",)]
        known = [self._cache.find(request.name) for request in requests]
        forgotten = [each[0] for each in known if each is not None]
        num_over = len(self._cache) - len(forgotten) + len(requests) - self._capacity
        oldest = (n for n in self._cache.by_age() if n not in forgotten)
        forgotten += islice(oldest, max(num_over, 0))
        return [("forget", number) for number in forgotten]
