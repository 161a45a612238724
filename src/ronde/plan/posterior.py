"""Draws of a step's unknowns, weighted by measured speeds.

Residuals of the logarithm of speeds are a random walk over doublings of the ranks, so
the last measured size counts most. Draws are moved by an ensemble smoother with several
assimilations, as in Emerick and Reynolds, 2013; a normal distribution fitted to them is
the proposal of importance sampling.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ronde.plan.priors import Draws, Priors
from ronde.plan.setup import Exchange, Setup, Size
from ronde.plan.step import PARTS, Hypothesis, StepModel

_STUDENT = 5.0
# The middles of 16 equally likely parts of Student's distribution with 5 degrees.
_HALF = (0.0825, 0.2501, 0.4265, 0.6199, 0.8434, 1.1229, 1.5262, 2.3886)
_NOISE = np.array([*(-x for x in reversed(_HALF)), *_HALF])
_DEFENSIVE = 8  # one of so many draws of a later round is from the prior
_QUANTILES = 0.1, 0.5, 0.9
_NUM_HALVINGS = 44  # until two bounds differ by rounding only
_LEAST_EFFECTIVE = 100  # draws
_NUM_UPDATES = 3
_MOST_RESIDUAL = 1.0
_SPREAD = 1.2  # of the proposal, by the variance of the draws
_NARROWED = 0.8  # of a prior's variance


class Forecast(NamedTuple):
    """A predicted speed of all ranks with its 80 % interval, in units per second."""

    size: Size
    low: float
    middle: float
    high: float
    step_s: float
    parts_s: Mapping[str, float]  # means
    speeds: Draws  # without noise, one for each draw of the posterior


class _Branch(NamedTuple):
    """The draws of one hypothesis."""

    model: StepModel
    z: Draws
    compute_s: Draws
    log_weights: Draws
    residuals: Draws  # points x draws


@dataclass(frozen=True, slots=True)
class Posterior:
    """Weighted draws of the unknowns of a setup."""

    setup: Setup
    priors: Priors
    branches: Sequence[_Branch]
    weights: Draws  # of the draws of all branches in turn; their sum is 1

    @property
    def effective_draws(self) -> float:
        """The number of equally weighted draws that would be as good."""
        return 1 / float(self.weights @ self.weights)

    @property
    def contradiction(self) -> float:
        """The least step of the smallest size, by the bytes, over the given one.

        It is 1 unless the bytes alone take longer than the given step.
        """
        residuals = np.concatenate([branch.residuals[0] for branch in self.branches])
        return math.exp(max(0.0, float(self.weights @ residuals)))

    def predict(
        self, size: Size, changed: Setup | None = None, free: str = ""
    ) -> Forecast:
        """Return the speed at a size, after a change or if a part cost nothing."""
        mean, deviation = self._carried(size)
        speeds: list[Draws] = []
        parts: list[Draws] = []
        units = (changed or self.setup).units(size)
        for branch in self.branches:
            model = branch.model
            if changed is not None:
                model = StepModel(changed, model.hypothesis, model.draws)
            step = model.at(size, branch.compute_s, free)
            speeds.append(units / step.step_s * np.exp(mean @ branch.residuals))
            parts.append(np.array([step.parts_s[name] for name in PARTS]))
        found = np.concatenate(speeds)
        low, middle, high = _noisy_quantiles(found, self.weights, deviation)
        factor = self.priors.widening[self.situation(size)]
        low, high = (middle * (bound / middle) ** factor for bound in (low, high))
        means = dict(zip(PARTS, np.concatenate(parts, 1) @ self.weights, strict=True))
        return Forecast(size, low, middle, high, units / middle, means, found)

    def ratio(self, new: Forecast, old: Forecast) -> tuple[float, float, float]:
        """Return the 80 % interval and the middle of the ratio of two speeds."""
        return weighted_quantiles(new.speeds / old.speeds, self.weights)

    def parameters(self) -> dict[str, tuple[float, float, float, str]]:
        """Return the 80 % interval of each unknown, its middle and its origin.

        The origin is ``points`` if the measured speeds narrow the prior, else
        ``prior``.
        """
        z = np.concatenate([branch.z for branch in self.branches])
        variances = self.weights @ (z - self.weights @ z) ** 2
        origins = ["points" if v < _NARROWED else "prior" for v in variances]
        drawn = zip(self.priors.values(z).items(), origins, strict=True)
        return {
            name: (*weighted_quantiles(values, self.weights), origin)
            for (name, values), origin in drawn
        }

    def situation(self, size: Size) -> str:
        """Return the situation of a prediction: one of ``priors.SITUATIONS``."""
        if size.num_nodes == 1:
            return "inside"
        are_nodes_known = self.setup.points[-1].size.num_nodes > 1
        return "beyond" if are_nodes_known else "across"

    def _carried(self, size: Size) -> tuple[Draws, float]:
        """Return the weights of the points' residuals at a size, and the deviation."""
        at, new = _positions(self.setup, self.priors), _position(size, self.priors)
        walked, error = self.priors.walk**2, self.priors.error**2
        across = walked * np.maximum(np.minimum(at, new) - at[0], 0.0)
        solved = _solve(_covariance(self.setup, self.priors), across)
        variance = walked * abs(new - at[0]) + error - float(across @ solved)
        return solved, math.sqrt(max(variance, error))


def infer(setup: Setup, priors: Priors, num_draws: int = 600) -> Posterior:
    """Return the posterior of a setup's unknowns; equal for equal arguments."""
    found = _infer(setup, priors, num_draws)
    if found.effective_draws < _LEAST_EFFECTIVE:
        found = _infer(setup, priors, 4 * num_draws)
    return found


def _infer(setup: Setup, priors: Priors, num_draws: int) -> Posterior:
    branches = [
        _sample(setup, hypothesis, probability, priors, num_draws)
        for hypothesis, probability in _hypotheses(setup, priors)
    ]
    log_weights = np.concatenate([branch.log_weights for branch in branches])
    weights = np.exp(log_weights - log_weights.max())
    return Posterior(setup, priors, branches, weights / weights.sum())


def _hypotheses(setup: Setup, priors: Priors) -> Iterator[tuple[Hypothesis, float]]:
    flat, ring, servers = priors.flat, priors.ring_latency, priors.servers_on_all
    program = setup.program
    if program.exchange is Exchange.PARAMETER_SERVER:
        yield Hypothesis(), servers
        yield Hypothesis(are_servers_on_all=False), 1 - servers
    elif program.algorithm:
        yield Hypothesis(), 1.0
    else:
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
    z = rng.standard_normal((num_draws, len(priors.unknowns)))
    log_proposal = _log_normal(z)
    branch = _weigh(setup, hypothesis, priors, z, log_proposal)
    # A single point has no likelihood but for draws that it makes impossible.
    if len(setup.points) > 1:
        for _ in range(_NUM_UPDATES - 1):
            z = _updated(branch, priors, rng)
            branch = _weigh(setup, hypothesis, priors, z, log_proposal)
        z = _updated(branch, priors, rng)
        mean = z.mean(0)
        apart = z - mean
        root = _root(_SPREAD * apart.T @ apart / num_draws)
        fresh = rng.standard_normal(z.shape)
        is_prior = np.arange(num_draws) % _DEFENSIVE == 0
        z = np.where(is_prior[:, None], fresh, mean + fresh @ root.T)
        scaled = _solve(root, (z - mean).T)
        fitted = _log_normal(scaled.T) - np.log(np.diag(root)).sum()
        log_proposal = np.logaddexp(
            _log_normal(z) - math.log(_DEFENSIVE),
            fitted + math.log(1 - 1 / _DEFENSIVE),
        )
        branch = _weigh(setup, hypothesis, priors, z, log_proposal)
    share = math.log(max(probability, 1e-9) / num_draws)
    return branch._replace(log_weights=branch.log_weights + share)


def _updated(branch: _Branch, priors: Priors, rng: np.random.Generator) -> Draws:
    """Move draws towards the measured speeds, as an ensemble Kalman smoother does."""
    z, residuals = branch.z, np.clip(branch.residuals, -_MOST_RESIDUAL, _MOST_RESIDUAL)
    own = _NUM_UPDATES * _covariance(branch.model.setup, priors)
    noise = _root(own) @ rng.standard_normal(residuals.shape)
    apart = residuals - residuals.mean(1)[:, None]
    both = apart @ (z - z.mean(0)) / len(z)
    gain = _solve(apart @ apart.T / len(z) + own, both)
    return z - (residuals + noise).T @ gain


def _weigh(
    setup: Setup, hypothesis: Hypothesis, priors: Priors, z: Draws, log_proposal: Draws
) -> _Branch:
    """Weigh draws by the multivariate Student likelihood of the residuals."""
    model = StepModel(setup, hypothesis, priors.values(z))
    compute_s = model.compute_s()
    residuals = np.array(
        [
            np.log(speed * model.at(size, compute_s).step_s / setup.units(size))
            for size, speed in setup.points
        ]
    )
    solved = _solve(_covariance(setup, priors), residuals)
    distance = np.einsum("kd,kd->d", residuals, solved)
    likelihood = -(_STUDENT + len(residuals)) / 2 * np.log1p(distance / _STUDENT)
    log_weights = likelihood + _log_normal(z) - log_proposal
    return _Branch(model, z, compute_s, log_weights, residuals)


def _root(matrix: Draws) -> Draws:
    return np.linalg.cholesky(matrix).astype(np.float64)


def _solve(matrix: Draws, right: Draws) -> Draws:
    return np.linalg.solve(matrix, right).astype(np.float64)


def _log_normal(z: Draws) -> Draws:
    return -0.5 * (z**2).sum(1)


def _covariance(setup: Setup, priors: Priors) -> Draws:
    """Return the covariance of the residuals at the points."""
    at, error = _positions(setup, priors), priors.error**2
    return priors.walk**2 * (np.minimum.outer(at, at) - at[0]) + error * np.eye(len(at))


def _positions(setup: Setup, priors: Priors) -> Draws:
    return np.array([_position(point.size, priors) for point in setup.points])


def _position(size: Size, priors: Priors) -> float:
    """Return a size on the random walk: its doublings, and more for the first node."""
    return math.log2(size.num_ranks) + priors.crossing * (size.num_nodes > 1)


def _noisy_quantiles(
    values: Draws, weights: Draws, deviation: float
) -> tuple[float, float, float]:
    """Return the quantiles of values with noise in their logarithms.

    All pairs of a value and a noise are counted, but only the values are sorted.
    """
    order = np.argsort(values)
    logs, noise = np.log(values[order]), deviation * _NOISE
    shares = np.append(0.0, np.cumsum(weights[order]))
    wanted = shares[-1] * np.array(_QUANTILES)
    low, high = (np.full(3, logs[i] + noise[i]) for i in (0, -1))
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        below = np.searchsorted(logs, middle[:, None] - noise, side="right")
        is_enough = shares[below].mean(1) >= wanted
        low, high = np.where(is_enough, low, middle), np.where(is_enough, middle, high)
    first, second, third = np.exp(high).tolist()
    return first, second, third


def weighted_quantiles(values: Draws, weights: Draws) -> tuple[float, float, float]:
    """Return the quantiles 10, 50 and 90 %."""
    order = np.argsort(values)
    cumulated = np.cumsum(weights[order])
    shares = cumulated[-1] * np.array(_QUANTILES)
    low, middle, high = values[order][np.searchsorted(cumulated, shares)].tolist()
    return low, middle, high
