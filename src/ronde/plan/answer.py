"""Predicted and measured speeds, and the parts of a step that bind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ronde.plan.posterior import Posterior, units_of_step
from ronde.plan.setup import Setup, Size
from ronde.plan.step import PARTS

_LEAST_SAVED = 0.03  # of a step; below it computing binds
_AS_MUCH = 0.9  # of the largest saving
_WIDEST = 2.0
_LINEAR = 1.03
_FARTHEST = 64


class Between(NamedTuple):
    """A figure with the ends of its 80 % interval; without a middle if that is wide."""

    low: float
    middle: float | None
    high: float

    def times(self, factor: float) -> "Between":
        middle = None if self.middle is None else self.middle * factor
        return Between(self.low * factor, middle, self.high * factor)

    def inverse(self, of: float) -> "Between":
        middle = None if self.middle is None else of / self.middle
        return Between(of / self.high, middle, of / self.low)


class Inputs(NamedTuple):
    """A setup, and the origins of its facts, by their keys."""

    setup: Setup
    measured: Sequence[str]
    stated: Sequence[str]
    assumed: Sequence[str]
    unknown: Sequence[str]
    left_out: Sequence[str]

    def lines(self) -> list[str]:
        """Return a sentence for each origin."""
        unknown = "unknown, so that intervals are wider"
        origins = {
            "measured": self.measured, "stated": self.stated,
            "assumed": self.assumed, unknown: self.unknown,
        }
        lines = [
            f"{name}: {', '.join(keys)}." for name, keys in origins.items() if keys
        ]
        return lines + [f"left out: {each}." for each in self.left_out]


class Row(NamedTuple):
    """The speed of all ranks at a size, and its reasons."""

    size: Size
    speed: Between  # units per second
    step: Between  # seconds
    efficiency: float | None
    parts_s: Mapping[str, float]
    binds: tuple[str, ...]
    saved_s: Mapping[str, float]  # of a step, if a part cost nothing
    is_measured: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The rows of a prediction, by number of ranks."""

    setup: Setup
    rows: tuple[Row, ...]
    warnings: tuple[str, ...]
    parameters: Mapping[str, tuple[float, float, float, str]]


def answer(posterior: Posterior, sizes: Sequence[Size]) -> Answer:
    """Predict the speed at sizes, and show those that were measured beside them."""
    setup = posterior.setup
    measured = {(p.size.num_ranks, p.size.batch): p for p in setup.points}
    asked = {(size.num_ranks, size.batch): size for size in sizes}
    every = {key: point.size for key, point in measured.items()} | asked
    rows: list[Row] = []
    for key in sorted(every, key=lambda k: (k[0], k[1] or 0)):
        row = predict_row(posterior, every[key])
        if key in measured:
            speed = measured[key].units_per_s
            row = _row(setup, row, Between(speed, speed, speed), is_measured=True)
        rows.append(row)
    return Answer(
        setup, tuple(rows), tuple(_warnings(setup, rows)), posterior.parameters()
    )


def predict_row(posterior: Posterior, size: Size, changed: Setup | None = None) -> Row:
    """Return the speed at a size, and the parts of its step."""
    found = posterior.predict(size, changed)
    saved = {
        name: max(0.0, found.step_s - posterior.predict(size, changed, name).step_s)
        for name in PARTS
        if name != "compute" and found.parts_s[name] > 0
    }
    most = max(saved.values(), default=0.0)
    binds: tuple[str, ...] = ("compute",)
    if most > _LEAST_SAVED * found.step_s:
        binds = tuple(n for n, s in saved.items() if s >= _AS_MUCH * most)
    is_wide = found.high > _WIDEST * found.low
    speed = Between(found.low, None if is_wide else found.middle, found.high)
    empty = Row(size, speed, speed, None, found.parts_s, binds, saved)
    return _row(changed or posterior.setup, empty, speed)


def _row(setup: Setup, row: Row, speed: Between, *, is_measured: bool = False) -> Row:
    step = speed.inverse(units_of_step(setup, row.size))
    base = setup.points[0]
    efficiency = None
    if speed.middle is not None:
        of_base = base.units_per_s / base.size.num_ranks
        efficiency = speed.middle / row.size.num_ranks / of_base
    return row._replace(
        speed=speed, step=step, efficiency=efficiency, is_measured=is_measured
    )


def _warnings(setup: Setup, rows: Sequence[Row]) -> list[str]:
    found: list[str] = []
    points = setup.points
    fast = [
        f"{row.size.num_ranks} ranks at {row.efficiency:.0%}"
        for row in rows
        if row.is_measured and row.efficiency and row.efficiency > _LINEAR
    ]
    if fast:
        found.append(
            f"faster than linear: {', '.join(fast)}. Look for a cache, another batch, "
            "clock or container; these points mislead a prediction."
        )
    most = points[-1].size.num_ranks
    if rows[-1].size.num_ranks > _FARTHEST * most:
        found.append(
            f"{rows[-1].size.num_ranks:,} ranks are more than {_FARTHEST} times the "
            f"largest measured size, {most}: intervals there rest on priors."
        )
    if any(row.speed.middle is None for row in rows):
        found.append(
            "an interval of more than a factor of 2 is a range without a middle. "
            "A point on several nodes narrows it most."
        )
    return found
