"""A model of consecutive layers as the stages of torch's pipeline schedules."""

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from ronde.errors import UsageError
from ronde.parallel.pipelines import Pipeline, ScheduleName, cut_evenly
from ronde.torch.parallel.sharding import parallelize
from ronde.torch.parallel.tied_weights import TiedWeights, find_ties

_LISTS: tuple[Any, ...] = (nn.Sequential, nn.ModuleList)
_BATCH_NORM = nn.modules.batchnorm._BatchNorm  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True)
class StagedModel:
    """A pipelined model: this rank's stages, and the schedule of all ranks."""

    stages: nn.Module
    """This rank's layers, named as in the model: for the optimizer and ``save``."""
    plan: Pipeline
    """The schedule and its sizes, with the share of idle time in ``idle_share``."""
    layers: tuple[range, ...]
    """The layers of each stage, on all ranks."""
    is_first: bool
    is_last: bool
    _schedule: Any
    _ties: TiedWeights

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Compute the gradients of a batch; collective along pp.

        The gradients are those of the mean loss over microbatches. They are added to
        existing gradients.

        Args:
            inputs: The whole batch's inputs; only the first stage's rank uses them.
            targets: The whole batch's targets; only the last stage's rank uses them.

        Returns:
            The mean loss on the last stage's rank, None elsewhere.

        Raises:
            UsageError: The batch cannot be divided evenly into microbatches.
        """
        read = [*([inputs] * self.is_first), *([targets] * self.is_last)]
        for tensor in read:
            if len(tensor) % self.plan.num_microbatches:
                raise UsageError(
                    "the rows of a batch must be a multiple of num_microbatches = "
                    f"{self.plan.num_microbatches}, got {len(tensor)}."
                )
        self._ties.make_equal()
        # torch's schedule would divide older gradients by the number of microbatches.
        parameters = list(cast("Any", self.stages).parameters())
        kept = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, _ in kept:
            parameter.grad = None
        given = (inputs,) if self.is_first else ()
        losses: list[Tensor] = []
        if self.is_last:
            self._schedule.step(*given, target=targets, losses=losses)
        else:
            self._schedule.step(*given)
        self._ties.add_gradients()
        with torch.no_grad():
            for parameter, grad in kept:
                own = parameter.grad
                parameter.grad = grad if own is None else grad.add_(own)
        if not self.is_last:
            return None
        return torch.stack([loss.detach() for loss in losses]).mean()


def pipeline(
    model: nn.Sequential,
    mesh: DeviceMesh,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    num_microbatches: int,
    *,
    schedule: str = ScheduleName.ONE_F_ONE_B,
    num_chunks: int = 1,
    costs: Sequence[float] | None = None,
    **options: Any,  # noqa: ANN401  parallelize's
) -> StagedModel:
    """Cut a model into stages along pp, and shard each over dp and tp. Collective.

    A weight shared by several stages, such as an embedding tied to the output head,
    becomes a parameter of each. ``step`` sums the gradients, so copies stay equal.

    Args:
        model: Consecutive layers, on the mesh's device.
        mesh: A mesh with more than one rank along pp.
        loss_fn: ``loss_fn(outputs, targets)``, a mean over a microbatch.
        num_microbatches: The number of equal parts of a batch.
        schedule: "GPipe", "1F1B" or "Interleaved1F1B".
        num_chunks: The number of stages per rank, with "Interleaved1F1B".
        costs: The time of each layer in any unit, by default its number of parameters.
        **options: Options of ``parallelize``; ``zero`` is 2 by default here, so that
            weights are gathered once for all microbatches.

    Raises:
        UsageError: There are fewer layers than stages, the schedule is invalid, or the
            stages shard a tied weight in different ways.
    """
    axes = mesh.mesh_dim_names or ()
    num_ranks = mesh["pp"].size() if "pp" in axes else 1
    _require_pipeline(model, num_ranks, schedule)
    plan = Pipeline(ScheduleName(schedule), num_ranks, num_microbatches, num_chunks)
    layers = list(cast("Sequence[nn.Module]", model))
    if costs is None:
        costs = [float(sum(p.numel() for p in layer.parameters())) for layer in layers]
    elif len(costs) != len(layers):
        raise UsageError(
            f"costs must have one value per layer, {len(layers)}, got {len(costs)}."
        )
    cuts = cut_evenly(costs, num_ranks * num_chunks)
    rank = mesh.get_local_rank("pp")
    inner = mesh[tuple(axis for axis in axes if axis != "pp")]
    sharding: dict[str, Any] = {"zero": 2, **options}
    own = nn.Module()
    below = cast("Any", model).named_modules(remove_duplicate=False)
    layer_names: list[str] = [name for name, _ in below if name and "." not in name]
    _warn_of_batch_norm(model, num_microbatches)
    ties = find_ties(model, [[layer_names[layer] for layer in cut] for cut in cuts])
    wrapped: list[PipelineStage] = []
    for chunk in range(num_chunks):
        index = rank + chunk * num_ranks
        stage = nn.Sequential()
        for layer in cuts[index]:
            stage.add_module(layer_names[layer], layers[layer])
        if chunk and ties:
            # It may share weights with other stages of this rank.
            stage = deepcopy(stage)
        for name in map(layer_names.__getitem__, cuts[index]):
            own.add_module(name, stage.get_submodule(name))
        parallelize(stage, inner, **sharding)
        device = torch.device(mesh.device_type)
        wrapped.append(
            PipelineStage(stage, index, len(cuts), device, group=mesh.get_group("pp"))
        )
    several = schedule == ScheduleName.INTERLEAVED
    make = cast("Any", get_schedule_class(schedule))
    return StagedModel(
        stages=own,
        plan=plan,
        layers=cuts,
        is_first=rank == 0,
        is_last=rank == num_ranks - 1,
        _schedule=make(
            wrapped if several else wrapped[0], num_microbatches, loss_fn=loss_fn
        ),
        _ties=TiedWeights(own, ties, mesh.get_group("pp")),
    )


def _require_pipeline(model: nn.Module, num_ranks: int, schedule: str) -> None:
    if cast("Any", type(model)).forward not in [each.forward for each in _LISTS]:
        raise UsageError(
            "model must be a plain Sequential of consecutive layers, got "
            f"{type(model).__name__}. Give pipeline() a Sequential of its layers."
        )
    if num_ranks < 2:
        raise UsageError(
            "pipeline() needs a mesh with at least 2 ranks along pp. Use parallelize() "
            "without pp."
        )
    if schedule not in tuple(ScheduleName):
        names = ", ".join(ScheduleName)
        raise UsageError(f"schedule must be one of {names}, got {schedule!r}.")


def _warn_of_batch_norm(model: nn.Module, num_microbatches: int) -> None:
    """Warn on rank 0 that BatchNorm gives different results in a pipeline."""
    below: list[tuple[str, nn.Module]] = list(cast("Any", model).named_modules())
    names = [name for name, module in below if isinstance(module, _BATCH_NORM)]
    if names and num_microbatches > 1 and dist.get_rank() == 0:
        warnings.warn(
            f"BatchNorm computes its statistics per microbatch in a pipeline, not per "
            f"batch as in one process, so results differ (first layer: {names[0]}). "
            "Use GroupNorm or LayerNorm, whose results do not depend on the batch.",
            stacklevel=3,
        )
