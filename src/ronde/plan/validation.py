"""Predictions of measured training steps, and the judgement of them.

Note [Prediction]
    Ranks of the smallest sizes give the parts of a step, its buckets, and the time of
    an all_reduce by size. The walk over the buckets, at prices fitted to these times,
    gives steps of more ranks. What a measured step takes longer than its own walk is
    added to every other. Intervals come from the spread of the measurements and from
    ``STEP_ERROR`` and ``COST_ERROR``, the errors that the model itself is assumed to have.
"""

import random
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.collectives.fitting import fit_link
from ronde.collectives.pricing import LinkCost, LinkCosts, all_reduce_s
from ronde.errors import UsageError
from ronde.parallel.layout import RankLayout
from ronde.plan.walk import walk

LATENCY_BYTES = 4
SIZES_BYTES = (LATENCY_BYTES, 4096, 65536, 1 << 18, 1 << 20, 1 << 22)
"""The lengths of the timed all_reduces."""
UNLIMITED_BYTES_PER_S = 250e6
"""The rate for which a model is sized if the line has no limit."""
PRICED = {
    "shared_memory": "parameter_server",
    "gloo": "ring",
    "scheduled": "ring",
    "hierarchical": "two_levels",
}
"""The algorithms for ``all_reduce_s``, by engine."""
STEP_ERROR = 0.02  # of a step
COST_ERROR = 0.08  # of the communication at twice the ranks
_NUM_BUCKETS = 8
_NUM_DRAWS = 1000
_MOST_LATENCY = 0.1  # of a step
_SIZING_POWER = 0.25


class Emulated(NamedTuple):
    """A model whose gradients arrive at given times."""

    forward_s: float
    layers: tuple[tuple[int, float], ...]
    """Elements and time after the start of backward, in order of arrival."""

    @property
    def groups(self) -> list[range]:
        """The layers of each bucket."""
        num = len(self.layers)
        step = -(-num // _NUM_BUCKETS)
        return [range(i, min(i + step, num)) for i in range(0, num, step)]


def emulated_model(name: str, bytes_per_s: float, seed: int) -> Emulated:
    """Make a model whose communication takes about as long as its computation.

    ``vgg`` has few gradients, the large ones early in backward; ``resnet`` has many
    small ones all over it. Sizes and times vary with the seed.
    """
    rng = random.Random(f"{name} {seed}")  # noqa: S311
    compute_s = 0.4 * (125e6 / bytes_per_s) ** _SIZING_POWER * rng.uniform(0.8, 1.25)
    num_bytes = bytes_per_s * compute_s * rng.uniform(0.5, 1.0)
    if name == "vgg":
        parts = [0.03, 0.12, 0.5, *(0.35 / 2**i for i in range(1, 10))]
    else:
        parts = [0.92**i * rng.uniform(0.5, 1.5) for i in range(50)]
    shares = [part / sum(parts) for part in parts]
    waits = [rng.uniform(0.5, 1.5) * (0.3 if share > 0.1 else 1) for share in shares]
    scale = compute_s * 2 / 3 / sum(waits)
    numels = [max(16, int(num_bytes * share / 4)) for share in shares]
    ready_s = [scale * wait for wait in accumulate(waits)]
    return Emulated(compute_s / 3, tuple(zip(numels, ready_s, strict=True)))


class StepRequest(NamedTuple):
    """The measurement of one start of ranks."""

    compute: str  # emulated or real
    model: str
    bytes_per_s: float  # for which an emulated model is sized
    seed: int
    num_steps: int
    sizes: Sequence[int]  # bytes of the all_reduces to time, ``LATENCY_BYTES`` first

    def emulated(self) -> Emulated:
        return emulated_model(self.model, self.bytes_per_s, self.seed)


class MeasuredSteps(NamedTuple):
    """The figures of one start of ranks."""

    num_ranks: int
    ranks_per_node: int
    steps_s: list[float]
    alone_s: list[float]  # steps without communication
    backward_s: float  # without communication
    bucket_bytes: list[int]
    ready_s: list[float]  # of each bucket, after backward's start
    times_s: list[tuple[int, list[float]]]  # of all_reduces, by size

    @property
    def layout(self) -> RankLayout:
        return layout_of(self.num_ranks, self.ranks_per_node)

    @property
    def step_s(self) -> float:
        return median(self.steps_s)


class Measurement(NamedTuple):
    """Steps of few ranks, by number of ranks, and facts about all sizes."""

    runs: Sequence[MeasuredSteps]
    algorithm: str  # as for ``all_reduce_s``
    shared_cores: int = 0  # of all ranks together; 0 if each has its own
    is_line_limited: bool = False
    is_emulated: bool = True


class Predicted(NamedTuple):
    """The seconds of a step, with an interval of 80 %."""

    low_s: float
    middle_s: float
    high_s: float


def layout_of(num_ranks: int, ranks_per_node: int) -> RankLayout:
    num_nodes = -(-num_ranks // ranks_per_node)
    return RankLayout(num_ranks, num_nodes, min(num_ranks, ranks_per_node))


def predict_steps(
    measurement: Measurement, layouts: Sequence[RankLayout]
) -> list[Predicted]:
    """Predict steps of more ranks; the last measured run has several."""
    base, costs = measurement.runs[-1], _fit_costs(measurement)
    draws = np.random.default_rng(0).standard_normal((2, _NUM_DRAWS))
    ready, sizes = np.array(base.ready_s)[:, None], base.bucket_bytes

    def steps_s(layout: RankLayout, cost_error: float) -> NDArray[np.float64]:
        crowd = _crowd(measurement, layout)
        work = 1.0 if measurement.is_emulated else crowd
        slow = 1.0 if measurement.is_line_limited else crowd
        prices = [all_reduce_s(measurement.algorithm, s, layout, costs) for s in sizes]
        scales = slow * np.exp(cost_error * draws[0])
        cost_s = np.multiply.outer(np.array(prices), scales)
        walked = walk(work * ready, cost_s, work * base.backward_s)
        return work * median(base.alone_s) + walked.exposed_s

    rest_s = base.step_s - float(np.median(steps_s(base.layout, 0.0)))
    error = np.hypot(STEP_ERROR, np.std(base.steps_s) / base.step_s)
    found: list[Predicted] = []
    for layout in layouts:
        doublings = np.log2(layout.num_ranks / base.num_ranks)
        drawn = steps_s(layout, COST_ERROR * np.sqrt(doublings)) + rest_s
        quantiles = np.quantile(drawn * np.exp(error * draws[1]), (0.1, 0.5, 0.9))
        found.append(Predicted(*quantiles.tolist()))
    return found


def _crowd(measurement: Measurement, layout: RankLayout) -> float:
    """Return the ranks a core, relative to those of the last measured run."""
    if not measurement.shared_cores:
        return 1.0
    here, base = layout.num_ranks, measurement.runs[-1].num_ranks
    return max(1.0, here / measurement.shared_cores) / max(
        1.0, base / measurement.shared_cores
    )


def _fit_costs(measurement: Measurement) -> LinkCosts:
    """Fit the links within a node to the runs on one, others to the last run."""
    runs = [run for run in measurement.runs if run.num_ranks > 1]
    within = [run for run in runs if run.layout.num_nodes == 1]
    inside, between = (within or runs)[-1], runs[-1]
    algorithm = measurement.algorithm
    return LinkCosts(_fit_link(algorithm, inside), _fit_link(algorithm, between))


def _fit_link(algorithm: str, run: MeasuredSteps) -> LinkCost:
    alpha, beta = _rounds(algorithm, run), LinkCost(0.0, 1.0)
    num_bytes, longest_s = run.times_s[-1][0], median(run.times_s[-1][1])
    sent = float(all_reduce_s(algorithm, num_bytes, run.layout, LinkCosts(beta, beta)))
    times_s = [median(times) for _, times in run.times_s]
    sizes = [size for size, _ in run.times_s]
    try:
        fit = fit_link(sizes, times_s, alpha, sent / num_bytes)
    except UsageError:  # too noisy for a line
        return LinkCost(times_s[0] / alpha, longest_s / sent)
    return LinkCost(fit.alpha_s, fit.beta_s_per_byte)


def _rounds(algorithm: str, run: MeasuredSteps) -> float:
    unit = LinkCost(1.0, 0.0)
    return float(all_reduce_s(algorithm, 0, run.layout, LinkCosts(unit, unit)))


def latency_share(algorithm: str, run: MeasuredSteps) -> float:
    """Return the rounds times the time of the smallest all_reduce, of a step."""
    return _rounds(algorithm, run) * median(run.times_s[0][1]) / run.step_s


class Case(NamedTuple):
    """A predicted size, and its measurement."""

    num_ranks: int
    low_s: float
    middle_s: float
    high_s: float
    measured_s: float
    latency_share: float

    @property
    def is_valid(self) -> bool:
        """False if the scheduler of too few cores was measured, not the line."""
        return self.latency_share <= _MOST_LATENCY

    @property
    def error(self) -> float:
        return self.middle_s / self.measured_s - 1

    @property
    def is_inside(self) -> bool:
        return self.low_s <= self.measured_s <= self.high_s

    def content(self) -> dict[str, Any]:
        judged = {name: getattr(self, name) for name in ("is_valid", "is_inside")}
        return self._asdict() | {"error": self.error} | judged


def judge(cases: Sequence[Case]) -> int:
    """Return 1 if most valid cases miss their interval, 2 if none is valid, else 0."""
    inside = [case.is_inside for case in cases if case.is_valid]
    return 2 if not inside else int(2 * sum(inside) < len(inside))


def summarize(cases: Sequence[Case]) -> str:
    errors = [abs(case.error) for case in cases if case.is_valid]
    if not errors:
        return "No size counts: this machine has too few cores for the ranks."
    num_inside = sum(case.is_inside for case in cases if case.is_valid)
    return (
        f"{num_inside} of {len(errors)} inside the interval, "
        f"median error {100 * median(errors):.1f} %."
    )


def slower_rate(bytes_per_s: float, share: float) -> float:
    """Return a rate at which latency is no more than ``_MOST_LATENCY`` of a step."""
    rate = bytes_per_s / (share / _MOST_LATENCY) ** (1 / _SIZING_POWER)
    digit = 10.0 ** np.floor(np.log10(rate))
    return float(max(d * digit for d in (1, 2, 5) if d * digit <= rate))
