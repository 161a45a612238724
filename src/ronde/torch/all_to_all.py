"""Horovod's all-to-all of tensors, synchronous and with handles."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ronde.collectives import Work
from ronde.collectives.torch_modes import outside_compiler
from ronde.coordination.coordinator import Coordinator
from ronde.coordination.requests import NamedOperation, OpKind
from ronde.errors import UsageError
from ronde.torch.process_sets import ProcessSet, global_process_set
from ronde.torch.session import current_session
from ronde.torch.submission import detached, member_of, require_dtypes
from ronde.torch.works import Exchanged

Splits = Sequence[int] | Tensor


@outside_compiler
def alltoall(
    tensor: Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows of dimension 0 to the ranks and return those they sent here.

    Args:
        tensor: Any dtype; later dimensions are equal on all ranks.
        splits: Rows for each rank, as a list or a one-dimensional int32 tensor; None
            splits evenly. Rows past their sum are left out.
        name: As in ``reductions``.
        process_set: As in ``reductions``.

    Returns:
        The received rows in rank order; with ``splits`` also how many came from each
        rank, int32, on the device of ``splits``.

    Raises:
        UsageError: ``splits`` does not fit the tensor or the set.
        CollectiveError: As in ``reductions``.
    """
    exchange = _Exchange(name or "", process_set)
    if tensor.requires_grad and torch.is_grad_enabled():
        received, counts = cast(
            "tuple[Tensor, Tensor]", _Differentiable.apply(exchange, tensor, splits)
        )
    else:
        received, counts = exchange.carry_out(tensor, splits)
    return received if splits is None else (received, counts)


@outside_compiler
def alltoall_async(
    tensor: Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``alltoall``; the handle's result is always the pair."""
    work = _Exchange(name or "", process_set).start(tensor, splits)
    return current_session().handles.add(work)


@dataclass(frozen=True, slots=True)
class _Exchange:
    name: str
    process_set: ProcessSet

    def start(self, tensor: Tensor, splits: Splits | None) -> Exchanged:
        coordinator, operation = self._prepare(tensor, splits)
        return Exchanged(coordinator.submit(operation), splits)

    def carry_out(self, tensor: Tensor, splits: Splits | None) -> tuple[Tensor, Tensor]:
        coordinator, operation = self._prepare(tensor, splits)
        return Exchanged(Work(coordinator.run(operation)), splits).wait()

    def _prepare(
        self, tensor: Tensor, splits: Splits | None
    ) -> tuple[Coordinator, NamedOperation]:
        require_dtypes((tensor,))
        member = member_of(self.process_set, "Alltoall")
        counts = _counts(splits)
        if tensor.dim():
            _require_rows(counts, tensor.shape[0], len(member.ranks))
        return member.coordinator, NamedOperation(
            OpKind.ALLTOALL, detached((tensor,)), self.name, splits=counts
        )


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  autograd's
        exchange: _Exchange,
        tensor: Tensor,
        splits: Splits | None,
    ) -> tuple[Tensor, Tensor]:
        received, counts = exchange.carry_out(tensor, splits)
        ctx.exchange = exchange
        ctx.counts = counts.tolist()
        ctx.num_rows = tensor.shape[0]
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    @outside_compiler
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ANN401  autograd's
        """Send every row's gradient back to where the row came from."""
        exchange: _Exchange = ctx.exchange
        name = exchange.name and f"{exchange.name}.gradient"
        result = alltoall(gradients[0], ctx.counts, name, exchange.process_set)
        gradient = cast("tuple[Tensor, Tensor]", result)[0]
        num_dropped = ctx.num_rows - gradient.shape[0]
        if num_dropped:  # rows past the sum of the splits, which nobody got
            rest = gradient.new_zeros(num_dropped, *gradient.shape[1:])
            gradient = torch.cat([gradient, rest])
        return None, gradient, None


def _counts(splits: Splits | None) -> list[int] | None:
    """Return the splits as a list.

    Raises:
        UsageError: They are no one-dimensional integers of 32 bits.
    """
    if not isinstance(splits, Tensor):
        return None if splits is None else list(splits)
    if splits.dim() != 1:
        raise UsageError("alltoall expects a 1D splits tensor")
    if splits.dtype is not torch.int32:
        raise UsageError("alltoall expects splits to contain 32-bit integer elements.")
    # Horovod's placeholder for none.
    return cast("list[int]", splits.tolist()) or None


def _require_rows(counts: list[int] | None, num_rows: int, size: int) -> None:
    """Refuse splits that the rows or the set do not have.

    Raises:
        UsageError: They do not fit.
    """
    if counts is None:
        if num_rows % size:
            raise UsageError(
                "splits not provided, but first dimension of tensor is not an even "
                "multiple of the number of workers."
            )
        return
    if len(counts) != size:
        raise UsageError(
            "Number of entries in splits does not equal number of workers."
        )
    if sum(counts) > num_rows:
        raise UsageError(
            "Sum of splits entries is greater than the first dimension of tensor."
        )
    if min(counts) < 0:
        raise UsageError(f"splits must be at least 0, got {counts}.")
