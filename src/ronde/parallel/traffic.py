"""Bytes that a rank sends in a step, by axis of its layout."""

from typing import NamedTuple

from ronde.parallel.layout import Layout

_REDUCES_PER_LAYER = 4  # Two in the forward, two in the backward.


class StepSizes(NamedTuple):
    """Sizes of one rank's part of a step."""

    weights_bytes: float  # Of the weights that pp and tp leave to it.
    activations_bytes: float  # batch * sequence * hidden, of all its microbatches.
    num_layers: int


def step_traffic(layout: Layout, sizes: StepSizes, zero: int) -> dict[str, float]:
    """Return the bytes that the busiest rank sends along each axis.

    Gradients are reduced, and weights gathered once, or twice with zero 3: within
    dp_shard first, then the shards over dp_replicate. A stage in the middle of a
    pipeline sends activations on and their gradients back. cp has no entry: its
    traffic depends on the attention.

    Source: Rajbhandari et al. 2020 (arXiv:1910.02054); Shoeybi et al. 2019
    (arXiv:1909.08053) for tp.
    """
    weights, activations, num_layers = sizes
    shard = weights / layout.dp_shard
    reduced = 2 * activations * _REDUCES_PER_LAYER * num_layers
    return {
        "pp": activations * min(2, layout.pp - 1),
        "dp_replicate": 2 * shard * _others(layout.dp_replicate),
        "dp_shard": (3 if zero == 3 else 2) * weights * _others(layout.dp_shard),
        "tp": reduced * _others(layout.tp),
    }


def _others(size: int) -> float:
    return (size - 1) / size
