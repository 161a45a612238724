"""The gradients of collectives.

The gradient of one is made of others, so that gradients of gradients are there as well.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ronde.collectives.torch_modes import outside_compiler
from ronde.session.operations import (
    Allgather,
    Allreduce,
    Alltoall,
    Average,
    Broadcast,
    NamedCollective,
    Reducescatter,
    Sum,
    Tensors,
)
from ronde.session.session import state_of


def run(collective: NamedCollective, tensors: Tensors) -> tuple[Tensor, ...]:
    """Run a collective, under autograd where a tensor needs that."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return cast("Any", _Differentiable.apply(collective, *tensors))
    return collective.run(tensors)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collective: NamedCollective, *tensors: Tensor) -> Any:  # noqa: ANN401  autograd's
        results = collective.run(tensors)
        ctx.collective = collective
        if isinstance(collective, Alltoall):
            # The way back takes what came from each rank.
            ctx.collective = replace(collective, splits=results[1])
        ctx.num_rows = [t.shape[0] if t.dim() else 1 for t in tensors]
        return results

    @staticmethod
    @outside_compiler
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ANN401  autograd's
        return None, *_differentiate(ctx.collective, gradients, ctx.num_rows)


def _differentiate(
    collective: NamedCollective, gradients: Tensors, num_rows: list[int]
) -> Tensors:
    """Turn gradients of the results into those of inputs of so many rows each."""
    process_set, is_group = collective.process_set, collective.is_group
    name = collective.name and f"{collective.name}.gradient"
    state = state_of(process_set, collective.kind)
    match collective:
        case Allgather():  # this rank's rows of the averaged gradients
            averaged = run(Allreduce(process_set, name, is_group, Average), gradients)
            own_rows = torch.tensor([num_rows], device="cpu")
            (rows,) = Allgather(process_set, name).run((own_rows,))
            starts = cast("list[int]", rows[: state.rank].sum(0).tolist())
            return [
                each.narrow(0, start, length)
                for each, start, length in zip(averaged, starts, num_rows, strict=True)
            ]
        case Broadcast():  # the average at the root, zero elsewhere
            averaged = run(Allreduce(process_set, name, op=Average), gradients)
            is_root = state.ranks[state.rank] == collective.root_rank
            return averaged if is_root else [torch.zeros_like(t) for t in averaged]
        case Reducescatter():  # gathered
            factor = collective.prescale * collective.postscale
            factor *= len(state.ranks) if collective.op == Sum else 1
            gathered = Allgather(process_set, name, is_group)
            return run(gathered, [gradient * factor for gradient in gradients])
        case Alltoall():  # each row goes back to where it came from
            gradient = run(replace(collective, name=name), gradients[:1])[0]
            num_dropped = num_rows[0] - gradient.shape[0]
            if num_dropped:  # past the splits' sum: they went nowhere
                rest = gradient.new_zeros(num_dropped, *gradient.shape[1:])
                gradient = torch.cat([gradient, rest])
            return (gradient,)
        case _:  # the same reduction
            return run(replace(collective, name=name), gradients)
