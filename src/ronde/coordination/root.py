"""The node that decides, by Horovod's rules of which requests fit together."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ronde.coordination import messages
from ronde.coordination.control.tree import Tree
from ronde.coordination.messages import format_ranks
from ronde.coordination.node import Node, PendingName
from ronde.coordination.requests import OpKind, Request, Shape

_Words = tuple[Any, ...]
"""A verb and its values: see ``Command``."""
_EPOCHS_CAPACITIES = 16
"""Numbers given in an epoch, in capacities of the cache: then they begin at 0 again, so
that bits stay few."""


class RootNode(Node):
    """Rank 0's node.

    Attributes:
        stall_answers: What the ranks wait for, as far as they have answered.
        is_asked_for_stalls: Whether a rank wants to know for whom it waits, and nobody
            has looked into that yet.
        wait_answers: Answers that the ``CircleInspector`` has not looked into yet.
    """

    def __init__(self, tree: Tree, capacity: int) -> None:
        """Decide for all ranks, and remember up to ``capacity`` requests."""
        super().__init__(tree)
        self.stall_answers: list[list[Any]] = []
        self.is_asked_for_stalls = False
        self.wait_answers: list[list[Any]] = []
        self._capacity = capacity
        self._next_number = 0
        self._num_questions = 0
        self._joined: list[int] = []

    def ask_all_for_stalls(self) -> None:
        """Have every rank answer what it waits for, into ``stall_answers``."""
        self.is_asked_for_stalls = False
        self.stall_answers.clear()
        self._num_questions += 1
        self.order("report_stall", self._num_questions)

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
            match verb:
                case "joined":
                    self._joined += values
                case "ask_stalls":
                    self.is_asked_for_stalls = True
                case "waits":
                    self.wait_answers.append(values)
                case "stall":
                    if values[0] == self._num_questions:
                        self.stall_answers.append(values[1])
                case "changed":
                    changed.update(values)
                case _:
                    commands.append((verb, *values))  # "lost"
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


_SAME_SHAPE = (
    OpKind.ALLREDUCE,
    OpKind.ADASUM,
    OpKind.BROADCAST,
    OpKind.REDUCESCATTER,
)
_NEEDS_ROWS = (OpKind.ALLGATHER, OpKind.ALLTOALL, OpKind.REDUCESCATTER)
_ON_JOIN = {
    OpKind.ALLGATHER: "Allgather is not supported with Join at this time. "
    "Specify sparse_to_dense=True if using DistributedOptimizer",
    OpKind.ALLTOALL: "Alltoall is not supported with Join at this time.",
    OpKind.REDUCESCATTER: "Reducescatter is not supported with Join at this time.",
    OpKind.BROADCAST: "Broadcast is not supported with Join at this time.",
}


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


def _describe(asked: RankRequests) -> str:
    request = asked.request
    tensors = ", ".join(
        f"{dtype} {_show(shape)}"
        for dtype, shape in zip(request.dtypes, request.shapes, strict=True)
    )
    return f"{format_ranks(asked.ranks)}: {request.kind.name} {request.name} {tensors}"


def _differences(requests: Sequence[Request]) -> Iterator[str]:
    """Yield what differs from the first, what counts most first."""
    first, *others = requests
    for check in _CHECKS:
        for other in others:
            yield from filter(None, [check(first, other)])


def _tensors(a: Request, b: Request) -> str:
    if len(a.shapes) == len(b.shapes):
        return ""
    return (
        f"Mismatched groups: One rank submitted {len(a.shapes)} tensors, but another "
        f"rank submitted {len(b.shapes)} tensors."
    )


def _dtypes(a: Request, b: Request) -> str:
    for x, y in zip(a.dtypes, b.dtypes, strict=True):
        if x != y:
            return (
                f"Mismatched data types: One rank had type {x}, "
                f"but another rank had type {y}."
            )
    return ""


def _kinds(a: Request, b: Request) -> str:
    if a.kind is b.kind:
        return ""
    return (
        f"Mismatched operations: One rank did an {a.kind.name}, "
        f"but another rank did an {b.kind.name}."
    )


def _shapes(a: Request, b: Request) -> str:
    if a.kind in _SAME_SHAPE:
        for x, y in zip(a.shapes, b.shapes, strict=True):
            if x != y:
                return (
                    f"Mismatched {a.kind.name} tensor shapes: One rank sent a tensor "
                    f"of shape {_show(x)}, but another rank sent a tensor of shape "
                    f"{_show(y)}."
                )
    return ""


def _factors(a: Request, b: Request) -> str:
    if (a.prescale, a.postscale) == (b.prescale, b.postscale):
        return ""
    return (
        "Mismatched prescale and/or postscale factors: One rank sent factors "
        f"({a.prescale:g}, {a.postscale:g}), but another rank sent factors "
        f"({b.prescale:g}, {b.postscale:g})."
    )


def _reductions(a: Request, b: Request) -> str:
    if a.number == b.number:
        return ""
    return (
        f"Mismatched reduction operation: One rank sent reduction op {a.number}, "
        f"but another rank sent reduction op {b.number}."
    )


def _rows(a: Request, b: Request) -> str:
    sent = f"Mismatched {a.kind.name} tensor shapes: One rank sent a tensor"
    for x, y in zip(a.shapes, b.shapes, strict=True):
        if len(x) != len(y):
            return (
                f"{sent} of rank {len(x)}, but another rank sent a tensor of rank "
                f"{len(y)}."
            )
        for dim, (m, n) in enumerate(zip(x, y, strict=True)):
            if m != n:
                return (
                    f"{sent} with dimension {dim} equal to {m}, but another rank sent "
                    f"a tensor with dimension {dim} equal to {n}."
                )
    return ""


def _roots(a: Request, b: Request) -> str:
    if a.root == b.root:
        return ""
    return (
        f"Mismatched BROADCAST root ranks: One rank specified root rank {a.root}, "
        f"but another rank specified root rank {b.root}."
    )


def _devices(a: Request, b: Request) -> str:
    if a.device == b.device:
        return ""
    one, other = ["CPU" if r.device == "cpu" else "GPU" for r in (a, b)]
    return (
        f"Mismatched {a.kind.name} CPU/GPU device selection: One rank specified device "
        f"{one}, but another rank specified device {other}."
    )


_CHECKS: tuple[Callable[[Request, Request], str], ...] = (
    _tensors,
    _dtypes,
    _kinds,
    _shapes,
    _factors,
    _reductions,
    _rows,
    _roots,
    _devices,
)
"""In Horovod's order."""


def _show(shape: Shape) -> str:
    return "[" + ", ".join("any" if n < 0 else str(n) for n in shape) + "]"
