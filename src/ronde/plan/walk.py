"""The walk over the buckets of one backward: their transfers and the exposed time.

Source: wait-free backpropagation, as in Shi, Chu and Li, "MG-WFBP: Efficient data
communication for distributed synchronous SGD algorithms", 2019.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.collectives.pricing import Seconds

Array = NDArray[np.float64]


class Walk(NamedTuple):
    """The outcome of a walk, in seconds; times begin with backward."""

    exposed_s: Array  # communication after the end of backward
    end_s: Array  # end of the last transfer; 0 without buckets
    overlapped_s: Array  # transfers before backward ends, if they do not slow it


def walk(
    ready_s: Sequence[Seconds] | Array,
    cost_s: Sequence[Seconds] | Array,
    backward_s: Seconds,
    interference: Seconds = 0.0,
) -> Walk:
    """Transfer buckets one after another, each as soon as it is ready.

    Buckets are in the first dimension of ``ready_s`` and ``cost_s``; the others
    broadcast. A second of overlapped transfers adds ``interference`` seconds to
    ``backward_s``, before exposed time begins.
    """
    backward = np.asarray(backward_s, dtype=np.float64)
    end = overlapped = np.zeros_like(backward)
    for ready, cost in zip(ready_s, cost_s, strict=True):
        start = np.maximum(ready, end)
        end = start + cost
        overlapped = overlapped + np.minimum(end, backward)
        overlapped = overlapped - np.minimum(start, backward)
    stretched = backward + interference * overlapped
    return Walk(np.maximum(0.0, end - stretched), end, overlapped)
