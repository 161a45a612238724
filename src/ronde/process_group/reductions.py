"""torch's reductions, implemented with a communicator."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed as dist

from ronde.collectives import ReduceOp, Work
from ronde.errors import UsageError
from ronde.process_group.base import GroupBase, Options, Works
from ronde.process_group.tensor_lists import (
    as_real,
    copy_apart,
    copy_if_needed,
    flattened,
    joined,
    memory_of,
    only,
    require_count,
    require_dtype,
    require_ratio,
)
from ronde.process_group.works import GroupWork

_OPS = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.AVERAGE,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "PRODUCT": ReduceOp.PRODUCT,
    "PREMUL_SUM": ReduceOp.SUM,
}
_BITWISE = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


_kinds: Any = dist.ReduceOp.RedOpType
_NAMES = {kind: str(name) for name, kind in _kinds.__members__.items()}


class Reductions(GroupBase):
    """The reductions of a process group, as torch calls them."""

    def allreduce(self, tensors: Sequence[Tensor], opts: Options = None) -> GroupWork:
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        name = _name_of(opts)
        if name in _BITWISE:
            return self._reduce_bits(only(tensors, "tensors"), name, opts)
        op, factor = _read_op(name, opts, tensors)
        if only(tensors, "tensors").is_sparse:
            return self._reduce_sparse(tensors[0], op, opts)

        def start() -> Works:
            data = as_real(tensors[0], op)
            return [self._communicator.all_reduce(data, op, prescale=factor)]

        return self._start("all_reduce", start, lambda _: list(tensors), opts)

    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: Options = None
    ) -> GroupWork:
        op, factor = _read_op(_name_of(opts), opts, tensors)
        joint: list[Tensor] = []

        def start() -> Works:
            require_dtype(tensors, tensors[0], "tensors")
            joint.append(joined([as_real(tensor, op) for tensor in tensors]))
            return [self._communicator.all_reduce(joint[0], op, prescale=factor)]

        def finish(_: list[Any]) -> list[Tensor]:
            copy_apart(joint[0], [as_real(tensor, op) for tensor in tensors])
            return list(tensors)

        return self._start("all_reduce", start, finish, opts)

    def _reduce_bits(self, tensor: Tensor, name: str, opts: Options) -> GroupWork:
        combine = _BITWISE[name]

        def start() -> Works:
            if tensor.is_floating_point() or tensor.is_complex():
                raise UsageError(
                    f"tensors must have an integer dtype or bool for {name}, got "
                    f"{tensor.dtype}."
                )
            return [self._communicator.all_gather(tensor.data[None])]

        def finish(results: list[Any]) -> list[Tensor]:
            first, *others = results[0]
            for other in others:
                combine(first, other, out=first)
            tensor.data.copy_(first)
            return [tensor]

        return self._start("all_reduce", start, finish, opts)

    def _reduce_sparse(self, tensor: Tensor, op: ReduceOp, opts: Options) -> GroupWork:
        if op is not ReduceOp.SUM:
            raise UsageError(f"op must be SUM for sparse tensors, got {op}.")

        def start() -> Works:
            own = tensor.data.coalesce()
            gather = self._communicator.all_gather
            return [gather(own.indices().t().contiguous()), gather(own.values())]

        def finish(results: list[Any]) -> list[Tensor]:
            indices, values = results
            total = torch.sparse_coo_tensor(
                indices.t(), values, tensor.shape, device=tensor.device
            )
            with torch.no_grad():
                tensor.copy_(total.coalesce())
            return [tensor]

        return self._start("all_reduce", start, finish, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Options = None) -> GroupWork:
        tensor, root = only(tensors, "tensors"), opts.rootRank
        name = _name_of(opts)
        if name in _BITWISE:
            target = tensor if self._rank == root else tensor.data.clone()
            return self._reduce_bits(target, name, opts)
        op, factor = _read_op(name, opts, [tensor])

        def start() -> Works:
            data = flattened(as_real(tensor, op))
            splits = [data.numel() if r == root else 0 for r in range(self._size)]
            scatter = self._communicator.reduce_scatter
            return [scatter(data, op, prescale=factor, splits=splits)]

        def finish(results: list[Any]) -> list[Tensor]:
            if self._rank == root:
                copy_apart(results[0], [as_real(tensor, op)])
            return [tensor]

        return self._start("reduce", start, finish, opts)

    def reduce_scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        opts: Options = None,
    ) -> GroupWork:
        op, factor = _read_op(_name_of(opts), opts, outputs)

        def start(output: Tensor, sent: Sequence[Tensor]) -> Work[Any]:
            require_count(sent, self._size, "input_list")
            require_dtype(sent, output, "input_list")
            parts = [as_real(each, op) for each in sent]
            splits = [part.numel() for part in parts]
            scatter = self._communicator.reduce_scatter
            return scatter(joined(parts), op, prescale=factor, splits=splits)

        def store(result: Tensor, output: Tensor) -> None:
            copy_apart(result, [as_real(output, op)])

        return self._start_each("reduce_scatter", start, store, (outputs, inputs), opts)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: Options = None
    ) -> GroupWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None
    ) -> GroupWork:
        op, factor = _read_op(_name_of(opts), opts, outputs)

        def start(output: Tensor, tensor: Tensor) -> Work[Any]:
            require_dtype([output], tensor, "output")
            require_ratio(tensor, output, self._size, "input", "output")
            data, out = flattened(as_real(tensor, op)), memory_of(as_real(output, op))
            scatter = self._communicator.reduce_scatter
            return scatter(data, op, prescale=factor, out=out)

        def store(result: Tensor, output: Tensor) -> None:
            copy_if_needed(result, as_real(output, op))

        return self._start_each("reduce_scatter", start, store, (outputs, inputs), opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _read_op(
    name: str, opts: Options, tensors: Sequence[Tensor]
) -> tuple[ReduceOp, float]:
    """Return the ``ReduceOp`` for torch's operation, and a factor for the inputs."""
    if name == "SUM" and any(tensor.dtype is torch.bool for tensor in tensors):
        name = "MAX"  # logical or, as in torch's own groups
    if name not in _OPS:
        raise UsageError(f"op must be one of {', '.join(_OPS)}, got {name}.")
    factor = float(opts.reduceOp.factor) if name == "PREMUL_SUM" else 1.0
    return _OPS[name], factor


def _name_of(opts: Options) -> str:
    if opts is None:
        return "SUM"
    op = opts.reduceOp
    return _NAMES[getattr(op, "op", op)]
