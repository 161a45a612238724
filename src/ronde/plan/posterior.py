"""Draws of a step's unknowns, weighted by measured speeds.

Residuals of the logarithm of speeds are a random walk over doublings of the ranks, so
the last measured size counts most. Source of the sampling: adaptive importance
sampling as in Cappé et al., "Population Monte Carlo", 2004.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ronde.plan.priors import Priors
from ronde.plan.setup import Exchange, Point, Setup, Size
from ronde.plan.step import PARTS, Draws, Hypothesis, StepModel, StepParts

_STUDENT = 5.0


class Forecast(NamedTuple):
    """A predicted speed with its interval, of all ranks, in units per second."""

    size: Size
    low: float
    middle: float
    high: float
    parts_s: Mapping[str, float]
    units_per_s: Draws
    weights: Draws


class _Branch(NamedTuple):
    """The draws of one hypothesis."""

    model: StepModel
    z: Draws
    compute_s: Draws
    log_weights: Draws
    residuals: Draws  # points x draws


@dataclass(frozen=True, slots=True)
class Posterior:
    setup: Setup
    priors: Priors
    branches: Sequence[_Branch]

    def predict(self, size: Size, changed: Setup | None = None) -> Forecast:
        speeds: list[Draws] = []
        parts: dict[str, list[Draws]] = {name: [] for name in PARTS}
        noise = self._noise(size)
        top = max(float(b.log_weights.max()) for b in self.branches)
        weights = [np.exp(b.log_weights - top) for b in self.branches]
        for branch in self.branches:
            model = branch.model
            if changed is not None:
                model = StepModel(changed, model.hypothesis, model.draws)
            step = model.at(size, branch.compute_s)
            mean, deviation = self._carry(size, branch.residuals)
            found = _log_speed(self.setup, size, step.step_s) + mean
            grid = found[:, None] + deviation * noise
            speeds.append(np.exp(grid))
            for name in PARTS:
                parts[name].append(step.parts_s[name])
        flat = np.concatenate(speeds)
        whole = np.concatenate(weights)
        whole = whole / whole.sum()
        low, middle, high = weighted_quantiles(
            flat.ravel(), np.repeat(whole, flat.shape[1]), (0.1, 0.5, 0.9)
        )
        low, high = self._widen(low, middle, high)
        means = {
            name: float(whole @ np.concatenate(each)) for name, each in parts.items()
        }
        return Forecast(size, low, middle, high, means, flat[:, 0], whole)

    def _noise(self, size: Size) -> Draws:
        num = sum(len(branch.z) for branch in self.branches)
        rng = np.random.default_rng(size.num_ranks)
        return rng.standard_t(_STUDENT, (1, 8)) if num else np.zeros((1, 1))

    def _widen(self, low: float, middle: float, high: float) -> tuple[float, float]:
        factor = self.priors.widening
        return middle * (low / middle) ** factor, middle * (high / middle) ** factor

    def _carry(self, size: Size, residuals: Draws) -> tuple[Draws, float]:
        """Return the mean and the deviation of the logarithm at a size."""
        sizes = [point.size for point in self.setup.points]
        own, across, alone = _covariances(sizes, size, self.priors)
        solved = np.linalg.solve(own, across)
        variance = max(alone - float(across @ solved), self.priors.error**2)
        return solved @ residuals, math.sqrt(variance)


def infer(setup: Setup, priors: Priors, num_draws: int = 1000) -> Posterior:
    branches = [
        _sample(setup, hypothesis, probability, priors, num_draws)
        for hypothesis, probability in _hypotheses(setup, priors)
    ]
    return Posterior(setup, priors, branches)


def _hypotheses(setup: Setup, priors: Priors) -> Iterator[tuple[Hypothesis, float]]:
    flat, ring, servers = priors.flat, priors.ring_latency, priors.servers_on_all
    if setup.program.exchange is Exchange.PARAMETER_SERVER:
        yield Hypothesis(), servers
        yield Hypothesis(are_servers_on_all=False), 1 - servers
        return
    for algorithm, p in (("ring", flat), ("two_levels", 1 - flat)):
        yield Hypothesis(algorithm, is_ring_latency=True), p * ring
        yield Hypothesis(algorithm, is_ring_latency=False), p * (1 - ring)


def _sample(
    setup: Setup,
    hypothesis: Hypothesis,
    probability: float,
    priors: Priors,
    num_draws: int,
) -> _Branch:
    rng = np.random.default_rng(0)
    names = priors.names
    z = rng.standard_normal((num_draws, len(names)))
    log_proposal = _log_normal(z)
    for last in (False, False, True):
        model = StepModel(setup, hypothesis, priors.values(z))
        branch = _weigh(model, z, priors)
        log_weights = branch.log_weights + _log_normal(z) - log_proposal
        if len(setup.points) == 1 or last:
            break
        weights = np.exp(log_weights - log_weights.max())
        weights /= weights.sum()
        mean = weights @ z
        spread = np.sqrt(np.maximum(weights @ (z - mean) ** 2, 0.05)) * 1.3
        fresh = rng.standard_normal(z.shape)
        is_prior = np.arange(num_draws) % 8 == 0
        z = np.where(is_prior[:, None], fresh, mean + spread * fresh)
        fitted = _log_normal((z - mean) / spread) - np.log(spread).sum()
        log_proposal = np.logaddexp(math.log(1 / 8) + _log_normal(z), math.log(7 / 8) + fitted)
    return branch._replace(
        log_weights=log_weights + math.log(max(probability, 1e-9) / num_draws)
    )


def _log_normal(z: Draws) -> Draws:
    return -0.5 * (z**2).sum(1)


def _weigh(model: StepModel, z: Draws, priors: Priors) -> _Branch:
    setup = model.setup
    first = setup.points[0]
    compute_s = model.compute_s(step_of(setup, first))
    residuals = np.array(
        [
            math.log(point.units_per_s)
            - _log_speed(setup, point.size, model.at(point.size, compute_s).step_s)
            for point in setup.points
        ]
    )
    sizes = [point.size for point in setup.points]
    own, _, _ = _covariances(sizes, sizes[-1], priors)
    distance = np.einsum("kd,kd->d", residuals, np.linalg.solve(own, residuals))
    k = len(sizes)
    log_weights = -(_STUDENT + k) / 2 * np.log1p(distance / _STUDENT)
    return _Branch(model, z, compute_s, log_weights, residuals)


def _covariances(
    sizes: Sequence[Size], target: Size, priors: Priors
) -> tuple[Draws, Draws, float]:
    at = np.array([_position(size, priors) for size in sizes])
    new = _position(target, priors)
    start = at[0]
    walk, error = priors.walk**2, priors.error**2
    own = walk * (np.minimum.outer(at, at) - start) + error * np.eye(len(at))
    across = walk * (np.minimum(at, new) - start)
    return own, across, walk * max(new - start, 0.0) + error


def _position(size: Size, priors: Priors) -> float:
    return math.log2(size.num_ranks) + priors.crossing * (size.num_nodes > 1)


def units_of_step(setup: Setup, size: Size) -> float:
    batch = size.batch or 1.0
    return size.num_ranks * batch * (setup.program.units_a_sample or 1.0)


def step_of(setup: Setup, point: Point) -> float:
    return units_of_step(setup, point.size) / point.units_per_s


def _log_speed(setup: Setup, size: Size, step_s: Draws) -> Draws:
    return math.log(units_of_step(setup, size)) - np.log(step_s)


def weighted_quantiles(
    values: Draws, weights: Draws, shares: Sequence[float]
) -> list[float]:
    order = np.argsort(values)
    cumulated = np.cumsum(weights[order])
    cumulated /= cumulated[-1]
    return [float(values[order][np.searchsorted(cumulated, share)]) for share in shares]
