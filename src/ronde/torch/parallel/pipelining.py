"""A model of consecutive layers as the stages of torch's pipeline schedules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from ronde.errors import UsageError
from ronde.parallel.pipelines import Pipeline, ScheduleName, cut_evenly
from ronde.torch.parallel.sharding import parallelize


@dataclass(frozen=True, slots=True)
class StagedModel:
    """The stages of this rank, and the schedule that trains them with the others'."""

    stages: nn.Module
    """This rank's layers, named as in the model: for the optimizer and ``save``."""
    plan: Pipeline
    """``plan.predict().idle_share`` is the part of a step in which ranks wait."""
    layers: tuple[range, ...]
    """The layers of each stage, also of the other ranks'."""
    is_first: bool
    is_last: bool
    _schedule: Any

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Compute the gradients of a batch; collective along pp.

        Gradients add up, are the mean's over microbatches, and must be zero before.

        Args:
            inputs: Of the whole batch; the first stage's rank reads it.
            targets: Of the whole batch; the last stage's rank reads it.

        Returns:
            The mean loss on the last stage's rank, None elsewhere.
        """
        given = (inputs,) if self.is_first else ()
        if not self.is_last:
            self._schedule.step(*given)
            return None
        losses: list[Tensor] = []
        self._schedule.step(*given, target=targets, losses=losses)
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

    Args:
        model: Layers that take each other's output, on the mesh's device. Every rank
            has the same weights.
        mesh: With pp of more than one rank.
        loss_fn: ``loss_fn(outputs, targets)``, a mean over a microbatch.
        num_microbatches: Parts of a batch, equal ones.
        schedule: "GPipe", "1F1B" or "Interleaved1F1B".
        num_chunks: Stages of each rank, with "Interleaved1F1B".
        costs: The time of each layer, in any unit; None takes its number of parameters.
        **options: As for ``parallelize``, which shards with ``zero=2`` here, so that
            weights are gathered once for all microbatches.

    Raises:
        UsageError: There are fewer layers than stages, or the schedule cannot be.
    """
    axes = mesh.mesh_dim_names or ()
    num_ranks = mesh["pp"].size() if "pp" in axes else 1
    if num_ranks < 2:
        raise UsageError(
            "mesh must have pp of at least 2, got none. Use parallelize()."
        )
    if schedule not in tuple(ScheduleName):
        names = ", ".join(ScheduleName)
        raise UsageError(f"schedule must be one of {names}, got {schedule!r}.")
    plan = Pipeline(ScheduleName(schedule), num_ranks, num_microbatches, num_chunks)
    layers = list(cast("Sequence[nn.Module]", model))
    if costs is None:
        costs = [float(sum(p.numel() for p in layer.parameters())) for layer in layers]
    elif len(costs) != len(layers):
        raise UsageError(
            f"costs must be one for each layer: {len(layers)}, got {len(costs)}."
        )
    cuts = cut_evenly(costs, num_ranks * num_chunks)
    rank = mesh.get_local_rank("pp")
    inner = mesh[tuple(axis for axis in axes if axis != "pp")]
    sharding: dict[str, Any] = {"zero": 2, **options}
    own = nn.Module()
    below = cast("Any", model).named_modules(remove_duplicate=False)
    layer_names: list[str] = [name for name, _ in below if name and "." not in name]
    wrapped: list[PipelineStage] = []
    for chunk in range(num_chunks):
        index = rank + chunk * num_ranks
        stage = nn.Sequential()
        for layer in cuts[index]:
            for module in (own, stage):
                module.add_module(layer_names[layer], layers[layer])
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
    )
