"""Synthetic batches: random pixels or tokens, random labels."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ronde.bench.training.catalogue import ModelFacts, Unit
from ronde.bench.training.options import InputKind, TrainOptions

NUM_PREPARED = 2
"""More would only take memory: nothing is learned from them."""

Batch = tuple[Tensor, Tensor]
"""Inputs and labels, on the host."""


def batches(options: TrainOptions, device: torch.device, seed: int) -> Iterator[Batch]:
    """Yield batches without end.

    Args:
        options: Says their size, and how they are made.
        device: Where they will go; for an accelerator prepared ones are pinned.
        seed: Of the samples.
    """
    generator = torch.Generator().manual_seed(seed)
    num_samples = NUM_PREPARED * options.batch
    inputs, labels = make_samples(options.model, num_samples, generator)
    if options.is_channels_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    if options.input is InputKind.GATHERED:
        return _gathered(inputs, labels, options.batch, generator)
    size = options.batch
    starts = range(0, num_samples, size)
    prepared = [(inputs[s : s + size], labels[s : s + size]) for s in starts]
    if device.type == "cuda":
        prepared = [(x.pin_memory(), y.pin_memory()) for x, y in prepared]
    return _in_turn(prepared)


def make_samples(
    model: ModelFacts, num_samples: int, generator: torch.Generator | None = None
) -> Batch:
    """Make samples on the host, or on the device that is current as a context.

    Returns:
        float32 images of shape (n, *sample_shape) and int64 labels of shape (n,); or
        int64 tokens and labels, both of shape (n, context).
    """
    shape = (num_samples, *model.sample_shape)
    if model.unit is Unit.IMAGES:
        labels = torch.randint(model.num_classes, (num_samples,), generator=generator)
        return torch.randn(shape, generator=generator), labels
    tokens = torch.randint(model.num_classes, shape, generator=generator)
    return tokens, torch.randint(model.num_classes, shape, generator=generator)


def _in_turn(prepared: list[Batch]) -> Iterator[Batch]:
    while True:
        yield from prepared


def _gathered(
    inputs: Tensor, labels: Tensor, batch: int, generator: torch.Generator
) -> Iterator[Batch]:
    while True:
        chosen = torch.randint(len(inputs), (batch,), generator=generator)
        yield inputs[chosen], labels[chosen]
