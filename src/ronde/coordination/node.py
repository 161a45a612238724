"""The negotiation on one rank: turns messages into further messages and commands.

A node neither waits nor sends, so tests run any number of them in one process.

Note [A tree that counts]
    A node reports a name to its parent once its rank and all its children have reported
    it, so one message stands for all ranks below. When all ranks have reported a name,
    it is agreed, and the root sends commands down the tree. Edges keep the order of
    messages. So all ranks receive the same commands in the same order, and a node
    receives a command before the ranks below answer that command.

    A request is reported by its text the first time and later by its bit (Note [Cached
    requests are bits]). If a rank's request for a cached name has changed, the root
    makes all ranks drop the name from the cache. Ranks that reported its bit submit the
    request again by text, and the root compares the texts.
"""

import json
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple, get_args

from ronde.coordination.messages import (
    Loss,
    Tree,
    bits_of,
    decode_bits,
    decode_numbers,
    encode,
    encode_bits,
    encode_numbers,
)
from ronde.coordination.requests import OpKind, RankRequests, Request, find_mismatch

_Words = tuple[Any, ...]  # a verb and its values
_EPOCHS_CAPACITIES = 16  # numbers in an epoch per entry of capacity; keeps the bits few


class RunCommand(NamedTuple):
    """Run these operations in this order; they may be fused."""

    requests: list[Request]
    key: tuple[int, int] | None  # of the list; None if one is not cached


class ConnectCommand(NamedTuple):
    """Make a communicator that all ranks, except joined ones, have requested."""

    name: str


class FailCommand(NamedTuple):
    """Fail a named operation for which the ranks made incompatible requests."""

    name: str
    text: str


class JoinedCommand(NamedTuple):
    """Complete the join on all ranks; ``last`` is the rank that joined last."""

    last: int


class ReportCommand(NamedTuple):
    """Answer inquiry ``number``: see ``waits``."""

    kind: str
    number: int
    points: Sequence[Sequence[Any]]


class GiveWayCommand(NamedTuple):
    """Let the chosen waits give way; fail those that cannot: see ``waits``."""

    chosen: Sequence[tuple[int, list[int]]]  # ranks and ids of their waits
    where: Sequence[tuple[int, str]]  # ranks of the circle and names of their waits


class StopCommand(NamedTuple):
    """End the job; ``text`` is the reason."""

    text: str


class TuneCommand(NamedTuple):
    """Change the fusion threshold to this many bytes."""

    num_bytes: int


Command = (
    RunCommand
    | ConnectCommand
    | FailCommand
    | JoinedCommand
    | Loss
    | ReportCommand
    | GiveWayCommand
    | StopCommand
    | TuneCommand
)
_COMMANDS: dict[str, type[Command]] = {
    kind.__name__: kind for kind in get_args(Command)
}


def _words_of(command: Command) -> _Words:
    return type(command).__name__, *command


class RequestCache:
    """A cache of requests, equal on all ranks because all apply the same commands."""

    def __init__(self) -> None:
        self.epoch = 0  # counts resets: see Note [Cached requests are bits]
        self.live = 0  # the numbers in use, as bits
        # The least recently used first.
        self.requests: OrderedDict[int, Request] = OrderedDict()
        self.numbers: dict[str, int] = {}

    def add(self, number: int, request: Request) -> None:
        self.requests[number] = request
        self.numbers[request.name] = number
        self.live |= 1 << number

    def find(self, name: str) -> tuple[int, Request] | None:
        number = self.numbers.get(name)
        return None if number is None else (number, self.requests[number])

    def use(self, name: str) -> None:
        number = self.numbers.get(name)
        if number is not None:
            self.requests.move_to_end(number)

    def remove(self, number: int) -> None:
        del self.numbers[self.requests.pop(number).name]
        self.live &= ~(1 << number)

    def reset(self) -> None:
        self.epoch += 1
        self.live = 0
        self.requests.clear()
        self.numbers.clear()


class PendingName(NamedTuple):
    """The reports on one name so far."""

    ranks: dict[str, int]  # bits of ranks, by the text of their request
    contributors: set[int]  # the rank and children that have reported the name


class ReadyCounter:
    """Collects reports until all contributors, the rank and its children, are ready."""

    def __init__(self, contributors: Sequence[int]) -> None:
        self.is_changed = False  # since ``pop_complete``
        self.absent: set[int] = set()  # ready, as all their ranks have joined
        self._have = dict.fromkeys(contributors, 0)
        self._pending = defaultdict[str, PendingName](lambda: PendingName({}, set()))

    @property
    def is_all_absent(self) -> bool:
        return len(self.absent) == len(self._have)

    def hit(self, contributor: int, bits: int) -> None:
        self._have[contributor] |= bits
        self.is_changed = True

    def add(self, contributor: int, name: str, text: str, ranks: int) -> None:
        pending = self._pending[name]
        pending.ranks[text] = pending.ranks.get(text, 0) | ranks
        pending.contributors.add(contributor)
        self.is_changed = True

    def leave(self, contributor: int) -> None:
        self.absent.add(contributor)
        self.is_changed = True

    def pop_ready(self, live: int) -> int:
        """Remove and return the bits of ``live`` that all contributors reported."""
        ready = live
        for contributor, bits in self._have.items():
            if contributor not in self.absent:
                ready &= bits
        if self.is_all_absent:  # operations in progress when the ranks joined
            ready = 0
            for bits in self._have.values():
                ready |= bits
        if ready:
            self.drop(ready)
        return ready

    def pop_complete(self) -> list[PendingName]:
        """Remove and return the names that all contributors have reported."""
        self.is_changed = False
        contributors = self._have.keys() - self.absent
        complete = [
            name
            for name, pending in self._pending.items()
            if contributors <= pending.contributors
        ]
        return [self._pending.pop(name) for name in complete]

    def drop(self, bits: int) -> None:
        have = self._have
        for contributor in have:
            have[contributor] &= ~bits


class Node:
    """The negotiation of one rank, which reports to its parent in the tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.commands: deque[Command] = deque()
        self.cache = RequestCache()
        self._counter = ReadyCounter((tree.rank, *tree.children))
        self._is_absence_sent = False
        self._own: dict[int, Request] = {}
        self._events: list[Sequence[Any]] = []
        self._out: list[tuple[int, bytes]] = []

    def hit(self, number: int, request: Request) -> None:
        self._own[number] = request
        self._counter.hit(self.tree.rank, 1 << number)

    def submit(self, request: Request) -> None:
        rank = self.tree.rank
        self._counter.add(rank, request.name, request.text, 1 << rank)

    def change(self, number: int, request: Request) -> None:
        """Submit a request that differs from the cached request of the same name."""
        self.report("changed", number)
        self.submit(request)

    def join(self) -> None:
        self.report("joined", self.tree.rank)
        self._counter.leave(self.tree.rank)

    def report(self, *event: Any) -> None:  # noqa: ANN401 - what JSON takes
        self._events.append(event)

    def lose(self, loss: Loss) -> None:
        if loss.rank == self.tree.parent:
            # The ranks above can no longer reach the ranks below.
            self.order(loss)
        else:
            self.report("lost", *loss)

    def receive(self, sender: int, message: bytes) -> None:
        if sender == self.tree.parent:
            self._apply(message)
        elif numbers := decode_numbers(message):
            epoch, bits = numbers
            if epoch == self.cache.epoch & 0xFFFF:
                self._counter.hit(sender, bits & self.cache.live)
        else:
            for event in json.loads(message):
                self._on_event(sender, *event)

    def flush(self) -> list[tuple[int, bytes]]:
        while self._counter.is_changed or self._events:
            self._advance()
        out, self._out = self._out, []
        return out

    def order(self, command: Command) -> None:
        self._apply(encode([_words_of(command)]))

    def _advance(self) -> None:
        """Report ready requests and events of this subtree to the parent."""
        events, self._events = self._events, []
        parent = self.tree.parent
        ready = self._counter.pop_ready(self.cache.live)
        if ready and parent is not None:
            self._out.append((parent, encode_numbers(self.cache.epoch, ready)))
        for pending in self._counter.pop_complete():
            for text, ranks in pending.ranks.items():
                events.append(("request", text, encode_bits(ranks)))
        if self._counter.is_all_absent and not self._is_absence_sent:
            self._is_absence_sent = True
            events.append(("absent",))
        if events and parent is not None:
            self._out.append((parent, encode(events)))

    def _on_event(self, sender: int, verb: str, *values: Any) -> None:  # noqa: ANN401 - JSON's
        if verb == "request":
            text, ranks = values
            name = Request.decode(text).name
            self._counter.add(sender, name, text, decode_bits(ranks))
        elif verb == "absent":
            self._counter.leave(sender)
        elif verb != "ask" or (verb, *values) not in self._events:
            self._events.append((verb, *values))

    def _apply(self, message: bytes) -> None:
        self._out += [(child, message) for child in self.tree.children]
        if decoded := decode_numbers(message):
            numbers, requests = bits_of(decoded[1]), self.cache.requests
            for number in numbers:
                self._own.pop(number, None)
            key = self.cache.epoch, decoded[1]
            self.commands.append(RunCommand([requests[n] for n in numbers], key))
            return
        run = RunCommand([], None)
        for verb, *values in json.loads(message):
            if verb == "run":
                text, number = values
                request = Request.decode(text)
                if number >= 0:
                    self.cache.add(number, request)
                run.requests.append(request)
                continue
            # A command separates the operations before and after it.
            if run.requests:
                self.commands.append(run)
                run = RunCommand([], None)
            self._apply_command(verb, values)
        if run.requests:
            self.commands.append(run)

    def _apply_command(self, verb: str, values: list[Any]) -> None:
        cache, dropped = self.cache, list[int]()
        if verb == "drop":
            dropped = values
            cache.remove(values[0])
            self._counter.drop(1 << values[0])
        elif verb == "reset":
            dropped = list(self._own)
            cache.reset()
            self._counter.drop(-1)
        else:
            command = _COMMANDS[verb](*values)
            if isinstance(command, JoinedCommand):
                self._counter.absent.clear()
                self._is_absence_sent = False
            self.commands.append(command)
        for number in dropped:
            if request := self._own.pop(number, None):
                self.submit(request)  # again, by text


class RootNode(Node):
    """The negotiation on rank 0, which sends commands and decides on the cache."""

    def __init__(self, tree: Tree, capacity: int) -> None:
        super().__init__(tree)
        self.inquiries: list[Sequence[Any]] = []  # from ``ask`` and ``answer``
        self._capacity = capacity
        self._next_number = 0
        self._joined: list[int] = []

    def _advance(self) -> None:
        counter = self._counter
        events, self._events = self._events, []
        if commands := self._handle(events):
            self._apply(encode(commands))
        ready = counter.pop_ready(self.cache.live)
        if ready:
            for number in bits_of(ready):
                self.cache.requests.move_to_end(number)
            self._apply(encode_numbers(self.cache.epoch, ready))
        commands = self._decide(counter.pop_complete())
        if counter.is_all_absent:
            commands.append(_words_of(JoinedCommand(self._joined[-1])))
            self._joined = []
        if commands:
            self._apply(encode(commands))

    def _handle(self, events: Sequence[Sequence[Any]]) -> list[_Words]:
        commands: list[_Words] = []
        changed: set[int] = set()
        for verb, *values in events:
            if verb == "joined":
                self._joined += values
            elif verb == "changed":
                changed.update(values)
            elif verb == "lost":
                commands.append(_words_of(Loss(*values)))
            else:
                self.inquiries.append(values)
        live = self.cache.live
        return commands + [("drop", n) for n in sorted(changed) if live >> n & 1]

    def _decide(self, complete: list[PendingName]) -> list[_Words]:
        commands: list[_Words] = []
        runs: list[Request] = []
        for pending in complete:
            found = [
                RankRequests(Request.decode(text), ranks)
                for text, ranks in pending.ranks.items()
            ]
            found.sort(key=lambda each: each.ranks & -each.ranks)
            request = found[0].request
            text = find_mismatch(found, has_joined=bool(self._joined))
            if text:
                commands.append(_words_of(FailCommand(request.name, text)))
            elif request.kind is OpKind.CONNECT:
                commands.append(_words_of(ConnectCommand(request.name)))
            else:
                runs.append(request)
        to_cache = [r for r in runs if r.is_cached][: self._capacity]
        commands += self._make_room(to_cache)
        names = {request.name for request in to_cache}
        for request in runs:
            number = -1
            if request.name in names:
                number = self._next_number
                self._next_number += 1
            commands.append(("run", request.text, number))
        return commands

    def _make_room(self, requests: list[Request]) -> list[_Words]:
        if self._next_number + len(requests) > _EPOCHS_CAPACITIES * self._capacity:
            self._next_number = 0
            return [("reset",)]
        numbers, cached = self.cache.numbers, self.cache.requests
        dropped = [numbers[r.name] for r in requests if r.name in numbers]
        num_over = len(cached) - len(dropped) + len(requests) - self._capacity
        oldest = (n for n in list(cached) if n not in dropped)
        dropped += islice(oldest, max(num_over, 0))
        return [("drop", number) for number in dropped]
