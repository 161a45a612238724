"""Gradients and learning rates for a changing number of ranks."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

from torch import Tensor, zeros_like
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ronde.torch.elastic.data import Share
from ronde.torch.optimizer import DistributedOptimizer


class GradientWeights:
    """Scales gradients so that averaging over ranks gives the average over samples.

    A loss is a mean over a micro-batch, and ``DistributedOptimizer`` averages over
    ranks. So each gradient is multiplied by ``micro_batch * size / batch``, and
    reduced after this rank's last micro-batch. Ranks may differ in their number of
    micro-batches. No hooks are set while the factor is 1.

    Args:
        parameters: The parameters of the model.
        optimizers: The optimizers that step after the last micro-batch of a step.
    """

    def __init__(
        self, parameters: Iterable[Tensor], *optimizers: Optimizer | object
    ) -> None:
        self._parameters = [
            p for p in parameters if p.is_floating_point() or p.is_complex()
        ]
        # With the program's own number of passes per micro-batch.
        self._optimizers = [
            (each, each.backward_passes_per_step)
            for each in optimizers
            if isinstance(each, DistributedOptimizer)
        ]
        self._weight = 1.0
        self._hooks: list[RemovableHandle] = []

    def begin(self, share: Share) -> None:
        """Prepare a step, before its first ``backward()``."""
        for optimizer, passes in self._optimizers:
            wanted = passes * max(1, len(share.weights))
            if optimizer.backward_passes_per_step != wanted:
                optimizer.set_backward_passes_per_step(wanted)
        self._set(share.weights[0] if share.weights else 1.0)

    def micro_batches(self, share: Share) -> Iterator[Any]:
        """Yield the inputs of each micro-batch, and set the factor for it."""
        for weight, inputs in zip(share.weights, share.micro_batches, strict=True):
            self._set(weight)
            yield inputs

    def close(self) -> None:
        """Remove the hooks, and restore the optimizers' passes per step."""
        self._set(1.0)
        for optimizer, passes in self._optimizers:
            optimizer.set_backward_passes_per_step(passes)

    def _set(self, weight: float) -> None:
        self._weight = weight
        if weight == 1.0:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
        elif not self._hooks:
            self._hooks = [self._add_hook(p) for p in self._parameters]

    def _add_hook(self, parameter: Tensor) -> RemovableHandle:
        # Frozen parameters too, as they may be trained later. torch adds hooks only
        # while a parameter requires a gradient, but keeps them.
        was_trained = parameter.requires_grad
        parameter.requires_grad_()
        hook = cast("Any", parameter).register_hook(self._weigh)
        parameter.requires_grad_(was_trained)
        return cast("RemovableHandle", hook)

    def _weigh(self, gradient: Tensor) -> Tensor:
        # A filler sample may have an infinite loss.
        return gradient * self._weight if self._weight else zeros_like(gradient)


class Ramp(NamedTuple):
    """A factor that changes linearly with the step."""

    begin: float = 1.0
    end: float = 1.0
    first_step: int = 0
    num_steps: int = 0

    def at(self, step: int) -> float:
        """Return the factor of a step, counted from 0."""
        done = step + 1 - self.first_step
        if done >= self.num_steps:
            return self.end
        return self.begin + (self.end - self.begin) * max(0, done) / self.num_steps


class LearningRateScale:
    """Scales learning rates with the number of ranks, for the policy "per-rank".

    By the linear scaling rule, the factor is ``size / base_size``, as the rates were
    chosen for ``base_size`` ranks. It starts at 1; after a change of size it reaches
    its new value in ``ramp_steps`` equal steps. The rates of ``param_groups`` are
    scaled only during ``optimizer.step()``: schedulers and ``state_dict()`` see the
    unscaled ones.

    Source: https://arxiv.org/abs/1706.02677, sections 2.1 and 2.2.
    """

    def __init__(
        self, optimizer: Optimizer, base_size: int, ramp_steps: int = 0
    ) -> None:
        self.factor = 1.0
        self._optimizer = optimizer
        self._base_size = base_size
        self._ramp_steps = ramp_steps
        self._step = -1  # the newest step passed to ``begin``
        self._before = self._ramp = Ramp()  # of the previous step, of this one
        self._rates: list[float | Tensor] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def begin(self, step: int, size: int) -> None:
        """Compute the factor of a step, counted from 0, with ``size`` ranks.

        The factor depends only on applied steps, so a repeated step has the same one.
        """
        self._after_step()  # restores the rates after a failed step
        if step > self._step:
            self._step, self._before = step, self._ramp
        end, self._ramp = size / self._base_size, self._before
        if end != self._before.end:
            now = self._before.at(step - 1)
            self._ramp = Ramp(now, end, step, self._ramp_steps)
        self.factor = self._ramp.at(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the factor, for a checkpoint."""
        ramps = {"before": tuple(self._before), "ramp": tuple(self._ramp)}
        return {"step": self._step, **ramps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the factor's state from a checkpoint."""
        self._step = state_dict["step"]
        self._before = Ramp(*state_dict["before"])
        self._ramp = Ramp(*state_dict["ramp"])

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, *_: object) -> None:
        self._after_step()  # restores the rates after a failed step
        for group in self._optimizer.param_groups if self.factor != 1.0 else ():
            rate = group["lr"]
            if isinstance(rate, Tensor):  # in place: compiled steps read this tensor
                self._rates.append(rate.clone())
                rate.mul_(self.factor)
            else:
                self._rates.append(rate)
                group["lr"] = rate * self.factor

    def _after_step(self, *_: object) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=False):
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._rates = []
