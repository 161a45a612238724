"""Latency, bandwidth and reduction cost of a link, fitted to measured times."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError

LEAST_BYTES = 4096
"""Shorter messages take other paths, so that a fit leaves them out."""
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

    Relative least squares over sizes of at least ``LEAST_BYTES``; alpha and beta are at
    least 0. For a ring's all_reduce over n ranks ``rounds`` is 2(n-1) and
    ``bytes_factor`` 2(n-1)/n; for its all_gather, half of each. An all_reduce puts the
    cost of reductions into beta; an all_gather does not.

    Raises:
        UsageError: There are fewer than two sizes, or a residual exceeds 30 %.
    """
    x, y = _long(sizes_bytes, seconds)
    if len(np.unique(x)) < 2:
        raise UsageError(
            f"sizes must be at least 2 of {LEAST_BYTES} bytes or more, got "
            f"{len(np.unique(x))}. Measure longer vectors."
        )
    terms = np.stack([np.full_like(x, rounds), bytes_factor * x], axis=1) / y[:, None]
    alpha, beta = _positive_least_squares(terms)
    residual = float(np.abs(terms @ (alpha, beta) - 1).max())
    if residual > _MOST_RESIDUAL:
        raise UsageError(
            "times must be alpha + beta * size within 30 %, got a residual of "
            f"{100 * residual:.0f} %. Measure again on quiet hosts, or sizes of one "
            "algorithm."
        )
    return LinkFit(alpha, beta, residual)


def fit_gamma(
    sizes_bytes: Sequence[float],
    all_reduce_s: Sequence[float],
    all_gather_s: Sequence[float],
    num_ranks: int,
) -> float:
    """Return the seconds to reduce a byte, at least 0.

    A ring's all_reduce is two all_gathers of the same vector and the reduction of
    (n-1)/n of it. Where no all_gather was measured, take 0: beta, fitted to all_reduce,
    then includes the reduction.
    """
    x, y = _long(sizes_bytes, all_reduce_s)
    _, gathers = _long(sizes_bytes, all_gather_s)
    reduced = (num_ranks - 1) / num_ranks * x / y
    if not reduced.any():
        return 0.0
    return max(0.0, float(reduced @ (1 - 2 * gathers / y) / (reduced @ reduced)))


Array = NDArray[np.float64]


def _long(
    sizes_bytes: Sequence[float], seconds: Sequence[float]
) -> tuple[Array, Array]:
    x, y = np.asarray(sizes_bytes, np.float64), np.asarray(seconds, np.float64)
    return x[x >= LEAST_BYTES], y[x >= LEAST_BYTES]


def _positive_least_squares(terms: Array) -> tuple[float, float]:
    """Solve ``terms @ (alpha, beta) = 1`` for numbers of at least 0."""
    # Scaled, as beta is much smaller than alpha.
    scales = np.linalg.norm(terms, axis=0)
    scales[scales == 0] = 1.0
    both = np.linalg.lstsq(terms / scales, np.ones(len(terms)), rcond=None)[0] / scales
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    # With one of them 0; both cannot be negative, as all times are positive.
    singles = [each.sum() / (each @ each) if each.any() else 0.0 for each in terms.T]
    keep = 0 if both[1] < 0 else 1
    return (float(singles[0]), 0.0) if keep == 0 else (0.0, float(singles[1]))
