"""Batch normalization over the batches of all ranks."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from ronde.collectives.arithmetic import HALVES
from ronde.collectives.torch_modes import outside_compiler
from ronde.errors import UsageError
from ronde.session.session import ProcessSet, global_process_set, size
from ronde.torch.mpi_ops import Sum, allreduce, allreduce_


class SyncBatchNorm(_BatchNorm):
    """Batch normalization with statistics computed over the batches of all ranks.

    Inputs have the shape (N, C, ...); N may differ from rank to rank, down to 0. In
    training, all ranks of ``process_set`` must run the layer the same number of times.
    A rank that has called ``join()`` counts as a rank without data.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Normalize ``input`` of shape (N, C, ...); collective in training."""
        self._check_input_dim(input)
        is_by_batch = self.training or not self.track_running_stats
        if not is_by_batch or size() == 1 or self.process_set.size() == 1:
            return super().forward(input)
        return self._normalize(input)

    @outside_compiler
    def _normalize(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        return cast("Tensor", _Normalize.apply(input, self.weight, self.bias, self))

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  torch's name
        if input.dim() < 2:
            raise UsageError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise UsageError(
                f"input must have {self.num_features} channels in dimension 1, got "
                f"{input.shape[1]}."
            )

    def track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Update the running statistics with those of all ranks, each of shape (C,)."""
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked or 1)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  autograd's
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: SyncBatchNorm,
    ) -> Tensor:
        mean, variance, count = _moments(inputs, layer.process_set)
        layer.track(mean, variance, count)
        dtype = torch.float32 if inputs.dtype in HALVES else inputs.dtype
        mean, variance = mean.to(dtype), variance.to(dtype)
        inverse_std = (variance + layer.eps).rsqrt()
        ctx.save_for_backward(inputs, weight, mean, inverse_std, count)
        ctx.process_set = layer.process_set
        return functional.batch_norm(
            inputs, mean, variance, weight, bias, training=False, eps=layer.eps
        )

    @staticmethod
    @once_differentiable
    @outside_compiler
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of input, weight and bias.

        With y = (x - mean) * s * w + b, s the inverse standard deviation, n the
        elements of a channel on all ranks: dx = w s (dy - (sum dy + (x - mean) s^2 sum
        dy (x - mean)) / n), both sums over all ranks. The optimizer reduces the
        gradients of weight and bias over ranks.
        """
        inputs, weight, mean, inverse_std, count = ctx.saved_tensors
        dims = [0, *range(2, inputs.dim())]
        shape = (1, -1) + (1,) * (inputs.dim() - 2)
        gradient = gradients[0].to(mean.dtype)
        centred = inputs.to(mean.dtype) - mean.view(shape)
        sums = torch.stack([gradient.sum(dims), (gradient * centred).sum(dims)])
        grad_weight = grad_bias = None
        if weight is not None:
            grad_weight = (sums[1] * inverse_std).to(weight.dtype)
            grad_bias = sums[0].to(weight.dtype)
        sums = allreduce(
            sums, name="sync_batch_norm.sums", op=Sum, process_set=ctx.process_set
        )
        sums /= count.clamp(min=1).to(sums.dtype)
        scale = inverse_std if weight is None else inverse_std * weight.to(mean.dtype)
        tilt = sums[1] * inverse_std.square()
        gradient = gradient - sums[0].view(shape) - centred * tilt.view(shape)
        gradient *= scale.view(shape)
        return gradient.to(inputs.dtype), grad_weight, grad_bias, None


def _moments(inputs: Tensor, process_set: ProcessSet) -> tuple[Tensor, Tensor, Tensor]:
    """Return each channel's mean and variance over all ranks, and its element count.

    The ranks sum their counts, sums and sums of squares in float64. The sums are
    derived from each rank's mean and variance, so that a large mean does not cost
    precision.
    """
    count = inputs.numel() // inputs.shape[1]
    channels = inputs.shape[1]
    sums = inputs.new_zeros(2 * channels + 1, dtype=torch.float64)
    if count:
        dims = [0, *range(2, inputs.dim())]
        wide = inputs.float() if inputs.dtype in HALVES else inputs
        variance, mean = torch.var_mean(wide, dims, correction=0)
        variance, mean = variance.double(), mean.double()
        sums[0] = count
        sums[1 : 1 + channels] = count * mean
        sums[1 + channels :] = count * (variance + mean.square())
    allreduce_(sums, name="sync_batch_norm.moments", op=Sum, process_set=process_set)
    total = sums[0]
    mean, squares = (sums[1:] / total.clamp(min=1)).view(2, channels)
    return mean, (squares - mean.square()).clamp(min=0), total
