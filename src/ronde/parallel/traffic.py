"""Bytes that a rank sends in a step, by axis of its layout."""

from typing import NamedTuple

from ronde.parallel.layout import Layout

_REDUCES_PER_LAYER = 4  # Two in the forward, two in the backward.


class StepSizes(NamedTuple):
    """The sizes that determine a rank's traffic in one step."""

    weights_bytes: float  # Of the rank's weights after division by pp and tp.
    activations_bytes: float  # batch * sequence * hidden, over all microbatches.
    num_layers: int


def step_traffic(layout: Layout, sizes: StepSizes, zero: int) -> dict[str, float]:
    """Return the bytes that the busiest rank sends along each axis.

    Gradients are reduced over dp_shard, then their shards over dp_replicate. Weights
    are gathered once over dp_shard, or twice with zero 3. A middle stage of a pipeline
    sends activations forward and their gradients back. cp has no entry, as its traffic
    depends on the kind of attention.

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
