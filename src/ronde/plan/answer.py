"""Predicted and measured speeds, and the parts of a step that bind."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ronde.plan.posterior import Forecast, Posterior
from ronde.plan.priors import load_priors
from ronde.plan.setup import Setup, Size
from ronde.plan.step import PARTS
from ronde.units import counted

_LEAST_SAVED = 0.03  # of a step; below it computing binds
_AS_MUCH = 0.9  # of the largest saving
_LEAST_PART = 1e-3  # of a step; smaller parts cannot bind
_WIDEST, _LINEAR, _FARTHEST = 2.0, 1.03, 64
_CONTRADICTION = 1.2


class Between(NamedTuple):
    """A figure with its 80 % interval; without a middle if that is wide."""

    low: float
    middle: float | None
    high: float

    def times(self, factor: float) -> "Between":
        middle = None if self.middle is None else self.middle * factor
        return Between(self.low * factor, middle, self.high * factor)

    def inverse(self, of: float) -> "Between":
        middle = None if self.middle is None else of / self.middle
        return Between(of / self.high, middle, of / self.low)


class SpeedRow(NamedTuple):
    """The speed of all ranks at a size, and its reasons."""

    size: Size
    speed: Between  # units per second
    step: Between  # seconds
    efficiency: float | None  # by the smallest measured size
    parts_s: Mapping[str, float]
    binds: tuple[str, ...]
    saved_s: Mapping[str, float]  # of a step, if a part cost nothing
    is_measured: bool = False


def answer(posterior: Posterior, sizes: Iterable[Size]) -> list[SpeedRow]:
    """Predict the speed at sizes, and show those that were measured beside them."""
    measured = {p.size: p.units_per_s for p in posterior.setup.points}
    every = sorted({*measured, *sizes}, key=lambda size: size.order)
    return [_row_of(posterior, size, measured.get(size)) for size in every]


def _row_of(posterior: Posterior, size: Size, measured: float | None) -> SpeedRow:
    found, base = posterior.predict(size), posterior.setup.points[0]
    speed = Between(found.low, found.middle, found.high)
    if found.high > _WIDEST * found.low:
        speed = speed._replace(middle=None)
    if measured is not None:
        speed = Between(measured, measured, measured)
    step = speed.inverse(posterior.setup.units(size))
    efficiency = None
    if speed.middle is not None:
        of_base = base.units_per_s / base.size.num_ranks
        efficiency = speed.middle / size.num_ranks / of_base
    # The parts of the model's step shall add up to the step that is shown.
    whole_s = sum(found.parts_s.values())
    scale = 1.0 if step.middle is None else step.middle / whole_s
    binds, saved = binding_parts(posterior, found)
    saved = {name: scale * saved_s for name, saved_s in saved.items()}
    parts = {name: part_s * scale for name, part_s in found.parts_s.items()}
    return SpeedRow(
        size, speed, step, efficiency, parts, binds, saved, measured is not None
    )


def binding_parts(
    posterior: Posterior, found: Forecast
) -> tuple[tuple[str, ...], dict[str, float]]:
    """Return the parts of a step that bind, and the seconds that each costs.

    A part binds if a step without it is the fastest, within 10 %.
    """
    whole_s = sum(found.parts_s.values())
    saved = {
        name: max(0.0, found.step_s - posterior.predict(found.size, free=name).step_s)
        for name in PARTS[1:]
        if found.parts_s[name] > _LEAST_PART * whole_s
    }
    most = max(saved.values(), default=0.0)
    if most <= _LEAST_SAVED * found.step_s:
        return PARTS[:1], saved
    return tuple(n for n, s in saved.items() if s >= _AS_MUCH * most), saved


def contradiction_of(posterior: Posterior) -> str:
    """Return a sentence if the given bytes take longer than the given step, else ""."""
    times = posterior.contradiction
    if times < _CONTRADICTION:
        return ""
    ranks = counted(posterior.setup.points[0].size.num_ranks, "rank")
    return (
        f"speeds and bytes must agree, but the bytes of {ranks} alone take {times:.3g} "
        "times the given step. Correct the parameters, batch, unit or links."
    )


def warnings_of(setup: Setup, rows: Sequence[SpeedRow]) -> Iterable[str]:
    """Yield sentences on doubtful points, and on predictions that go too far."""
    for n, row in ((row.size.num_ranks, row) for row in rows if row.is_measured):
        if row.efficiency and row.efficiency > _LINEAR:
            yield (
                f"{n} ranks are faster than linear, {row.efficiency:.0%}. Look for a "
                "cache, another batch, clock or container; such points mislead."
            )
    most, last = setup.points[-1].size.num_ranks, rows[-1].size.num_ranks
    if last > _FARTHEST * most:
        yield f"{last:,} ranks are over {_FARTHEST} times the largest given, {most}."
    most_gb, cluster = load_priors().unknowns["tcp_gb_per_s"].middle, setup.cluster
    if cluster.transport == "tcp" and (cluster.node_gbit_per_s or 0) > 8 * most_gb:
        yield (
            f"TCP is taken to bring a node {most_gb:.1f} GB/s, so that a faster line "
            "gains nothing: see --transport rdma."
        )
    if any(row.speed.middle is None for row in rows):
        yield "No middle stands where the interval is wider than a factor of 2."
