"""What the ranks tell each other before tensors of unequal sizes move."""

import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ronde.collectives.arguments import require_out, require_splits
from ronde.errors import CollectiveError, UsageError

MAX_NDIM = 64
"""Dimensions that a tensor can have in torch."""
_DTYPES = {
    zlib.crc32(str(value).encode()): str(value)
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_CALLS = ("all_gather", "all_to_all")
_REFUSED = -1
_NO_OUT = -1


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's part of a call whose sizes the others must know.

    Attributes:
        call: The collective.
        dtype: Name of the tensor's dtype.
        shape: The tensor's.
        splits: Rows for each rank in ``all_to_all``; empty elsewhere.
        out_rows: Rows of the place that the caller gave for the result; or None.
        is_refused: The rank found its own arguments wrong and will not take part.
    """

    call: str
    dtype: str
    shape: tuple[int, ...]
    splits: tuple[int, ...] = ()
    out_rows: int | None = None
    is_refused: bool = False

    @staticmethod
    def num_numbers(size: int) -> int:
        """Return how many numbers ``encode`` writes."""
        return 4 + size + MAX_NDIM

    def encode(self, size: int) -> Tensor:
        """Return it as int64 numbers, as many for every layout."""
        splits = self.splits or (0,) * size
        head = [
            _CALLS.index(self.call),
            zlib.crc32(self.dtype.encode()),
            _REFUSED if self.is_refused else len(self.shape),
            _NO_OUT if self.out_rows is None else self.out_rows,
        ]
        padding = (0,) * (MAX_NDIM - len(self.shape))
        return torch.tensor([*head, *splits, *self.shape, *padding])

    @classmethod
    def decode(cls, encoded: Tensor, size: int) -> "Layout":
        """Read what ``encode`` wrote."""
        numbers: list[int] = encoded.tolist()  # pyright: ignore[reportUnknownVariableType]
        call, dtype, ndim, out_rows, *rest = numbers
        return cls(
            _CALLS[call],
            _DTYPES.get(dtype, f"dtype {dtype:#x}"),
            tuple(rest[size : size + max(ndim, 0)]),
            tuple(rest[:size]),
            None if out_rows == _NO_OUT else out_rows,
            is_refused=ndim == _REFUSED,
        )


def require_agreement(layouts: Sequence[Layout]) -> None:
    """Refuse layouts that do not fit together, in the same words on every rank.

    Raises:
        CollectiveError: Calls, dtypes or dimensions after the first differ, a rank gave
            a tensor without dimensions, or one refused its own arguments.
    """
    refused = [r for r, layout in enumerate(layouts) if layout.is_refused]
    if refused:
        raise _refused_elsewhere(layouts, refused)
    for what, values in (
        ("call", [layout.call for layout in layouts]),
        ("dtype", [layout.dtype for layout in layouts]),
        ("number of dimensions", [str(len(layout.shape)) for layout in layouts]),
        ("shape after dimension 0", [str(layout.shape[1:]) for layout in layouts]),
    ):
        _require_equal(what, values, layouts)
    if not layouts[0].shape:
        raise CollectiveError(
            f"{layouts[0].call} must be given at least one dimension, got a scalar. "
            "Use tensor.reshape(1)."
        )


def require_out_rows(
    layouts: Sequence[Layout], rank: int, results: Sequence[int]
) -> None:
    """Refuse a result that does not fit its place on some rank, on every rank.

    Args:
        layouts: Those of all ranks, which agree.
        rank: This process.
        results: Rows of each rank's result.

    Raises:
        UsageError: The result does not fit this rank's ``out``.
        CollectiveError: It does not fit another's.
    """
    wrong = [
        r
        for r, layout in enumerate(layouts)
        if layout.out_rows not in (None, results[r])
    ]
    if rank in wrong:
        raise UsageError(
            f"out must have as many rows as the result of {layouts[rank].call}, "
            f"{results[rank]}, got {layouts[rank].out_rows}. Leave it out for a new "
            "tensor."
        )
    if wrong:
        raise _refused_elsewhere(layouts, wrong)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How the ranks of one communicator agree on sizes, over whatever engine.

    Attributes:
        rank: This process in the group.
        size: Number of processes in the group.
        gather: Returns every rank's numbers, a row a rank, for one's own; blocks.
    """

    rank: int
    size: int
    gather: Callable[[Tensor], Tensor]

    def on_rows(self, call: str, tensor: Tensor, out: Tensor | None) -> list[int]:
        """Return how many rows every rank gives; collective.

        Raises:
            UsageError: ``out`` cannot hold the result of this rank.
            CollectiveError: The ranks' tensors or places do not fit together.
        """
        with self._telling_refusal(call, tensor):
            require_out(out, tensor)
        layouts = self._agree(_layout(call, tensor, (), out))
        counts = [layout.shape[0] for layout in layouts]
        require_out_rows(layouts, self.rank, [sum(counts)] * self.size)
        return counts

    def on_splits(
        self, tensor: Tensor, splits: Sequence[int] | None, out: Tensor | None
    ) -> list[tuple[int, ...]]:
        """Return how many rows every rank sends to every other; collective.

        Raises:
            UsageError: ``splits`` or ``out`` of this rank are wrong.
            CollectiveError: The ranks' tensors or places do not fit together.
        """
        with self._telling_refusal("all_to_all", tensor):
            sent = require_splits(tensor, splits, self.size)
            require_out(out, tensor)
        layouts = self._agree(_layout("all_to_all", tensor, sent, out))
        plan = [layout.splits for layout in layouts]
        received = [sum(column) for column in zip(*plan, strict=True)]
        require_out_rows(layouts, self.rank, received)
        return plan

    @contextmanager
    def _telling_refusal(self, call: str, tensor: Tensor) -> Generator[None]:
        """Tell the others, who wait for this rank's layout, when it raises instead."""
        try:
            yield
        except UsageError:
            self._exchange(Layout(call, str(tensor.dtype), (), is_refused=True))
            raise

    def _agree(self, own: Layout) -> list[Layout]:
        layouts = self._exchange(own)
        require_agreement(layouts)
        return layouts

    def _exchange(self, own: Layout) -> list[Layout]:
        gathered = self.gather(own.encode(self.size))
        return [Layout.decode(row, self.size) for row in gathered]


def _layout(
    call: str, tensor: Tensor, splits: Sequence[int], out: Tensor | None
) -> Layout:
    out_rows = None if out is None else out.shape[0]
    return Layout(call, str(tensor.dtype), tuple(tensor.shape), tuple(splits), out_rows)


def _refused_elsewhere(
    layouts: Sequence[Layout], refused: Sequence[int]
) -> CollectiveError:
    return CollectiveError(
        f"{layouts[refused[0]].call} was given wrong arguments on "
        f"{_name(refused)}; the error there says which."
    )


def _require_equal(what: str, values: Sequence[str], layouts: Sequence[Layout]) -> None:
    if len(set(values)) == 1:
        return
    groups: dict[str, list[int]] = {}
    for rank, layout in enumerate(layouts):
        text = f"{layout.call} of {layout.dtype} {list(layout.shape)}"
        groups.setdefault(text, []).append(rank)
    told = "; ".join(f"{text} on {_name(ranks)}" for text, ranks in groups.items())
    raise CollectiveError(f"{what} must be equal on all ranks, got {told}.")


def _name(ranks: Sequence[int]) -> str:
    """Name ranks, the first few of them where there are many."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
