"""The node that decides, by Horovod's rules of which requests fit together."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ronde.coordination import messages
from ronde.coordination.messages import Tree, format_ranks
from ronde.coordination.node import Node, PendingName
from ronde.coordination.requests import OpKind, Request, Shape

_Words = tuple[Any, ...]
"""A verb and its values: see ``Command``."""
_EPOCHS_CAPACITIES = 16
"""Numbers given in an epoch, in capacities of the cache: then they begin at 0 again, so
that bits stay few."""


class RootNode(Node):
    """Rank 0's node; remembers up to ``capacity`` requests.

    Attributes:
        inquiries: The values of ``ask`` and ``answer`` that nobody has looked into yet.
    """

    def __init__(self, tree: Tree, capacity: int) -> None:
        super().__init__(tree)
        self.inquiries: list[list[Any]] = []
        self._capacity = capacity
        self._next_number = 0
        self._joined: list[int] = []

    def _advance(self) -> None:
        """Decide on all that every rank is ready for."""
        counter = self._counter
        events, self._events = self._events, []
        if events and (commands := self._look_into(events)):
            self._order(commands)
        ready = counter.take_ready(self.cache.live)
        if ready:
            for number in messages.bits_of(ready):
                self.cache.requests.move_to_end(number)
            epoch = self.cache.epoch
            self._obey(messages.encode_bits(messages.RUNS, epoch, ready))
        commands = self._judge(counter.take_complete())
        if counter.is_all_absent:
            commands.append(("joined", self._joined[-1]))
            self._joined = []
        if commands:
            self._order(commands)

    def _look_into(self, events: Sequence[Sequence[Any]]) -> list[_Words]:
        commands: list[_Words] = []
        changed: set[int] = set()
        for verb, *values in events:
            if verb == "joined":
                self._joined += values
            elif verb == "changed":
                changed.update(values)
            elif verb == "lost":
                commands.append((verb, *values))
            else:
                self.inquiries.append(values)
        live = self.cache.live
        return commands + [("drop", n) for n in sorted(changed) if live >> n & 1]

    def _judge(self, complete: list[PendingName]) -> list[_Words]:
        commands: list[_Words] = []
        runs: list[Request] = []
        for pending in complete:
            asked = [
                RankRequests(Request.decode(text), ranks)
                for text, ranks in pending.ranks.items()
            ]
            asked.sort(key=lambda each: each.ranks & -each.ranks)
            request = asked[0].request
            text = find_mismatch(asked, has_joined=bool(self._joined))
            if text:
                commands.append(("fail", request.name, text))
            elif request.kind is OpKind.CONNECT:
                commands.append(("connect", request.name))
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
        """Return the commands after which these can be remembered."""
        if self._next_number + len(requests) > _EPOCHS_CAPACITIES * self._capacity:
            self._next_number = 0
            return [("reset",)]
        numbers, cached = self.cache.numbers, self.cache.requests
        dropped = [numbers[r.name] for r in requests if r.name in numbers]
        num_over = len(cached) - len(dropped) + len(requests) - self._capacity
        oldest = (n for n in list(cached) if n not in dropped)
        dropped += islice(oldest, max(num_over, 0))
        return [("drop", number) for number in dropped]


_ON_JOIN = {
    OpKind.ALLGATHER: "Allgather is not supported with Join at this time. "
    "Specify sparse_to_dense=True if using DistributedOptimizer",
    OpKind.ALLTOALL: "Alltoall is not supported with Join at this time.",
    OpKind.REDUCESCATTER: "Reducescatter is not supported with Join at this time.",
    OpKind.BROADCAST: "Broadcast is not supported with Join at this time.",
}
_NEEDS_ROWS = (OpKind.ALLGATHER, OpKind.ALLTOALL, OpKind.REDUCESCATTER)
_SAME_SHAPE = (
    OpKind.ALLREDUCE,
    OpKind.ADASUM,
    OpKind.BROADCAST,
    OpKind.REDUCESCATTER,
)


def _shapes(request: Request) -> list[str]:
    is_same = request.kind in _SAME_SHAPE
    return [f"of shape {_show(shape)}" for shape in request.shapes if is_same]


def _dimensions(request: Request) -> list[str]:
    words: list[str] = []
    for shape in request.shapes:
        words.append(f"of rank {len(shape)}")
        words += [f"with dimension {d} equal to {n}" for d, n in enumerate(shape)]
    return words


_RULES: tuple[tuple[str, str, Callable[[Request], Sequence[object]]], ...] = (
    ("groups", "submitted", lambda r: [f"{len(r.shapes)} tensors"]),
    ("data types", "had type", lambda r: r.dtypes),
    ("operations", "did an", lambda r: [r.kind.name]),
    ("{} tensor shapes", "sent a tensor", _shapes),
    (
        "prescale and/or postscale factors",
        "sent factors",
        lambda r: [f"({r.prescale:g}, {r.postscale:g})"],
    ),
    ("reduction operation", "sent reduction op", lambda r: [r.number]),
    ("{} tensor shapes", "sent a tensor", _dimensions),
    ("BROADCAST root ranks", "specified root rank", lambda r: [r.root]),
    (
        "{} CPU/GPU device selection",
        "specified device",
        lambda r: ["CPU" if r.device == "cpu" else "GPU"],
    ),
)
"""What must be equal, in Horovod's order and words."""


class RankRequests(NamedTuple):
    """What some ranks, a bit each, have all asked for."""

    request: Request
    ranks: int


def find_mismatch(asked: Sequence[RankRequests], *, has_joined: bool) -> str:
    """Return what is wrong with the requests for one name; empty where they fit.

    Args:
        asked: The differing requests, by their lowest rank.
        has_joined: Whether some rank has joined.

    Returns:
        Horovod's text, then the ranks and what they asked for.
    """
    request = asked[0].request
    problems = [next(_differences([each.request for each in asked]), "")]
    if has_joined:
        problems.append(_ON_JOIN.get(request.kind, ""))
    if request.kind in _NEEDS_ROWS and not all(request.shapes):
        what = request.kind.name
        problems.append(f"Process-set rank zero tried to {what} a rank-zero tensor.")
    text = " ".join(filter(None, problems))
    if text and len(asked) > 1:
        text = "\n".join([text, *map(_describe, asked)])
    return text


def _differences(requests: Sequence[Request]) -> Iterator[str]:
    """Yield what differs from the first, what counts most first."""
    first, *others = requests
    for what, sent, values_of in _RULES:
        for other in others:
            for x, y in zip(values_of(first), values_of(other), strict=False):
                if x != y:
                    yield (
                        f"Mismatched {what.format(first.kind.name)}: One rank {sent} "
                        f"{x}, but another rank {sent} {y}."
                    )


def _describe(asked: RankRequests) -> str:
    request = asked.request
    tensors = ", ".join(
        f"{dtype} {_show(shape)}"
        for dtype, shape in zip(request.dtypes, request.shapes, strict=True)
    )
    return f"{format_ranks(asked.ranks)}: {request.kind.name} {request.name} {tensors}"


def _show(shape: Shape) -> str:
    return "[" + ", ".join("any" if n < 0 else str(n) for n in shape) + "]"
