"""Reductions: which of torch's does what was asked, and what is left to do after it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp as TorchOp

from ronde.collectives.arguments import require_out
from ronde.collectives.arithmetic import (
    HALVES,
    decode,
    dense,
    encode,
    put_back,
    reduce_stack,
    require_reducible,
    scale_,
    scaled,
)
from ronde.collectives.communicator import Done, ReduceOp, Work, rows
from ronde.collectives.engines.torch_distributed import steps
from ronde.collectives.engines.torch_distributed.groups import Groups, reduce_options
from ronde.collectives.engines.torch_distributed.work import Submitted, TorchWork
from ronde.collectives.failures import Scene
from ronde.errors import UsageError

_FLOATS = (torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64, torch.int8, torch.uint8)
_TORCH_OPS = {
    ReduceOp.SUM: TorchOp.SUM,
    ReduceOp.AVERAGE: TorchOp.SUM,
    ReduceOp.MIN: TorchOp.MIN,
    ReduceOp.MAX: TorchOp.MAX,
    ReduceOp.PRODUCT: TorchOp.PRODUCT,
}
# What torch is to be told, and what its result is to be divided by.
Direct = dict[tuple[torch.dtype, ReduceOp], tuple[Any, int]]


class Reductions:
    """The reductions of one communicator."""

    def __init__(self, groups: Groups, rank: int, size: int, timeout_s: float) -> None:
        self._groups = groups
        self._rank = rank
        self._size = size
        self._all_reduce_scene = Scene("all_reduce", rank, size, timeout_s)
        self._reduce_scatter_scene = Scene("reduce_scatter", rank, size, timeout_s)
        self._options = {op: reduce_options(_TORCH_OPS[op]) for op in ReduceOp}
        self._direct = {"cpu": _direct_on_gloo(size), "cuda": _direct_on_nccl(size)}

    def all_reduce(
        self, tensor: Tensor, op: ReduceOp, prescale: float, postscale: float
    ) -> Work[Tensor]:
        """Reduce in place. This is on the path of every training step."""
        device = tensor.device
        backend = self._groups.of(device)
        direct = self._direct[device.type].get((tensor.dtype, op))
        if direct is None or not tensor.numel():
            return self._all_reduce_otherwise(tensor, op, prescale, postscale)
        values = tensor if tensor.is_contiguous() else dense(tensor)
        options, divisor = direct
        try:
            if prescale != 1.0:
                scale_(values, prescale)
            pending = backend.allreduce([values], options)
        except RuntimeError as error:
            raise self._all_reduce_scene.explain(error) from error
        finish = partial(_settle, tensor, values, divisor, postscale)
        return TorchWork((pending,), finish, self._all_reduce_scene)

    def _all_reduce_otherwise(
        self, tensor: Tensor, op: ReduceOp, prescale: float, postscale: float
    ) -> Work[Tensor]:
        """Reduce in place what torch does not reduce as it is."""
        require_reducible(tensor.dtype, op, prescale, postscale)
        if not tensor.numel():
            return Done(tensor)
        if tensor.dtype in HALVES or (op is ReduceOp.PRODUCT and tensor.is_complex()):
            return self._all_reduce_by_shares(tensor, op, prescale, postscale)
        encoded = encode(scaled(tensor, prescale), op)
        with self._all_reduce_scene.guard():
            backend = self._groups.of(tensor.device)
            pending = backend.allreduce([encoded], self._options[op])

        def finish() -> Tensor:
            result = decode(encoded, tensor.dtype, op, self._size, postscale)
            return put_back(result, tensor)

        return TorchWork((pending,), finish, self._all_reduce_scene)

    def _all_reduce_by_shares(
        self, tensor: Tensor, op: ReduceOp, prescale: float, postscale: float
    ) -> Work[Tensor]:
        reduce = partial(
            steps.reduce_by_shares,
            tensor=tensor,
            op=op,
            prescale=prescale,
            postscale=postscale,
        )
        with self._all_reduce_scene.guard():
            if tensor.is_cuda:
                # The stream keeps the steps in order; the host does not wait.
                reduce(self._groups.of(tensor.device), self._size)
                return Done(tensor)
            outcome = self._groups.lane().submit(
                lambda backend: reduce(backend, self._size)
            )
        return TorchWork((Submitted(outcome),), lambda: tensor, self._all_reduce_scene)

    def reduce_scatter(
        self,
        tensor: Tensor,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        out: Tensor | None,
    ) -> Work[Tensor]:
        """Reduce and keep this rank's rows."""
        require_reducible(tensor.dtype, op, prescale, postscale)
        if tensor.ndim == 0:
            raise UsageError(
                "tensor must have at least one dimension, got a scalar. "
                "Use tensor.reshape(1)."
            )
        require_out(out, tensor, rows(tensor.shape[0], self._size)[self._rank])
        with self._reduce_scatter_scene.guard():
            backend = self._groups.of(tensor.device)
            pending, received = steps.scatter_rows(
                backend, self._rank, self._size, scaled(tensor, prescale)
            )

        def finish() -> Tensor:
            reduced = reduce_stack(received, op, postscale)
            if out is None:
                return reduced
            out.detach().copy_(reduced)
            return out

        return TorchWork(pending, finish, self._reduce_scatter_scene)


def _settle(tensor: Tensor, values: Tensor, divisor: int, postscale: float) -> Tensor:
    """Finish a sum and put it where it belongs."""
    if divisor != 1:
        values.detach().div_(divisor)
    if postscale != 1.0:
        scale_(values, postscale)
    if values is not tensor:
        tensor.detach().copy_(values)
    return tensor


def _direct_on_both(size: int) -> Direct:
    """List what either reduces, averages of floats by a sum that is then divided."""
    options = {op: reduce_options(_TORCH_OPS[op]) for op in ReduceOp}
    direct: Direct = {}
    for op in ReduceOp:
        for dtype in (*_FLOATS, *_INTEGERS, *HALVES):
            direct[dtype, op] = (options[op], size if op is ReduceOp.AVERAGE else 1)
    for dtype in _INTEGERS:
        del direct[dtype, ReduceOp.AVERAGE]
    return direct


def _direct_on_gloo(size: int) -> Direct:
    """List what Gloo reduces as it is to be.

    It rounds a sum of 16-bit floats once a rank, so only two ranks' go that way; their
    average does not, since the sum of two float16 may overflow where the average fits.
    """
    direct = _direct_on_both(size)
    del direct[torch.float16, ReduceOp.AVERAGE]
    if size > 2:
        del direct[torch.bfloat16, ReduceOp.AVERAGE]
        for dtype in HALVES:
            del direct[dtype, ReduceOp.SUM]
            del direct[dtype, ReduceOp.PRODUCT]
    return direct


def _direct_on_nccl(size: int) -> Direct:
    """List what NCCL reduces as it is to be.

    Its own average of 16-bit floats divides first, so that the sum cannot overflow.
    """
    direct = _direct_on_both(size)
    for dtype in HALVES:
        direct[dtype, ReduceOp.AVERAGE] = (reduce_options(TorchOp.AVG), 1)
    return direct
