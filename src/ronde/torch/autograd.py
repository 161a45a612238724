"""The collectives as functions of tensors, with their gradients.

The gradient of one is made of others, so that gradients of gradients are there as well.
"""

import sys
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ronde.collectives import ReduceOp, Work
from ronde.collectives.arithmetic import COMPLEX, FLOATS, INTEGERS
from ronde.collectives.torch_modes import new_like, outside_compiler
from ronde.coordination.requests import NamedOperation as Operation, OpKind
from ronde.errors import CollectiveError, UsageError
from ronde.torch.process_sets import ProcessSet, state_of
from ronde.torch.session import ProcessSetState

Tensors = Sequence[Tensor]
Splits = Sequence[int] | Tensor
Dtypes = Collection[torch.dtype]

# Horovod's numbers.
Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

_REDUCE_OPS = {
    Average: ReduceOp.AVERAGE,
    Sum: ReduceOp.SUM,
    Min: ReduceOp.MIN,
    Max: ReduceOp.MAX,
    Product: ReduceOp.PRODUCT,
}
_WITH_OUTPUTS = (OpKind.ALLREDUCE, OpKind.BROADCAST)
_NUMBERS = FLOATS | INTEGERS
_REDUCIBLE: dict[int, Dtypes] = {
    Average: _NUMBERS | COMPLEX,
    Sum: _NUMBERS | COMPLEX,
    Adasum: FLOATS,
    Min: _NUMBERS | {torch.bool},
    Max: _NUMBERS | {torch.bool},
    Product: _NUMBERS | COMPLEX | {torch.bool},
}


def choose_op(op: int | None, average: bool | None) -> int:
    """Return the reduction that ``op``, or its deprecated form ``average``, means."""
    if average is None:
        op = Average if op is None else op
        if op not in _REDUCIBLE:
            raise UsageError(
                f"op must be Average, Sum, Adasum, Min, Max or Product, got {op}."
            )
        return op
    if op is not None:
        raise UsageError(
            "The op parameter supersedes average. Please provide only one of them."
        )
    warnings.warn(
        "average is deprecated; use op=hvd.Average or op=hvd.Sum.",
        DeprecationWarning,
        stacklevel=3,
    )
    return Average if average else Sum


def require_adasum(process_set: ProcessSet, size: int) -> None:
    if process_set.process_set_id != 0:
        raise NotImplementedError(
            "Adasum does not support non-global process sets yet."
        )
    if size & (size - 1):
        raise NotImplementedError(
            "Running Adasum with non-power of 2 ranks is not supported yet."
        )


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this rank has only a part of it: FSDP2, tensor parallel."""
    # A program with DTensors has imported them, which takes a while.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def require_whole(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if is_sharded(tensor):
            raise UsageError(
                "a tensor of a collective must not be sharded, got a DTensor of shape "
                f"{list(tensor.shape)}. Give it to_local() or full_tensor()."
            )


# Not frozen: one is made for each call, and that would take three times as long.
@dataclass(slots=True)
class CollectiveFunction:
    """A collective on some tensors; its results are as many."""

    kind: ClassVar[OpKind]

    process_set: ProcessSet
    name: str | None = None  # on the wire; None matches ranks by the order of calls
    is_group: bool = False
    op: int = Sum
    prescale: float = 1.0
    postscale: float = 1.0

    def finish(self, results: Any) -> tuple[Tensor, ...]:  # noqa: ANN401  the operation's own
        return results

    def gradients(self, gradients: Tensors, num_rows: list[int]) -> Tensors:
        """Turn gradients of the results into those of inputs of so many rows each."""
        raise NotImplementedError

    def start(self, tensors: Tensors, *, in_place: bool = False) -> Work[Any]:
        state, operation = self._prepare(tensors, in_place=in_place)
        return state.coordinator.submit(operation)

    def run(self, tensors: Tensors) -> tuple[Tensor, ...]:
        """Carry it out, under autograd where a tensor needs that."""
        if torch.is_grad_enabled():
            for tensor in tensors:
                if tensor.requires_grad:
                    return cast("Any", _Differentiable.apply(self, *tensors))
        return self.run_detached(tensors)

    def run_detached(
        self, tensors: Tensors, *, in_place: bool = False
    ) -> tuple[Tensor, ...]:
        state, operation = self._prepare(tensors, in_place=in_place)
        return self.finish(state.coordinator.run(operation))

    @property
    def _state(self) -> ProcessSetState:
        return state_of(self.process_set, self.kind)

    @property
    def _gradient_name(self) -> str | None:
        return self.name and f"{self.name}.gradient"

    def _complete(self, state: ProcessSetState, operation: Operation) -> Operation:
        """Check the operation and add what only this function has."""
        del state
        return operation

    def _prepare(
        self, tensors: Tensors, *, in_place: bool
    ) -> tuple[ProcessSetState, Operation]:
        kind, dtypes = self.kind, None
        if kind is OpKind.ALLREDUCE:
            dtypes = _REDUCIBLE[self.op]
        elif kind is OpKind.REDUCESCATTER:
            dtypes = _REDUCIBLE[Average]
        for tensor in tensors:
            if type(tensor) is not Tensor:
                require_whole(tensors)
            if tensor.layout is not torch.strided or (
                dtypes is not None and tensor.dtype not in dtypes
            ):
                raise UsageError(f"Tensor type {tensor.type()} is not supported.")
        state = self._state
        own = tuple([t.detach() if t.requires_grad else t for t in tensors])
        outputs: tuple[Tensor, ...] = ()
        if kind in _WITH_OUTPUTS:
            outputs = own if in_place else tuple([new_like(tensor) for tensor in own])
        name, op = self.name or "", _REDUCE_OPS.get(self.op, ReduceOp.SUM)
        operation = Operation(
            kind, own, name, outputs, self.is_group, op, self.prescale, self.postscale
        )
        return state, self._complete(state, operation)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: CollectiveFunction, *tensors: Tensor) -> Any:  # noqa: ANN401  autograd's
        results = function.run_detached(tensors)
        ctx.function = function
        if isinstance(function, AlltoallFunction):
            # The way back takes what came from each rank.
            ctx.function = replace(function, splits=results[1])
        ctx.num_rows = [t.shape[0] if t.dim() else 1 for t in tensors]
        return results

    @staticmethod
    @outside_compiler
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ANN401  autograd's
        return None, *ctx.function.gradients(gradients, ctx.num_rows)


@dataclass(slots=True)
class AllreduceFunction(CollectiveFunction):
    """All-reduce; its gradient is the same reduction of gradients."""

    kind = OpKind.ALLREDUCE

    def _complete(self, state: ProcessSetState, operation: Operation) -> Operation:
        if self.op != Adasum:
            return operation
        require_adasum(self.process_set, len(state.ranks))
        return operation._replace(kind=OpKind.ADASUM)

    def gradients(self, gradients: Tensors, num_rows: list[int]) -> Tensors:
        del num_rows
        return replace(self, name=self._gradient_name).run(gradients)


@dataclass(slots=True)
class AllgatherFunction(CollectiveFunction):
    """All-gather; its gradient is this rank's rows of the averaged gradients."""

    kind = OpKind.ALLGATHER

    def gradients(self, gradients: Tensors, num_rows: list[int]) -> Tensors:
        name = self._gradient_name
        averaged = AllreduceFunction(self.process_set, name, self.is_group, Average)
        gathered = AllgatherFunction(self.process_set, name)
        results = averaged.run(gradients)
        (rows,) = gathered.run((torch.tensor([num_rows], device="cpu"),))
        starts = cast("list[int]", rows[: self._state.rank].sum(0).tolist())
        return [
            result.narrow(0, start, length)
            for result, start, length in zip(results, starts, num_rows, strict=True)
        ]


@dataclass(slots=True)
class BroadcastFunction(CollectiveFunction):
    """Copy from one rank; its gradient is the average there and zero elsewhere."""

    kind = OpKind.BROADCAST
    root_rank: int = 0  # among all ranks, also in a process set

    def _complete(self, state: ProcessSetState, operation: Operation) -> Operation:
        if self.root_rank not in state.ranks:
            raise UsageError(
                f"broadcast received invalid root rank {self.root_rank} for provided "
                "process set"
            )
        return operation._replace(root=state.ranks.index(self.root_rank))

    def gradients(self, gradients: Tensors, num_rows: list[int]) -> Tensors:
        del num_rows
        averaged = AllreduceFunction(self.process_set, self._gradient_name, op=Average)
        results = averaged.run(gradients)
        if self._state.ranks[self._state.rank] == self.root_rank:
            return results
        return [torch.zeros_like(result) for result in results]


@dataclass(slots=True)
class ReducescatterFunction(CollectiveFunction):
    """Reduce-scatter by sum or average; its gradient is gathered."""

    kind = OpKind.REDUCESCATTER

    def _complete(self, state: ProcessSetState, operation: Operation) -> Operation:
        del state
        if self.op not in (Average, Sum):
            raise CollectiveError(
                "Reducescatter currently only supports AVERAGE and SUM."
            )
        return operation

    def gradients(self, gradients: Tensors, num_rows: list[int]) -> Tensors:
        del num_rows
        factor = self.prescale * self.postscale
        factor *= len(self._state.ranks) if self.op == Sum else 1
        name = self._gradient_name
        gathered = AllgatherFunction(self.process_set, name, self.is_group)
        return gathered.run([gradient * factor for gradient in gradients])


@dataclass(slots=True)
class AlltoallFunction(CollectiveFunction):
    """All-to-all; each row's gradient goes back to where it came from."""

    kind = OpKind.ALLTOALL
    splits: Splits | None = None

    def _complete(self, state: ProcessSetState, operation: Operation) -> Operation:
        splits = self.splits
        if isinstance(splits, Tensor):
            if splits.dim() != 1:
                raise UsageError("alltoall expects a 1D splits tensor")
            if splits.dtype is not torch.int32:
                raise UsageError(
                    "alltoall expects splits to contain 32-bit integer elements."
                )
            # An empty one is Horovod's placeholder for none.
            splits = cast("list[int]", splits.tolist()) or None
        elif splits is not None:
            splits = list(splits)
        tensor = operation.tensors[0]
        if tensor.dim():
            _require_rows(splits, tensor.shape[0], len(state.ranks))
        return operation._replace(splits=splits)

    def finish(self, results: Any) -> tuple[Tensor, ...]:  # noqa: ANN401  the operation's own
        received, counts = results[0]
        device = self.splits.device if isinstance(self.splits, Tensor) else None
        return received, torch.tensor(counts, dtype=torch.int32, device=device)

    def gradients(self, gradients: Tensors, num_rows: list[int]) -> Tensors:
        sent_back = replace(self, name=self._gradient_name)
        gradient = sent_back.run(gradients[:1])[0]
        num_dropped = num_rows[0] - gradient.shape[0]
        if num_dropped:  # past the splits' sum: they went nowhere
            rest = gradient.new_zeros(num_dropped, *gradient.shape[1:])
            gradient = torch.cat([gradient, rest])
        return (gradient,)


def _require_rows(splits: Sequence[int] | None, num_rows: int, size: int) -> None:
    if splits is None:
        if num_rows % size:
            raise UsageError(
                "splits not provided, but first dimension of tensor is not an even "
                "multiple of the number of workers."
            )
        return
    if len(splits) != size:
        raise UsageError(
            "Number of entries in splits does not equal number of workers."
        )
    if sum(splits) > num_rows:
        raise UsageError(
            "Sum of splits entries is greater than the first dimension of tensor."
        )
    if min(splits) < 0:
        raise UsageError(f"splits must be at least 0, got {list(splits)}.")
