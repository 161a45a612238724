"""What the ranks exchange before tensors of unequal sizes move.

Three numbers of every rank go to every other: a signature of all that must be equal,
its rows, and those of its ``out``. Only where these do not fit do the ranks exchange
their dtypes and shapes, for the error.
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
    """What every rank must know of a layout."""

    signature: int  # equal for equal calls, dtypes and dimensions after the first
    num_rows: int  # dimension 0; -1 where there is none, or the rank refused
    out_rows: int  # rows of the place that the caller gave for the result; -1 for none


class CallLayout(NamedTuple):
    """One rank's part of a call whose sizes the others must know."""

    call: str
    dtype: torch.dtype | str
    shape: tuple[int, ...] = ()
    out_rows: int = _NO_ROWS
    is_refused: bool = False  # its own arguments are wrong: it takes no part

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
        """Return it as int64 numbers, as many for every layout."""
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
    """Return what is wrong with layouts that do not fit, alike on every rank."""
    refused = [r for r, layout in enumerate(layouts) if layout.is_refused]
    if refused:
        return _refused_elsewhere(layouts[refused[0]].call, refused)
    for what, values in (
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
                f"{what} must be equal on all ranks, got {by_ranks(texts)}."
            )
    return CollectiveError(
        f"{layouts[0].call} must be given at least one dimension, got a scalar. "
        "Use tensor.reshape(1)."
    )


def require_out_rows(
    call: str, layouts: Sequence[LayoutSummary], rank: int, results: Sequence[int]
) -> None:
    """Refuse, on every rank, results of so many rows that an ``out`` cannot hold."""
    own = [layout.out_rows for layout in layouts]
    wrong = [r for r, num in enumerate(own) if num >= 0 and num != results[r]]
    if rank in wrong:
        raise UsageError(
            f"out must have as many rows as the result of {call}, {results[rank]}, got "
            f"{layouts[rank].out_rows}. Leave it out for a new tensor."
        )
    if wrong:
        raise _refused_elsewhere(call, wrong)


def _refused_elsewhere(call: str, refused: Sequence[int]) -> CollectiveError:
    return CollectiveError(
        f"{call} was given wrong arguments on {_name(refused)}; the error there says "
        "which."
    )


def by_ranks(texts: Sequence[str]) -> str:
    """Return which ranks, by their number, have which of some texts."""
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
