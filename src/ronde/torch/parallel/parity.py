"""A comparison of sharded training with training in one process."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ronde.errors import UsageError
from ronde.parallel.layout import Layout
from ronde.torch.parallel.equal_weights import gather_objects
from ronde.torch.parallel.pipelining import pipeline
from ronde.torch.parallel.sharding import init_mesh, parallelize
from ronde.torch.parallel.trials import turn_dropout_off

Batch = Sequence[Tensor]
Loss = Callable[..., Tensor]
_LEAST_SCALE = 2.0**-4
_KINDS = ("loss", "gradient", "weight")


class Mismatch(NamedTuple):
    """A value that differs from single-process training."""

    step: int
    kind: str  # loss, gradient or weight
    name: str  # of the parameter
    placements: str
    error: float  # relative, as in ``Parity``

    def __str__(self) -> str:
        where = f" of {self.name} ({self.placements})" if self.name else ""
        return f"step {self.step}: {self.kind}{where} is off by {self.error:.2g}"


@dataclass(frozen=True, slots=True)
class Parity:
    """The differences between sharded training and one process.

    Errors are relative to the largest value of the gradient or weight, but at least to
    1/16 of the largest value of all gradients or weights, as very small gradients may
    consist of rounding errors.
    """

    layout: Layout
    num_steps: int
    loss_error: float
    gradient_error: float
    weight_error: float
    tolerance: float
    first: Mismatch | None  # the first error that is above the tolerance

    @property
    def is_equal(self) -> bool:
        """True if no error is above the tolerance."""
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
    loss_of: Loss,
    *,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,  # noqa: ANN401  parallelize's or pipeline's
) -> Parity:
    """Compare training of a sharded model with that of a whole one; collective.

    Every rank needs memory for the whole model. Dropout is turned off.

    Args:
        build: Makes the model; called with the same seed on all ranks.
        layout: A layout without cp.
        batches: The global batch of each step: tensors whose rows are divided over dp.
            Those of rank 0 are used. With pp the inputs and the targets, or one tensor
            for both.
        loss_of: ``loss_of(model, *batch)``, a mean over the batch's rows. With pp it
            uses the inputs for ``model(inputs)`` alone.
        make_optimizer: Makes the optimizer from parameters, by default plain SGD. Adam
            and others that divide by small gradients amplify rounding errors.
        dtype: The dtype of model and batches. The tolerance is the square root of its
            machine epsilon, or of that of a less precise dtype in which the model
            computes.
        **options: Options of ``parallelize``, or with pp of ``pipeline``, where
            ``num_microbatches`` is by default the number of stages.

    Raises:
        UsageError: A batch's rows cannot be divided evenly, or ``parallelize`` or
            ``pipeline`` raises it.
    """
    mesh = init_mesh(layout)
    layout = layout.resolve(dist.get_world_size())
    make = make_optimizer or _sgd
    alone = _Side(_build(build, dtype, mesh.device_type), make, loss_of)
    model = _build(build, dtype, mesh.device_type)
    if layout.pp > 1:
        num_stages = layout.pp * options.get("num_chunks", 1)
        options = {"num_microbatches": num_stages, **options}
        ranks = _StagedSide(model, make, loss_of, mesh, options)
    else:
        ranks = _Side(parallelize(model, mesh, **options), make, loss_of)
    errors = _Errors(dtype)
    for step, batch in enumerate(batches):
        whole = [_cast(each, dtype, mesh.device_type) for each in batch]
        for tensor in whole:
            dist.broadcast(tensor, 0)
        with errors.precision:
            expected = alone.forward(whole)
        expected.backward()
        loss = ranks.backward(_own_rows(whole, layout)).double()
        dist.all_reduce(loss)
        loss *= layout.pp / layout.num_ranks
        errors.add(step, "loss", {"": loss}, {"": expected.detach()})
        errors.add(step, "gradient", ranks.gradients(), alone.gradients())
        ranks.optimizer.step()
        alone.optimizer.step()
        errors.add(step, "weight", ranks.parameters, alone.parameters)
    return errors.of_all_ranks(layout, len(batches))


def _sgd(parameters: Any) -> torch.optim.Optimizer:  # noqa: ANN401  Optimizer's
    return torch.optim.SGD(parameters, lr=0.1)


class _Side:
    """One of the two compared models, with its optimizer."""

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[Any], torch.optim.Optimizer],
        loss_of: Loss,
    ) -> None:
        self._model, self._loss_of = model, loss_of
        named = cast("Any", model).named_parameters(remove_duplicate=False)
        self.parameters: dict[str, Tensor] = dict(named)
        self.optimizer = make(model.parameters())

    def forward(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        return self._loss_of(self._model, *batch)

    def backward(self, batch: Batch) -> Tensor:
        loss = self.forward(batch)
        loss.backward()
        return loss.detach().clone()

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: tensor.grad for name, tensor in self.parameters.items()}


class _StagedSide(_Side):
    """A pipelined model, of which only the last stage's ranks have a loss."""

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[Any], torch.optim.Optimizer],
        loss_of: Loss,
        mesh: DeviceMesh,
        options: dict[str, Any],
    ) -> None:
        def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
            # The schedule has called the model.
            return loss_of(lambda *_, **__: outputs, *[targets] * self._num_tensors)  # pyright: ignore[reportUnknownLambdaType]

        self._staged = pipeline(cast("Any", model), mesh, loss_fn, **options)
        self._num_tensors = 0
        super().__init__(self._staged.stages, make, loss_of)

    def backward(self, batch: Batch) -> Tensor:
        if len(batch) not in (1, 2):
            raise UsageError(
                "with pp a batch must consist of inputs and targets, got "
                f"{len(batch)} tensors."
            )
        self._num_tensors = len(batch)
        self.optimizer.zero_grad()
        loss = self._staged.step(batch[0], batch[-1])
        return torch.zeros((), device=batch[0].device) if loss is None else loss


class _Precision(TorchDispatchMode):
    """Dispatch mode that records the machine epsilon of the least exact result."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = torch.finfo(dtype).eps

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        results = func(*args, **(kwargs or {}))
        for each in pytree.tree_leaves(results):
            if isinstance(each, Tensor) and (
                each.is_floating_point() or each.is_complex()
            ):
                self.eps = max(self.eps, torch.finfo(each.dtype).eps)
        return results


class _Errors:
    """The largest error of each kind, and the first above the tolerance."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.precision = _Precision(dtype)
        self._worst: dict[str, float] = dict.fromkeys(_KINDS, 0.0)
        self._first: Mismatch | None = None

    @property
    def _tolerance(self) -> float:
        return math.sqrt(self.precision.eps)

    def add(
        self,
        step: int,
        kind: str,
        values: Mapping[str, Tensor | None],
        expected: Mapping[str, Tensor | None],
    ) -> None:
        sizes = {name: _size(tensor) for name, tensor in expected.items()}
        least = _LEAST_SCALE * max(sizes.values(), default=0.0)
        for name, value in values.items():
            error = _error(_whole(value), expected[name], max(sizes[name], least))
            self._worst[kind] = max(self._worst[kind], error)
            if self._first is None and not error <= self._tolerance:
                form = str(value.placements) if isinstance(value, DTensor) else "whole"
                self._first = Mismatch(step, kind, name, form, error)

    def of_all_ranks(self, layout: Layout, num_steps: int) -> Parity:
        """Combine the errors of all ranks; collective."""
        own = (self._worst, self._first, self._tolerance)
        worst, firsts, tolerances = zip(*gather_objects(own), strict=True)
        loss, gradient, weight = (max(each[kind] for each in worst) for kind in _KINDS)
        found: list[Mismatch] = [each for each in firsts if each is not None]
        found.sort(key=lambda each: (each.step, _KINDS.index(each.kind)))
        first = found[0] if found else None
        tolerance = max(tolerances)
        return Parity(layout, num_steps, loss, gradient, weight, tolerance, first)


@torch.no_grad()
def _size(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.abs().max())


@torch.no_grad()
def _error(value: Tensor | None, expected: Tensor | None, scale: float) -> float:
    """Return the relative error; None, as for an unused layer, counts as zeros."""
    if value is None or expected is None:
        error = max(_size(value), _size(expected))
    elif value.shape != expected.shape:
        return math.inf
    else:
        error = _size(value - expected)
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
    own = layout.coordinates(dist.get_rank())
    part = own["dp_replicate"] * layout.dp_shard + own["dp_shard"]
    rows: list[Tensor] = []
    for tensor in batch:
        if tensor.shape[0] % num_parts:
            raise UsageError(
                "the rows of a batch must be a multiple of dp_replicate * dp_shard = "
                f"{num_parts}, got {tensor.shape[0]}."
            )
        rows.append(tensor.chunk(num_parts)[part])
    return rows
