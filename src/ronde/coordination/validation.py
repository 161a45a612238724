"""Whether the requests of all ranks for one name fit together: Horovod's rules."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ronde.coordination.operations import Kind
from ronde.coordination.ranges import format_ranks
from ronde.coordination.requests import Request, Shape

_SAME_SHAPE = (Kind.ALLREDUCE, Kind.ADASUM, Kind.BROADCAST, Kind.REDUCESCATTER)
_NEEDS_ROWS = (Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER)
_ON_JOIN = {
    Kind.ALLGATHER: "Allgather is not supported with Join at this time. "
    "Specify sparse_to_dense=True if using DistributedOptimizer",
    Kind.ALLTOALL: "Alltoall is not supported with Join at this time.",
    Kind.REDUCESCATTER: "Reducescatter is not supported with Join at this time.",
    Kind.BROADCAST: "Broadcast is not supported with Join at this time.",
}


@dataclass(frozen=True, slots=True)
class Told:
    """What some ranks have said.

    Attributes:
        request: What they all asked for.
        ranks: Who, a bit each.
    """

    request: Request
    ranks: int


def find_mismatch(told: Sequence[Told], *, has_joined: bool) -> str:
    """Say what is wrong with the requests for one name; nothing where they fit.

    Args:
        told: The differing requests, by their lowest rank.
        has_joined: Whether some rank has joined.

    Returns:
        Horovod's text, then the ranks and what they said; or empty.
    """
    problem = next(_differences(told), "")
    request = told[0].request
    further: list[str] = []
    if has_joined and request.kind in _ON_JOIN:
        further.append(_ON_JOIN[request.kind])
    if request.kind in _NEEDS_ROWS and any(not shape for shape in request.shapes):
        what = request.kind.name
        further.append(f"Process-set rank zero tried to {what} a rank-zero tensor.")
    text = " ".join(filter(None, [problem, *further]))
    if text and len(told) > 1:
        text = "\n".join([text, *map(_describe, told)])
    return text


def _describe(told: Told) -> str:
    request = told.request
    tensors = ", ".join(
        f"{dtype} {_show(shape)}"
        for dtype, shape in zip(request.dtypes, request.shapes, strict=True)
    )
    return f"{format_ranks(told.ranks)}: {request.kind.name} {request.name} {tensors}"


def _differences(told: Sequence[Told]) -> Iterator[str]:
    """Yield what differs from the first, what counts most first."""
    first = told[0].request
    for check in _CHECKS:
        for other in told[1:]:
            yield from filter(None, [check(first, other.request)])


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
    if a.kind not in _SAME_SHAPE:
        return ""
    for x, y in zip(a.shapes, b.shapes, strict=True):
        if x != y:
            return (
                f"Mismatched {a.kind.name} tensor shapes: One rank sent a tensor of "
                f"shape {_show(x)}, but another rank sent a tensor of shape {_show(y)}."
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
    for x, y in zip(a.shapes, b.shapes, strict=True):
        sent = f"Mismatched {a.kind.name} tensor shapes: One rank sent a tensor"
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
