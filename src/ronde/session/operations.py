"""Named collectives, handles and objects for every front end.

Arguments and results are dense torch tensors on CPU or CUDA. Front ends other than
``ronde.torch`` share memory with their own arrays through DLPack.
"""

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ronde.collectives import ReduceOp, Work
from ronde.collectives.arithmetic import COMPLEX, FLOATS, INTEGERS
from ronde.collectives.objects import (
    all_gather_object,
    broadcast_object as broadcast_object_by,
)
from ronde.collectives.torch_modes import new_like, outside_compiler
from ronde.coordination.requests import REDUCE_OPS, NamedOperation as Operation, OpKind
from ronde.data_parallel import participate_until_all_joined
from ronde.errors import CollectiveError, UsageError
from ronde.session.session import (
    ProcessSet,
    ProcessSetState,
    current_session,
    global_process_set,
    state_of,
)

Tensors = Sequence[Tensor]
Splits = Sequence[int] | Tensor

# Horovod's numbers.
Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

_WITH_OUTPUTS = (OpKind.ALLREDUCE, OpKind.BROADCAST)
_NUMBERS = FLOATS | INTEGERS
_REDUCIBLE: dict[int, Collection[torch.dtype]] = {
    Average: _NUMBERS | COMPLEX,
    Sum: _NUMBERS | COMPLEX,
    Adasum: FLOATS,
    Min: _NUMBERS | {torch.bool},
    Max: _NUMBERS | {torch.bool},
    Product: _NUMBERS | COMPLEX | {torch.bool},
}


def choose_op(op: int | None, average: bool | None) -> int:
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
    """Return True for a DTensor, the tensor class of FSDP2 and tensor parallelism."""
    # A program with DTensors has imported their module; importing it here is slow.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def require_whole(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if is_sharded(tensor):
            raise UsageError(
                "collectives do not support sharded tensors, got a DTensor of shape "
                f"{list(tensor.shape)}. Pass its to_local() or full_tensor()."
            )


# Not frozen: each call makes one, and frozen ones take three times as long to make.
@dataclass(slots=True)
class NamedCollective:
    """A collective on one or more tensors in a process set, with a result for each.

    ``run`` waits for the results; ``start`` and ``start_handle`` do not. With
    ``in_place`` an all-reduce or a broadcast writes its results into the tensors.
    """

    kind: ClassVar[OpKind]

    process_set: ProcessSet
    name: str | None = None  # matches calls across ranks; None: by their order
    is_group: bool = False
    op: int = Sum
    prescale: float = 1.0
    postscale: float = 1.0

    def run(self, tensors: Tensors, *, in_place: bool = False) -> tuple[Tensor, ...]:
        state, operation = self._prepare(tensors, in_place=in_place)
        return self._finish(state.coordinator.run(operation))

    def start(self, tensors: Tensors, *, in_place: bool = False) -> Work[Any]:
        state, operation = self._prepare(tensors, in_place=in_place)
        return state.coordinator.submit(operation)

    def start_handle(
        self,
        tensors: Tensors,
        *,
        in_place: bool = False,
        convert: Callable[[Any], Any] = lambda result: result,
    ) -> int:
        """Start the collective; return a handle. ``convert`` is applied to results."""
        given = tuple(tensors)
        work = self.start(given, in_place=in_place) if given else Work[Any](())

        def finish(results: Any) -> Any:  # noqa: ANN401  a tensor or a tuple
            return convert(self.result(given if in_place else self._finish(results)))

        session = current_session()
        handle = next(session.handle_numbers)
        session.handles[handle] = work, finish
        return handle

    def result(self, results: Tensors) -> Any:  # noqa: ANN401  a tensor or a tuple
        """Return a tuple for a group or several results, else the single result."""
        return results if self.is_group or len(results) > 1 else results[0]

    def _finish(self, results: Any) -> tuple[Tensor, ...]:  # noqa: ANN401  the operation's own
        return results

    def _complete(self, state: ProcessSetState, operation: Operation) -> Operation:
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
        state = state_of(self.process_set, kind)
        own = tuple([t.detach() if t.requires_grad else t for t in tensors])
        outputs: tuple[Tensor, ...] = ()
        if kind in _WITH_OUTPUTS:
            outputs = own if in_place else tuple([new_like(tensor) for tensor in own])
        name, op = self.name or "", REDUCE_OPS.get(self.op, ReduceOp.SUM)
        operation = Operation(
            kind, own, name, outputs, self.is_group, op, self.prescale, self.postscale
        )
        return state, self._complete(state, operation)


@dataclass(slots=True)
class Allreduce(NamedCollective):
    """A reduction with its result on every rank."""

    kind = OpKind.ALLREDUCE

    def _complete(self, state: ProcessSetState, operation: Operation) -> Operation:
        if self.op != Adasum:
            return operation
        require_adasum(self.process_set, len(state.ranks))
        return operation._replace(kind=OpKind.ADASUM)


@dataclass(slots=True)
class Allgather(NamedCollective):
    """All ranks' tensors, concatenated by rank; dimension 0 may differ."""

    kind = OpKind.ALLGATHER


@dataclass(slots=True)
class Broadcast(NamedCollective):
    """A copy of one rank's tensors on every rank."""

    kind = OpKind.BROADCAST
    root_rank: int = 0  # a global rank, also in a process set

    def _complete(self, state: ProcessSetState, operation: Operation) -> Operation:
        if self.root_rank not in state.ranks:
            raise UsageError(
                f"broadcast received invalid root rank {self.root_rank} for provided "
                "process set"
            )
        return operation._replace(root=state.ranks.index(self.root_rank))


@dataclass(slots=True)
class Reducescatter(NamedCollective):
    """A sum or average over ranks, of which each rank gets its own rows."""

    kind = OpKind.REDUCESCATTER

    def _complete(self, state: ProcessSetState, operation: Operation) -> Operation:
        del state
        if self.op not in (Average, Sum):
            raise CollectiveError(
                "Reducescatter currently only supports AVERAGE and SUM."
            )
        return operation


@dataclass(slots=True)
class Alltoall(NamedCollective):
    """An exchange of rows; returns the received rows and their int32 counts by rank."""

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
            # An empty tensor is Horovod's placeholder for no splits.
            splits = cast("list[int]", splits.tolist()) or None
        elif splits is not None:
            splits = list(splits)
        tensor = operation.tensors[0]
        if tensor.dim():
            _require_rows(splits, tensor.shape[0], len(state.ranks))
        return operation._replace(splits=splits)

    def _finish(self, results: Any) -> tuple[Tensor, ...]:  # noqa: ANN401  the operation's own
        received, counts = results[0]
        device = self.splits.device if isinstance(self.splits, Tensor) else None
        return received, torch.tensor(counts, dtype=torch.int32, device=device)


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


@outside_compiler
def poll(handle: int) -> bool:
    """Return True if ``synchronize(handle)`` would return at once."""
    handles = current_session().handles
    if handle not in handles:
        raise UsageError(f"Handle {handle} was not created or has been cleared.")
    return handles[handle][0].is_done()


@outside_compiler
def synchronize(handle: int) -> Any:  # noqa: ANN401  each operation's own result
    """Wait for an operation and return its result; None if the handle is unknown."""
    handles = current_session().handles
    if handle not in handles:
        return None
    work, finish = handles.pop(handle)
    return finish(work.wait())


@outside_compiler
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set has called this; one call at a time per set."""
    coordinator = state_of(process_set, OpKind.BARRIER).coordinator
    coordinator.run(Operation(OpKind.BARRIER))


@outside_compiler
def join(device: int = -1) -> int:
    """Contribute zeros to other ranks' reductions until all ranks have joined.

    A rank with less data than others calls it at the end. Averages still divide by the
    number of all ranks. Collectives other than reductions fail on the ranks that call
    them. ``device`` is ignored. Returns the rank that joined last, or with optimizers a
    rank that took the last step.
    """
    del device
    states = current_session().states
    participants = [each for state in states.values() for each in state.participants]
    return participate_until_all_joined(participants, states[0].coordinator)


@outside_compiler
def broadcast_object(
    obj: Any,  # noqa: ANN401  anything
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:  # noqa: ANN401  anything
    """Return ``root_rank``'s object on every rank of the set; collective.

    The object can be anything that cloudpickle supports; other ranks' arguments are
    ignored. ``root_rank`` is a global rank. Calls are matched by ``name``, or
    without one by their order.
    """
    return broadcast_object_by(NamedTransport(name, process_set), obj, root_rank)


@outside_compiler
def allgather_object(
    obj: Any,  # noqa: ANN401  anything
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return a list of all ranks' objects; collective, like ``broadcast_object``."""
    return all_gather_object(NamedTransport(name, process_set), obj)


class NamedTransport:
    """Sends the bytes of an object with named collectives; ranks are global."""

    def __init__(self, name: str | None, process_set: ProcessSet) -> None:
        state = state_of(process_set, OpKind.BROADCAST)
        self.rank = state.ranks[state.rank]
        self.size = len(state.ranks)
        self._process_set = process_set
        # A broadcast sends the length, then the bytes; an all-gather both at once.
        named = [f"{name}.sz", f"{name}.t"]
        self._names = iter(named) if name else repeat(name)

    def broadcast(self, tensor: Tensor, root: int) -> Work[Tensor]:
        name = next(self._names)
        collective = Broadcast(self._process_set, name, root_rank=root)
        return Work(collective.run((tensor,), in_place=True)[0])

    def all_gather(self, tensor: Tensor) -> Work[Tensor]:
        collective = Allgather(self._process_set, next(self._names))
        return Work(collective.run((tensor,))[0])
