"""Whether a sharded model trains as one process does; if not, what differs first."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.tensor import DTensor

from ronde.errors import UsageError
from ronde.parallel.layout import Layout
from ronde.torch.parallel.sharding import init_mesh, parallelize
from ronde.torch.parallel.trials import turn_dropout_off

Batch = Sequence[Tensor]


class Mismatch(NamedTuple):
    """A value that is not what one process has."""

    step: int
    what: str  # loss, gradient or weight
    name: str  # of the parameter
    placements: str  # how it is sharded
    error: float  # relative to the largest value of one process

    def __str__(self) -> str:
        where = f" of {self.name} ({self.placements})" if self.name else ""
        return f"step {self.step}: {self.what}{where} is off by {self.error:.2g}"


@dataclass(frozen=True, slots=True)
class Parity:
    """How near ranks came to one process: errors relative to the largest value."""

    layout: Layout
    num_steps: int
    loss_error: float
    gradient_error: float
    weight_error: float
    tolerance: float
    first: Mismatch | None  # the first error that is above the tolerance

    @property
    def is_equal(self) -> bool:
        """Whether no error is above the tolerance."""
        return self.first is None

    def __str__(self) -> str:
        errors = (
            f"{self.layout}: after {self.num_steps} steps loss, gradients and weights "
            f"are off by {self.loss_error:.2g}, {self.gradient_error:.2g} and "
            f"{self.weight_error:.2g} of their largest value"
        )
        if self.first is None:
            return f"{errors}; {self.tolerance:.2g} is allowed"
        return f"{errors}. The first above {self.tolerance:.2g}: {self.first}"


def check_parity(
    build: Callable[[], nn.Module],
    layout: Layout,
    batches: Sequence[Batch],
    loss_of: Callable[..., Tensor],
    *,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,  # noqa: ANN401  parallelize's
) -> Parity:
    """Train a model sharded, and whole on each rank, on the same data; collective.

    Every rank needs memory for the whole model. Dropout is turned off.

    Args:
        build: Makes the model; its random numbers are those of one seed.
        layout: Without pp and cp.
        batches: What all ranks train on together, a step each: tensors whose rows are
            dealt out over dp. Rank 0's are taken.
        loss_of: ``loss_of(model, *batch)``, a mean over the batch's rows.
        make_optimizer: Of parameters; None takes plain SGD. What divides by small
            gradients, as Adam does, makes noise large.
        dtype: What both compute in; half of its digits must be equal.
        **options: As for ``parallelize``.

    Raises:
        UsageError: A batch's rows cannot be dealt out evenly, or as ``parallelize``.
    """
    mesh = init_mesh(layout)
    layout = layout.resolve(dist.get_world_size())
    make = make_optimizer or _sgd
    alone = _Side(_build(build, dtype, mesh.device_type), make)
    sharded = parallelize(_build(build, dtype, mesh.device_type), mesh, **options)
    ranks = _Side(sharded, make)
    errors = _Errors(math.sqrt(torch.finfo(dtype).eps))
    for step, batch in enumerate(batches):
        whole = [_cast(each, dtype, mesh.device_type) for each in batch]
        for tensor in whole:
            dist.broadcast(tensor, 0)
        loss = ranks.backward(loss_of, _own_rows(whole, layout))
        dist.all_reduce(loss)
        loss /= layout.num_ranks
        expected = alone.backward(loss_of, whole)
        errors.add(step, "loss", "", loss, expected)
        for name, parameter in ranks.parameters.items():
            reference = alone.parameters[name]
            errors.add(step, "gradient", name, parameter.grad, reference.grad)
        ranks.optimizer.step()
        alone.optimizer.step()
        for name, parameter in ranks.parameters.items():
            errors.add(step, "weight", name, parameter, alone.parameters[name])
    return Parity(
        layout=layout,
        num_steps=len(batches),
        loss_error=errors.worst["loss"],
        gradient_error=errors.worst["gradient"],
        weight_error=errors.worst["weight"],
        tolerance=errors.tolerance,
        first=errors.first,
    )


def _sgd(parameters: Any) -> torch.optim.Optimizer:  # noqa: ANN401  Optimizer's
    return torch.optim.SGD(parameters, lr=0.1)


class _Side:
    """A model that is trained."""

    def __init__(
        self, model: nn.Module, make: Callable[[Any], torch.optim.Optimizer]
    ) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.optimizer = make(model.parameters())

    def backward(self, loss_of: Callable[..., Tensor], batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, *batch)
        loss.backward()
        return loss.detach().clone()


class _Errors:
    """The worst error of each kind, and the first that is too large."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.worst = {"loss": 0.0, "gradient": 0.0, "weight": 0.0}
        self.first: Mismatch | None = None

    def add(
        self,
        step: int,
        what: str,
        name: str,
        value: Tensor | None,
        expected: Tensor | None,
    ) -> None:
        if value is None and expected is None:
            return
        placements = str(value.placements) if isinstance(value, DTensor) else "whole"
        error = _error(_whole(value), _whole(expected))
        self.worst[what] = max(self.worst[what], error)
        if self.first is None and not error <= self.tolerance:
            self.first = Mismatch(step, what, name, placements, error)


@torch.no_grad()
def _error(value: Tensor | None, expected: Tensor | None) -> float:
    if value is None or expected is None or value.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    error = float((value - expected).abs().max())
    scale = float(expected.abs().max())
    if math.isnan(error):
        return math.inf
    return error / scale if scale else error


def _whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _build(
    build: Callable[[], nn.Module], dtype: torch.dtype, device: str
) -> nn.Module:
    torch.manual_seed(0)
    model = build().to(device, dtype)
    turn_dropout_off(model)
    return model


def _cast(tensor: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    wanted = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(device, wanted, copy=True).contiguous()


def _own_rows(batch: Batch, layout: Layout) -> list[Tensor]:
    num_parts = layout.dp_replicate * layout.dp_shard
    place = layout.coordinates(dist.get_rank())
    part = place["dp_replicate"] * layout.dp_shard + place["dp_shard"]
    rows: list[Tensor] = []
    for tensor in batch:
        if tensor.shape[0] % num_parts:
            raise UsageError(
                "rows of a batch must be a multiple of dp_replicate * dp_shard: "
                f"{num_parts}, got {tensor.shape[0]}."
            )
        rows.append(tensor.chunk(num_parts)[part])
    return rows
