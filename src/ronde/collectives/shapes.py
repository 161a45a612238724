"""Exchange of shapes before a collective of tensors of unequal sizes.

Every rank sends three numbers to every other rank: a signature of the properties that
must be equal, its number of rows, and the number of rows of its ``out``. If these are
incompatible, the ranks exchange their dtypes and shapes for the error message.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ronde.errors import CollectiveError, UsageError

LAYOUT_BYTES = 2048  # enough for the 64 dimensions that torch allows
_NO_ROWS = -1


class LayoutSummary(NamedTuple):
    """The numbers of a layout that are sent to every rank."""

    signature: int  # equal for equal calls, dtypes and dimensions after the first
    num_rows: int  # dimension 0; -1 for a scalar or wrong arguments
    out_rows: int  # dimension 0 of ``out``; -1 for none


class CallLayout(NamedTuple):
    """One rank's arguments of a collective with uneven shapes."""

    call: str
    dtype: torch.dtype | str
    shape: tuple[int, ...] = ()
    out_rows: int = _NO_ROWS
    is_refused: bool = False  # the rank's own arguments are wrong

    @classmethod
    def of(cls, call: str, tensor: Tensor, out: Tensor | None) -> "CallLayout":
        out_rows = _NO_ROWS if out is None else out.shape[0]
        return cls(call, tensor.dtype, tensor.shape, out_rows)

    @functools.lru_cache(maxsize=1024)  # noqa: B019  a small value
    def summarize(self) -> LayoutSummary:
        equal = f"{self.call} {self.dtype} {len(self.shape)} {tuple(self.shape[1:])}"
        digest = hashlib.sha256(equal.encode()).digest()
        return LayoutSummary(
            int.from_bytes(digest[:8], "little", signed=True),
            self.shape[0] if self.shape else _NO_ROWS,
            self.out_rows,
        )

    def encode(self) -> Tensor:
        text = json.dumps(self._replace(dtype=str(self.dtype)))
        padded = bytearray(text.ljust(LAYOUT_BYTES).encode())
        return torch.frombuffer(padded, dtype=torch.int64)

    @classmethod
    def decode(cls, encoded: Tensor) -> "CallLayout":
        call, dtype, shape, *rest = json.loads(encoded.numpy().tobytes())
        return cls(call, dtype, tuple(shape), *rest)


def do_fit(layouts: Sequence[LayoutSummary]) -> bool:
    signature = layouts[0].signature
    for layout in layouts:  # all() takes longer
        if layout.signature != signature or layout.num_rows < 0:
            return False
    return True


def disagreement(layouts: Sequence[CallLayout]) -> CollectiveError:
    """Return the error for incompatible layouts, the same on every rank."""
    refused = [r for r, layout in enumerate(layouts) if layout.is_refused]
    if refused:
        return _refused_elsewhere(layouts[refused[0]].call, refused)
    for name, values in (
        ("call", {layout.call for layout in layouts}),
        ("dtype", {layout.dtype for layout in layouts}),
        ("number of dimensions", {len(layout.shape) for layout in layouts}),
        ("shape after dimension 0", {layout.shape[1:] for layout in layouts}),
    ):
        if len(values) > 1:
            texts = [
                f"{each.call} of {each.dtype} {list(each.shape)}" for each in layouts
            ]
            return CollectiveError(
                f"{name} must be equal on all ranks, got {by_ranks(texts)}."
            )
    return CollectiveError(
        f"{layouts[0].call} needs a tensor with at least one dimension, got a scalar. "
        "Use tensor.reshape(1)."
    )


def require_out_rows(
    call: str, layouts: Sequence[LayoutSummary], rank: int, results: Sequence[int]
) -> None:
    """Raise on every rank if a rank's ``out`` has the wrong number of rows."""
    own = [layout.out_rows for layout in layouts]
    wrong = [r for r, num in enumerate(own) if num >= 0 and num != results[r]]
    if rank in wrong:
        raise UsageError(
            f"out must have {results[rank]} rows, as many as the result of {call}, got "
            f"{layouts[rank].out_rows}. Omit out to get a new tensor."
        )
    if wrong:
        raise _refused_elsewhere(call, wrong)


def _refused_elsewhere(call: str, refused: Sequence[int]) -> CollectiveError:
    return CollectiveError(
        f"{call} has wrong arguments on {_name(refused)}. See the error on that rank."
    )


def by_ranks(texts: Sequence[str]) -> str:
    """Join the ranks' texts. Ranks with the same text are listed together."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    return "; ".join(f"{text} on {_name(ranks)}" for text, ranks in groups.items())


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def as_rows(numbers: Tensor) -> list[list[int]]:
    return numbers.tolist()  # pyright: ignore[reportUnknownVariableType]


def rows(num_rows: int, size: int) -> list[int]:
    """Split ``num_rows`` over ``size`` ranks; the first ranks take the extra rows."""
    base, extra = divmod(num_rows, size)
    return [base + (rank < extra) for rank in range(size)]
