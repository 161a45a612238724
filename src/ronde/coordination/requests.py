"""What ranks tell each other of an operation, to see whether they all mean the same."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ronde.collectives import ReduceOp
from ronde.coordination.operations import Kind, Operation

_OPS = (
    ReduceOp.AVERAGE,
    ReduceOp.SUM,
    None,  # Adasum is a kind of its own
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.PRODUCT,
)
"""In the order of Horovod's numbers, which its messages show."""
_NUMBERS = {op: number for number, op in enumerate(_OPS) if op is not None}
_FREE_FIRST = (Kind.ALLGATHER, Kind.ALLTOALL)
"""Their tensors may differ in dimension 0 from rank to rank."""
FREE = -1
"""Stands for a dimension that may differ."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """An operation without its tensors; equal ones fit together.

    Attributes:
        kind: What to do.
        name: On the wire.
        dtypes: One for each tensor, such as ``float32``.
        shapes: One for each tensor; a dimension that may differ is ``FREE``.
        device: ``cpu`` or ``cuda``.
        number: The reduction's, in Horovod's numbering.
        prescale: Before the reduction.
        postscale: After it.
        root: Who is copied from, or -1.
        is_cached: Whether to remember it: whether it has a name to come again by.
        text: All of this as it travels; equal texts are equal requests.
    """

    kind: Kind
    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    device: str
    number: int
    prescale: float
    postscale: float
    root: int
    is_cached: bool
    text: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        fields = (
            int(self.kind),
            self.name,
            self.dtypes,
            self.shapes,
            self.device,
            self.number,
            self.prescale,
            self.postscale,
            self.root,
            int(self.is_cached),
        )
        text = json.dumps(fields, separators=(",", ":"))
        object.__setattr__(self, "text", text)

    @classmethod
    def of(cls, operation: Operation, name: str) -> "Request":
        """Describe an operation whose name on the wire is ``name``."""
        kind = operation.kind
        return cls(
            kind=kind,
            name=name,
            dtypes=tuple([str(t.dtype)[6:] for t in operation.tensors]),
            shapes=tuple([_shape(kind, t) for t in operation.tensors]),
            device=_device(operation.tensors),
            number=_NUMBERS[operation.reduce_op],
            prescale=operation.prescale,
            postscale=operation.postscale,
            root=operation.root,
            is_cached=bool(operation.name) or kind is Kind.BARRIER,
        )

    @classmethod
    def decode(cls, text: str) -> "Request":
        """Read a request's text."""
        return _decode(text)

    @property
    def reduce_op(self) -> ReduceOp:
        """How elements become one."""
        return _OPS[self.number] or ReduceOp.SUM

    def zeros(self) -> list[Tensor]:
        """Return what a rank that has joined contributes."""
        return [
            torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]


@functools.lru_cache(maxsize=1024)
def _decode(text: str) -> Request:
    """Read a text, once for all ranks that send the same."""
    kind, name, dtypes, shapes, device, number, *rest = json.loads(text)
    prescale, postscale, root, is_cached = rest
    return Request(
        Kind(kind),
        name,
        tuple(dtypes),
        tuple([tuple(shape) for shape in shapes]),
        device,
        number,
        prescale,
        postscale,
        root,
        bool(is_cached),
    )


class Memory:
    """This rank's operation of a cached request, to know the same again quickly."""

    __slots__ = ("_device", "_kind", "_scaling", "_tensors", "request")

    def __init__(self, request: Request, operation: Operation) -> None:
        self.request = request
        self._kind = operation.kind
        self._device = _device(operation.tensors)
        self._scaling = _scaling(operation)
        self._tensors = [
            (t.dtype, _shape(operation.kind, t)) for t in operation.tensors
        ]

    def fits(self, operation: Operation) -> bool:
        """Say whether an operation of the same name makes the same request."""
        tensors = operation.tensors
        if (
            operation.kind is not self._kind
            or len(tensors) != len(self._tensors)
            or _scaling(operation) != self._scaling
            or _device(tensors) != self._device
        ):
            return False
        for tensor, (dtype, shape) in zip(tensors, self._tensors, strict=True):
            if tensor.dtype is not dtype or _shape(operation.kind, tensor) != shape:
                return False
        return True


def wire_name(operation: Operation, number: int) -> str:
    """Name an operation on the wire.

    Args:
        operation: It may have no name.
        number: Of those without one in its process set, equal on all ranks.
    """
    word = operation.kind.word
    if operation.kind in (Kind.BARRIER, Kind.JOIN):
        return f"{word}.noname"
    if operation.is_group:
        word = f"grouped_{word}"
    return f"{word}.{operation.name or f'noname.{number}'}"


def _scaling(operation: Operation) -> tuple[ReduceOp, float, float, int]:
    return (
        operation.reduce_op,
        operation.prescale,
        operation.postscale,
        operation.root,
    )


def _shape(kind: Kind, tensor: Tensor) -> Shape:
    shape = tuple(tensor.shape)
    return (FREE, *shape[1:]) if shape and kind in _FREE_FIRST else shape


def _device(tensors: Sequence[Tensor]) -> str:
    return "cpu" if not tensors or tensors[0].is_cpu else tensors[0].device.type
