"""Latency and bandwidth of a link, fitted to measured times."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError

_LEAST_BYTES = 4096  # shorter messages take other paths
_MOST_RESIDUAL = 0.3


class LinkFit(NamedTuple):
    """A link's costs, and the largest residual as a fraction of the measured time."""

    alpha_s: float
    beta_s_per_byte: float
    largest_residual: float


def fit_link(
    sizes_bytes: Sequence[float],
    seconds: Sequence[float],
    rounds: float,
    bytes_factor: float,
) -> LinkFit:
    """Fit ``seconds = rounds * alpha + bytes_factor * size * beta``.

    Relative least squares over sizes of at least 4 KiB; no cost is below 0. For a
    ring's all_reduce ``rounds`` is 2(n-1) and ``bytes_factor`` 2(n-1)/n, for its
    all_gather half of each. In an all_reduce, beta includes the cost of reductions.

    Raises:
        UsageError: There are fewer than two sizes, or a residual exceeds 30 %.
    """
    x, y = _long(sizes_bytes, seconds)
    if (num_sizes := len(set(x.tolist()))) < 2:
        rule = f"must be at least 2 of {_LEAST_BYTES} bytes or more"
        raise UsageError(f"sizes {rule}, got {num_sizes}. Measure longer vectors.")
    terms = np.stack([rounds / y, bytes_factor * x / y], axis=1)
    fitted = np.linalg.lstsq(terms, np.ones_like(y), rcond=None)[0].tolist()
    for negative, other in ((0, 1), (1, 0)):
        if fitted[negative] < 0:
            column = terms[:, other]
            fitted[negative] = 0.0
            fitted[other] = float(column.sum() / (column @ column))
    residual = float(np.abs(terms @ fitted - 1).max())
    if residual > _MOST_RESIDUAL:
        raise UsageError(
            "times must be alpha + beta * size within 30 %, got a residual of "
            f"{100 * residual:.0f} %. Measure again on quiet hosts, with one algorithm."
        )
    return LinkFit(fitted[0], fitted[1], residual)


def _long(
    sizes_bytes: Sequence[float], seconds: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = np.asarray(sizes_bytes, np.float64), np.asarray(seconds, np.float64)
    return x[x >= _LEAST_BYTES], y[x >= _LEAST_BYTES]
