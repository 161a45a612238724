"""Named operations, requests that describe them to other ranks, and results.

Note [Order on an accelerator]
    The thread that drives the coordinator runs an operation on that thread's stream.
    Events order the operation after the inputs on the submitter's stream, and order
    later work on a waiting thread's stream after the operation.
"""

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from itertools import product
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ronde.collectives import PollCallback, ReduceOp, Work
from ronde.coordination.messages import format_ranks


class OpKind(IntEnum):
    """The kinds of named operations, with their numbers in messages."""

    ALLREDUCE = 0
    ADASUM = 1
    ALLGATHER = 2
    BROADCAST = 3
    ALLTOALL = 4
    REDUCESCATTER = 5
    BARRIER = 6
    JOIN = 7
    CONNECT = 8


# A table, as the ``name`` of an enum is slow.
_WORDS = {kind: kind.name.lower() for kind in OpKind} | {OpKind.ADASUM: "allreduce"}
REDUCE_OPS = {
    0: ReduceOp.AVERAGE,
    1: ReduceOp.SUM,
    3: ReduceOp.MIN,
    4: ReduceOp.MAX,
    5: ReduceOp.PRODUCT,
}
"""Reductions by Horovod's numbers, which its messages show; Adasum is an ``OpKind``."""
_NUMBERS = {op: number for number, op in REDUCE_OPS.items()}
_FREE_FIRST = (OpKind.ALLGATHER, OpKind.ALLTOALL)
"""Operations whose tensors may differ in dimension 0 between ranks."""
FREE = -1  # stands for a dimension that may differ
_SCALING = slice(5, 9)  # in a ``NamedOperation``, as in ``Request.scaling``
CONNECT_PREFIX = "connect."

Shape = tuple[int, ...]


class NamedOperation(NamedTuple):
    """One submission: a tensor, or a group of tensors that are ready together."""

    kind: OpKind
    tensors: tuple[Tensor, ...] = ()  # inputs: detached, in any layout
    name: str = ""  # the user's
    # For ALLREDUCE, ADASUM and BROADCAST: a tensor of the same shape for each input, or
    # the inputs themselves. Otherwise empty.
    outputs: tuple[Tensor, ...] = ()
    is_group: bool = False  # the wire name begins with ``grouped_``
    reduce_op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1  # for BROADCAST: the rank in the set to copy from
    splits: Sequence[int] | None = None  # rows for each rank; None splits evenly

    def wire_name(self, number: int) -> str:
        word = _WORDS[self.kind]
        if self.kind in (OpKind.BARRIER, OpKind.JOIN):
            return f"{word}.noname"
        if self.is_group:
            word = f"grouped_{word}"
        return f"{word}.{self.name or f'noname.{number}'}"


@dataclass(frozen=True)
class Request:
    """An operation without its tensors; equal requests have equal texts."""

    kind: OpKind
    name: str  # on the wire
    dtypes: tuple[str, ...]  # of each tensor, such as ``float32``
    shapes: tuple[Shape, ...]  # of each tensor
    device: str  # ``cpu`` or ``cuda``
    number: int  # Horovod's number of the reduction
    prescale: float
    postscale: float
    root: int  # -1 for none
    is_cached: bool  # its name may be submitted again
    text: str = field(init=False, compare=False)
    torch_dtypes: tuple[torch.dtype, ...] = field(init=False, compare=False)
    reduce_op: ReduceOp = field(init=False, compare=False)
    scaling: tuple[Any, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        reduce_op = REDUCE_OPS[self.number]
        made = {
            "text": json.dumps(_SENT_FIELDS(self), separators=(",", ":")),
            "torch_dtypes": tuple([getattr(torch, dtype) for dtype in self.dtypes]),
            "reduce_op": reduce_op,
            "scaling": (reduce_op, self.prescale, self.postscale, self.root),
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, operation: NamedOperation, name: str) -> "Request":
        kind, tensors = operation.kind, operation.tensors
        shapes = [tuple(t.shape) for t in tensors]
        if kind in _FREE_FIRST:
            shapes = [(FREE, *shape[1:]) if shape else shape for shape in shapes]
        return cls(
            kind=kind,
            name=name,
            dtypes=tuple([str(t.dtype)[6:] for t in tensors]),
            shapes=tuple(shapes),
            device=_device(tensors),
            number=_NUMBERS[operation.reduce_op],
            prescale=operation.prescale,
            postscale=operation.postscale,
            root=operation.root,
            is_cached=bool(operation.name) or kind is OpKind.BARRIER,
        )

    @staticmethod
    @functools.lru_cache(maxsize=1024)  # decodes equal texts once
    def decode(text: str) -> "Request":
        kind, name, dtypes, shapes, *others = json.loads(text)
        shapes = tuple([tuple(shape) for shape in shapes])
        return Request(OpKind(kind), name, tuple(dtypes), shapes, *others)

    def matches(self, operation: NamedOperation) -> bool:
        tensors = operation.tensors
        if (
            operation.kind is not self.kind
            or len(tensors) != len(self.shapes)
            or operation[_SCALING] != self.scaling
            or _device(tensors) != self.device
        ):
            return False
        for tensor, dtype, shape in zip(
            tensors, self.torch_dtypes, self.shapes, strict=True
        ):
            if tensor.dtype is not dtype:
                return False
            own = tensor.shape
            if own != shape:
                is_free = self.kind in _FREE_FIRST and own and shape
                if not is_free or own[1:] != shape[1:]:
                    return False
        return True

    def zeros(self, index: int) -> Tensor:
        dtype = self.torch_dtypes[index]
        return torch.zeros(self.shapes[index], dtype=dtype, device=self.device)


_SENT_FIELDS = attrgetter(*[each.name for each in fields(Request) if each.init])


def _device(tensors: Sequence[Tensor]) -> str:
    return "cpu" if not tensors or tensors[0].is_cpu else tensors[0].device.type


class StreamMark:
    """A point on the current stream of a CUDA device."""

    __slots__ = ("_event", "device")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def order(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self._event)


class Entry(Work[Any]):
    """A pending operation, submitted at ``submitted_ns`` (``monotonic_ns``).

    On an accelerator the inputs are ready at ``ready``, the outputs at ``done``.
    """

    __slots__ = (
        "_drive",
        "_wake",
        "done",
        "name",
        "operation",
        "ready",
        "submitted_ns",
    )

    def __init__(
        self,
        name: str,
        operation: NamedOperation,
        wake: Callable[[], None],
        drive: Callable[["Entry", PollCallback | None], None],
    ) -> None:
        """Create an entry; ``drive`` makes progress, ``wake`` has a thread do so."""
        super().__init__(None, is_over=False)
        self._wake, self._drive = wake, drive
        self.name = name
        self.operation = operation
        self.submitted_ns = time.monotonic_ns()
        tensors = operation.tensors
        is_cuda = tensors and tensors[0].is_cuda
        self.ready = StreamMark(tensors[0].device) if is_cuda else None
        self.done: StreamMark | None = None

    def _poll(self) -> bool:
        self._wake()
        return False

    def _block(self, poll: PollCallback | None) -> bool:
        self._drive(self, poll)
        return self.is_over

    def wait(self) -> Any:  # noqa: ANN401 - each operation's own
        result = super().wait()
        if self.done is not None:
            self.done.order()
            if not self.operation.outputs:
                # Outputs were allocated on another thread's stream. Their memory must
                # not be reused before this thread's stream has finished with them.
                made: Sequence[Any] = result or ()
                for each in made:
                    tensor = each if isinstance(each, Tensor) else each[0]
                    if tensor.is_cuda:
                        stream = torch.cuda.current_stream(tensor.device)
                        tensor.record_stream(stream)
        return result

    def succeed(self, result: object) -> None:
        self._result = result
        if self.ready is not None:
            self.done = StreamMark(self.ready.device)
        self.is_over = True

    def fail(self, failure: Exception) -> None:
        if not self.is_over:
            self.failure = failure
            self.is_over = True
            # A reference to this entry must not keep a communicator alive.
            self._wake, self._drive = _do_nothing, _do_nothing


def _do_nothing(*_: object) -> None:
    pass


_ON_JOIN = {
    OpKind.ALLGATHER: "Allgather is not supported with Join at this time. "
    "Specify sparse_to_dense=True if using DistributedOptimizer",
    OpKind.ALLTOALL: "Alltoall is not supported with Join at this time.",
    OpKind.REDUCESCATTER: "Reducescatter is not supported with Join at this time.",
    OpKind.BROADCAST: "Broadcast is not supported with Join at this time.",
}
_NEEDS_ROWS = (OpKind.ALLGATHER, OpKind.ALLTOALL, OpKind.REDUCESCATTER)
_SAME_SHAPE = (OpKind.ALLREDUCE, OpKind.ADASUM, OpKind.BROADCAST, OpKind.REDUCESCATTER)


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
"""Properties that must be equal, in Horovod's order and words."""


class RankRequests(NamedTuple):
    """A request and the ranks that made it, one bit for each."""

    request: Request
    ranks: int


def find_mismatch(found: Sequence[RankRequests], *, has_joined: bool) -> str:
    """Return an error text if the requests for one name are incompatible, else "".

    ``found`` are the different requests, ordered by lowest rank. Rules and words are
    Horovod's; the text ends with the ranks and their requests.
    """
    request = found[0].request
    problems = [_find_difference([each.request for each in found])]
    if has_joined:
        problems.append(_ON_JOIN.get(request.kind, ""))
    if request.kind in _NEEDS_ROWS and not all(request.shapes):
        kind = request.kind.name
        problems.append(f"Process-set rank zero tried to {kind} a rank-zero tensor.")
    text = " ".join(filter(None, problems))
    if text and len(found) > 1:
        text = "\n".join([text, *map(_describe, found)])
    return text


def _find_difference(requests: Sequence[Request]) -> str:
    """Return the most important difference from the first request; empty if none."""
    first, *others = requests
    for (title, sent, values_of), other in product(_RULES, others):
        for x, y in zip(values_of(first), values_of(other), strict=False):
            if x != y:
                return (
                    f"Mismatched {title.format(first.kind.name)}: One rank {sent} {x}, "
                    f"but another rank {sent} {y}."
                )
    return ""


def _describe(found: RankRequests) -> str:
    request = found.request
    tensors = ", ".join(
        f"{dtype} {_show(shape)}"
        for dtype, shape in zip(request.dtypes, request.shapes, strict=True)
    )
    return f"{format_ranks(found.ranks)}: {request.kind.name} {request.name} {tensors}"


def _show(shape: Shape) -> str:
    return "[" + ", ".join("any" if n < 0 else str(n) for n in shape) + "]"
