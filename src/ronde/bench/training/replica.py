"""One copy of a model, and its training step."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

import ronde.torch as hvd
from ronde.bench.training.batches import batches
from ronde.bench.training.clocks import Clock
from ronde.bench.training.models import build
from ronde.bench.training.options import (
    Dtype,
    OptimizerKind,
    TrainOptions,
    WireFormat,
)
from ronde.bench.training.phases import Phase

AUXILIARY_WEIGHT = 0.3
"""Of each auxiliary classifier in the loss. Source: Szegedy et al. 2015, section 5."""
_COMPRESSORS = {
    WireFormat.NONE: hvd.Compression.none,
    WireFormat.FP16: hvd.Compression.fp16,
    WireFormat.BF16: hvd.Compression.bf16,
}


class Replica:
    """A model, its optimizer and its data on one rank.

    Collective to create and to step where it communicates.

    Args:
        options: What to train and how.
        device: Where.
        is_communicating: Whether gradients are averaged over all ranks.
    """

    def __init__(
        self, options: TrainOptions, device: torch.device, *, is_communicating: bool
    ) -> None:
        self._device = device
        self._is_mixed = options.dtype is Dtype.BFLOAT16
        self._batches = batches(options, device, seed=hvd.rank())
        torch.manual_seed(0)
        self.model = build(options.model.name).to(device)
        if options.is_channels_last:
            cast("Any", self.model).to(memory_format=torch.channels_last)
        self._optimizer = _make_optimizer(options, self.model)
        if is_communicating:
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
            self._optimizer = hvd.DistributedOptimizer(
                self._optimizer,
                named_parameters=self.model.named_parameters(),
                compression=_COMPRESSORS[options.compression],
            )
        torch.manual_seed(hvd.rank())  # dropout: each rank drops its own
        self._call = cast("Callable[[Tensor], Tensor]", self.model)
        if options.is_compiled:
            self._call = cast("Callable[[Tensor], Tensor]", torch.compile(self.model))

    def step(self, clock: Clock) -> None:
        """Take one training step and tell ``clock`` where it is."""
        clock.start()
        inputs, labels = next(self._batches)
        clock.mark(Phase.INPUT)
        inputs = inputs.to(self._device, non_blocking=True)
        labels = labels.to(self._device, non_blocking=True)
        clock.mark(Phase.HOST_TO_DEVICE)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_mixed):
            loss = loss_of(self._call(inputs), labels)
        clock.mark(Phase.FORWARD)
        loss.backward()
        clock.mark(Phase.BACKWARD)
        self._optimizer.step()
        self._optimizer.zero_grad()
        clock.mark(Phase.UPDATE)

    @torch.no_grad()
    def digest(self) -> int:
        """Return a number that is equal where all weights are, bit for bit."""
        bits = [p.detach().flatten().view(torch.int32) for p in self.model.parameters()]
        sums = [each.sum(dtype=torch.int64) for each in bits]
        weights = torch.arange(1, len(sums) + 1, device=self._device)
        return int((torch.stack(sums) * weights).sum())


def loss_of(outputs: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Return the mean cross entropy, with that of auxiliary classifiers added.

    Args:
        outputs: Logits of shape (n, classes) or (n, tokens, words), or a tuple of them,
            the classifier's own first.
        labels: Classes of shape (n,) or (n, tokens).
    """
    if isinstance(outputs, Tensor):
        return cross_entropy(outputs.flatten(0, -2), labels.flatten())
    own, *auxiliary = (cross_entropy(each, labels) for each in outputs)
    return own + AUXILIARY_WEIGHT * sum(auxiliary, torch.zeros_like(own))


def _make_optimizer(options: TrainOptions, model: nn.Module) -> Optimizer:
    if options.optimizer is OptimizerKind.ADAM:
        return Adam(model.parameters(), lr=1e-4)
    return SGD(model.parameters(), lr=1e-3, momentum=0.9)
