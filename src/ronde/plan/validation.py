"""Predictions of steps that are measured afterwards, and their judgement.

Note [Prediction]
    Few ranks give the parts of a step, its buckets, and times of all_reduce by size.
    The walk over the buckets, at prices fitted to these times, gives steps of more
    ranks. A measured step minus its own walk is added to all. Ranks that outnumber the
    cores of one machine share them: a bucket takes no less than the cores need for it,
    and a step no less than for all its work. That work is the measured time of the
    processors, and what communication takes of it grows with the bytes that a rank
    sends. Intervals come from the spread of the steps, and from assumed errors.
"""

import logging
import random
from collections.abc import Sequence
from itertools import accumulate
from math import inf
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.collectives.fitting import fit_link
from ronde.collectives.pricing import LinkCost, LinkCosts, all_reduce_s
from ronde.errors import UsageError
from ronde.parallel.layout import RankLayout
from ronde.plan.walk import walk

SIZES_BYTES = (4, 4096, 65536, 1 << 18, 1 << 20, 1 << 22)
"""The lengths of the timed all_reduces; the first gives the latency."""
STEP_ERROR = 0.03  # of a step
COST_ERROR = 0.08  # of the communication at twice the ranks
CROWD_ERROR = 0.1  # of the work of cores at twice the ranks
_NUM_DRAWS = 1000
_MOST_LATENCY = 0.1  # of a step
_SIZING_POWER = 0.25
_ONLY_BYTES = LinkCosts(LinkCost(0.0, 1.0), LinkCost(0.0, 1.0))
_logger = logging.getLogger("ronde")


class StepRequest(NamedTuple):
    """The measurement of one start of ranks."""

    compute: str  # emulated or real
    model: str
    bytes_per_s: float  # for which an emulated model is sized
    seed: int
    num_steps: int
    is_base: bool  # with its parts, from which others are predicted

    def emulated_layers(self) -> tuple[float, list[tuple[int, float]]]:
        """Return forward's time, and each gradient's elements and time in backward.

        Communication takes about as long as computation. ``vgg`` has few gradients, the
        large ones early; ``resnet`` has many. Sizes and times vary with the seed.
        """
        rng = random.Random(f"{self.model} {self.seed}")  # noqa: S311
        slowness = (125e6 / self.bytes_per_s) ** _SIZING_POWER
        compute_s = 0.4 * slowness * rng.uniform(0.8, 1.25)
        numel = self.bytes_per_s * compute_s * rng.uniform(0.5, 1.0) / 4
        parts = [0.92**i * rng.uniform(0.5, 1.5) for i in range(50)]
        if self.model == "vgg":
            parts = [0.03, 0.12, 0.5, *(0.35 / 2**i for i in range(1, 10))]
        shares = [part / sum(parts) for part in parts]
        waits = [rng.uniform(0.5, 1.5) * (0.3 if s > 0.1 else 1) for s in shares]
        scale = compute_s * 2 / 3 / sum(waits)
        ready_s = [scale * wait for wait in accumulate(waits)]
        numels = [max(16, int(numel * share)) for share in shares]
        return compute_s / 3, list(zip(numels, ready_s, strict=True))


class MeasuredSteps(NamedTuple):
    """The figures of one start of ranks."""

    num_ranks: int
    ranks_per_node: int
    steps_s: Sequence[float] = ()
    cpu_s: float = 0.0  # of a rank's processors, in a step
    times_s: Sequence[float] = ()  # of all_reduces of ``SIZES_BYTES``, or the first
    # Only of ranks from which others are predicted, in a step without communication:
    alone_s: float = 0.0
    alone_cpu_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    bucket_bytes: Sequence[int] = ()
    ready_s: Sequence[float] = ()  # of each bucket, after backward's start

    @property
    def layout(self) -> RankLayout:
        return layout_of(self.num_ranks, self.ranks_per_node)

    @property
    def step_s(self) -> float:
        return median(self.steps_s)

    def latency_share(self, algorithm: str) -> float:
        """Return the rounds times the shortest all_reduce, as a part of a step."""
        unit = LinkCost(1.0, 0.0)
        rounds = _price_s(algorithm, 0, self.layout, LinkCosts(unit, unit))
        return rounds * self.times_s[0] / self.step_s


class Predicted(NamedTuple):
    """The seconds of a step, with an interval of 80 %."""

    low_s: float
    middle_s: float
    high_s: float


def layout_of(num_ranks: int, ranks_per_node: int) -> RankLayout:
    num_nodes = -(-num_ranks // ranks_per_node)
    return RankLayout(num_ranks, num_nodes, min(num_ranks, ranks_per_node))


def predict_steps(
    runs: Sequence[MeasuredSteps],
    layouts: Sequence[RankLayout],
    algorithm: str,
    *,
    shared_cores: float = inf,
    is_emulated: bool = True,
) -> list[Predicted]:
    """Predict steps of more ranks than the last measured run has, which is several.

    ``shared_cores`` are those of all ranks; infinite if each has its own.
    """
    base, (costs, fit_error) = runs[-1], _links(runs, algorithm)
    draws = np.random.default_rng(0).standard_normal((3, _NUM_DRAWS))
    all_bytes = sum(base.bucket_bytes)
    shares = np.divide(base.bucket_bytes, all_bytes)
    # An emulated forward needs no cores, and nothing is sent meanwhile.
    idle_s = (base.alone_s - base.backward_s - base.update_s) * is_emulated

    def steps_s(layout: RankLayout, cost_error: float) -> NDArray[np.float64]:
        of_cores = layout.num_ranks / shared_cores
        crowd = max(1, of_cores) / max(1, base.num_ranks / shared_cores)
        error = crowd ** (CROWD_ERROR * draws[2] / np.log(2))
        work = 1.0 if is_emulated else crowd * error
        sent, base_sent = (
            _price_s(algorithm, all_bytes, each, _ONLY_BYTES)
            for each in (layout, base.layout)
        )
        sending_s = max(0.0, base.cpu_s - base.alone_cpu_s) * sent / base_sent
        prices_s = [_price_s(algorithm, b, layout, costs) for b in base.bucket_bytes]
        cost_s = np.maximum(
            np.outer(prices_s, np.exp(cost_error * draws[0])),
            np.outer(shares, of_cores * sending_s * error),
        )
        ready_s = np.outer(base.ready_s, work * np.ones(_NUM_DRAWS))
        walked = walk(ready_s, cost_s, work * base.backward_s)
        alone_s = work * base.alone_s + (crowd * error - work) * base.update_s
        needed_s = idle_s + of_cores * (base.alone_cpu_s + sending_s) * error
        return np.maximum(alone_s + walked.exposed_s, needed_s)

    rest_s = base.step_s - float(steps_s(base.layout, 0.0)[0])
    error = np.hypot(STEP_ERROR, np.std(base.steps_s) / base.step_s)
    found: list[Predicted] = []
    for layout in layouts:
        doublings = np.log2(layout.num_ranks / base.num_ranks)
        cost_error = np.hypot(COST_ERROR * np.sqrt(doublings), fit_error)
        drawn = steps_s(layout, cost_error) + rest_s
        quantiles = np.quantile(drawn * np.exp(error * draws[1]), (0.1, 0.5, 0.9))
        found.append(Predicted(*quantiles.tolist()))
    return found


def _price_s(
    algorithm: str, size: float, layout: RankLayout, costs: LinkCosts
) -> float:
    return float(all_reduce_s(algorithm, size, layout, costs))


def _links(runs: Sequence[MeasuredSteps], algorithm: str) -> tuple[LinkCosts, float]:
    """Return costs of links, and a relative error of prices besides those of a fit."""
    base = runs[-1]
    within = [run for run in runs if run.layout.num_nodes == 1 < run.num_ranks]
    inside, error = _fit(algorithm, within[-1] if within else base)
    if not within or base.layout.num_nodes == 1:
        return LinkCosts(inside, inside), error
    between, error = _fit(algorithm, base, inside)
    return LinkCosts(inside, between), error


def _fit(
    algorithm: str, run: MeasuredSteps, inside: LinkCost | None = None
) -> tuple[LinkCost, float]:
    """Fit the cost of links between nodes, or of all if those inside are unknown."""
    free, most = LinkCost(0.0, 0.0), SIZES_BYTES[-1]
    rounds, sent = (
        _price_s(algorithm, most, run.layout, LinkCosts(free if inside else unit, unit))
        for unit in (LinkCost(1.0, 0.0), LinkCost(0.0, 1.0))
    )
    times_s = list(run.times_s)
    if inside is not None:
        near = LinkCosts(inside, free)
        known_s = (_price_s(algorithm, b, run.layout, near) for b in SIZES_BYTES)
        times_s = [max(t - k, t / 10) for t, k in zip(times_s, known_s, strict=True)]
    try:
        fit = fit_link(SIZES_BYTES, times_s, rounds, sent / most)
    except UsageError as error:
        # Two sizes give a line through any noise. So the distance of all sizes from
        # it, as a standard deviation of their logarithms, is an error of every price.
        alpha_s, beta_s = times_s[0] / rounds, times_s[-1] / sent
        line_s = rounds * alpha_s + np.multiply(SIZES_BYTES, sent / most * beta_s)
        noise = float(np.sqrt(np.mean(np.log(line_s / times_s) ** 2)))
        _logger.warning(
            "Priced by the shortest and the longest all_reduce alone, with an error of "
            "%.0f %%: %s",
            100 * noise,
            error,
        )
        return LinkCost(alpha_s, beta_s), noise
    return LinkCost(fit.alpha_s, fit.beta_s_per_byte), 0.0


class StepComparison(NamedTuple):
    """A predicted size, and its measurement."""

    num_ranks: int
    predicted: Predicted
    measured_s: float
    latency_share: float

    @property
    def is_valid(self) -> bool:
        """False if the scheduler of too few cores was measured, not the line."""
        return self.latency_share <= _MOST_LATENCY

    @property
    def error(self) -> float:
        return self.predicted.middle_s / self.measured_s - 1

    @property
    def is_inside(self) -> bool:
        return self.predicted.low_s <= self.measured_s <= self.predicted.high_s

    def content(self) -> dict[str, Any]:
        names = ("error", "is_inside", "is_valid", "measured_s", "latency_share")
        judged = {name: getattr(self, name) for name in names}
        return {"ranks": self.num_ranks, **self.predicted._asdict(), **judged}

    def shown(self, rate_bit: float) -> str:
        text = f"error {100 * self.error:+.1f} %, {'in' * self.is_inside or 'out'}side"
        if not self.is_valid:
            slower = slower_rate(rate_bit, self.latency_share) / 1e6
            text = f"machine too small for this rate; try --rate {slower:g}Mbit/s"
        return f"{self.num_ranks:5}  measured   {self.measured_s:.4f} s, {text}"


def slower_rate(rate: float, latency_share: float) -> float:
    """Return a round rate at which latency would be a small part of a step."""
    # The lower the rate, the longer is an emulated step.
    rate /= (latency_share / _MOST_LATENCY) ** (1 / _SIZING_POWER)
    unit = 10 ** np.floor(np.log10(rate))
    return float(max(digit * unit for digit in (1, 2, 5) if digit * unit <= rate))


def judge(cases: Sequence[StepComparison]) -> tuple[int, str]:
    """Return an exit code and a sentence on the valid cases.

    The code is 1 if most of them miss their interval, 2 if there are none, else 0.
    """
    valid = [case for case in cases if case.is_valid]
    if not valid:
        return 2, "no size counts, as this machine has too few cores"
    num_inside = sum(case.is_inside for case in valid)
    error = median(abs(case.error) for case in valid)
    text = f"{num_inside} of {len(valid)} inside, median error {100 * error:.1f} %"
    return int(2 * num_inside < len(valid)), text
