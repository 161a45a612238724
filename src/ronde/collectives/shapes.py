"""What the ranks tell each other before tensors of unequal sizes move.

Three numbers of every rank go to every other: a signature of all that must be equal,
and its rows. Only where these do not fit do the ranks tell each other their dtypes and
shapes, for the error. What each rank sends to each goes separately, in ``all_to_all``.
"""

import functools
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ronde.errors import CollectiveError, UsageError

_MAX_NDIM = 64
"""Dimensions that a tensor can have in torch."""
NUM_NUMBERS = 3 + _MAX_NDIM
"""What ``Layout.encode`` writes."""
_DTYPES = {
    zlib.crc32(str(value).encode()): str(value)
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_CALLS = ("all_gather", "all_to_all")
_REFUSED = -1
_NO_ROWS = -1
_NO_OUT = -1


class LayoutSummary(NamedTuple):
    """What every rank must know of a layout.

    Attributes:
        signature: Equal for equal calls, dtypes and dimensions after the first.
        num_rows: Dimension 0; below 0 where there is none, or the rank refused.
        out_rows: Rows of the place that the caller gave for the result; below 0 for
            none.
    """

    signature: int
    num_rows: int
    out_rows: int


NUM_SUMMARY = len(LayoutSummary._fields)


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's part of a call whose sizes the others must know.

    Attributes:
        call: The collective.
        dtype: Name of the tensor's dtype.
        shape: The tensor's.
        out_rows: Rows of the place that the caller gave for the result; or None.
        is_refused: The rank found its own arguments wrong and will not take part.
    """

    call: str
    dtype: str
    shape: tuple[int, ...]
    out_rows: int | None = None
    is_refused: bool = False

    @classmethod
    def of(cls, call: str, tensor: Tensor, out: Tensor | None) -> "Layout":
        """Describe a call."""
        out_rows = None if out is None else out.shape[0]
        return cls(call, str(tensor.dtype), tuple(tensor.shape), out_rows)

    @classmethod
    def refused(cls, call: str, tensor: Tensor) -> "Layout":
        """Describe a call whose arguments are wrong."""
        return cls(call, str(tensor.dtype), (), is_refused=True)

    def summarize(self) -> LayoutSummary:
        """Return what the others must know in any case."""
        return LayoutSummary(
            _signature(self.call, self.dtype, len(self.shape), self.shape[1:]),
            self.shape[0] if self.shape else _NO_ROWS,
            _NO_OUT if self.out_rows is None else self.out_rows,
        )

    def encode(self) -> Tensor:
        """Return what an error tells of it as int64 numbers, as many for every one."""
        head = [
            _CALLS.index(self.call),
            zlib.crc32(self.dtype.encode()),
            _REFUSED if self.is_refused else len(self.shape),
        ]
        padding = (0,) * (_MAX_NDIM - len(self.shape))
        return torch.tensor([*head, *self.shape, *padding], device="cpu")

    @classmethod
    def decode(cls, encoded: Tensor) -> "Layout":
        """Read what ``encode`` wrote."""
        numbers: list[int] = encoded.tolist()  # pyright: ignore[reportUnknownVariableType]
        call, dtype, ndim, *shape = numbers
        return cls(
            _CALLS[call],
            _DTYPES.get(dtype, f"dtype {dtype:#x}"),
            tuple(shape[: max(ndim, 0)]),
            is_refused=ndim == _REFUSED,
        )


@functools.lru_cache(maxsize=1024)
def _signature(call: str, dtype: str, ndim: int, rest: tuple[int, ...]) -> int:
    digest = hashlib.sha256(f"{call} {dtype} {ndim} {rest}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def do_fit(summaries: Sequence[LayoutSummary]) -> bool:
    """Say whether the ranks' layouts fit together."""
    signature = summaries[0].signature
    return all(s.signature == signature and s.num_rows >= 0 for s in summaries)


def disagreement(layouts: Sequence[Layout]) -> CollectiveError:
    """Return what is wrong with layouts that do not fit, in the same words everywhere.

    Calls, dtypes or dimensions after the first differ, a rank gave a tensor without
    dimensions, or one refused its own arguments.
    """
    refused = [r for r, layout in enumerate(layouts) if layout.is_refused]
    if refused:
        return _refused_elsewhere(layouts[refused[0]].call, refused)
    for what, values in (
        ("call", [layout.call for layout in layouts]),
        ("dtype", [layout.dtype for layout in layouts]),
        ("number of dimensions", [str(len(layout.shape)) for layout in layouts]),
        ("shape after dimension 0", [str(layout.shape[1:]) for layout in layouts]),
    ):
        if len(set(values)) > 1:
            return _differ(what, layouts)
    return CollectiveError(
        f"{layouts[0].call} must be given at least one dimension, got a scalar. "
        "Use tensor.reshape(1)."
    )


def require_out_rows(
    call: str, summaries: Sequence[LayoutSummary], rank: int, results: Sequence[int]
) -> None:
    """Refuse a result that does not fit its place on some rank, on every rank.

    Args:
        call: The collective.
        summaries: Those of all ranks, which fit together.
        rank: This process.
        results: Rows of each rank's result.

    Raises:
        UsageError: The result does not fit this rank's ``out``.
        CollectiveError: It does not fit another's.
    """
    wrong = [
        r
        for r, summary in enumerate(summaries)
        if summary.out_rows not in (_NO_OUT, results[r])
    ]
    if rank in wrong:
        raise UsageError(
            f"out must have as many rows as the result of {call}, {results[rank]}, got "
            f"{summaries[rank].out_rows}. Leave it out for a new tensor."
        )
    if wrong:
        raise _refused_elsewhere(call, wrong)


def as_rows(numbers: Tensor) -> list[list[int]]:
    """Return a matrix of integers as lists."""
    return numbers.tolist()  # pyright: ignore[reportUnknownVariableType]


def _refused_elsewhere(call: str, refused: Sequence[int]) -> CollectiveError:
    return CollectiveError(
        f"{call} was given wrong arguments on {_name(refused)}; the error there says "
        "which."
    )


def _differ(what: str, layouts: Sequence[Layout]) -> CollectiveError:
    groups: dict[str, list[int]] = {}
    for rank, layout in enumerate(layouts):
        text = f"{layout.call} of {layout.dtype} {list(layout.shape)}"
        groups.setdefault(text, []).append(rank)
    told = "; ".join(f"{text} on {_name(ranks)}" for text, ranks in groups.items())
    return CollectiveError(f"{what} must be equal on all ranks, got {told}.")


def _name(ranks: Sequence[int]) -> str:
    """Name ranks, the first few of them where there are many."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def rows(num_rows: int, size: int) -> list[int]:
    """Split ``num_rows`` over ``size`` ranks; the first ranks take the extra rows."""
    base, extra = divmod(num_rows, size)
    return [base + (rank < extra) for rank in range(size)]
