"""Hours, money and energy of a training, from speeds and the user's prices."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.plan.answer import Between, SpeedRow
from ronde.plan.facts import number_from, require_known

_PUE = 1.3  # power of the building by that of the ranks
_KNEE = 1.5  # the least gain of speed from twice the ranks
_PRICES = (
    *("usd_per_rank_hour", "usd_per_node_hour", "usd_per_kwh"),
    *("watts_per_rank", "pue"),
)


class Cost(NamedTuple):
    """The cost of a training on a number of ranks."""

    row: SpeedRow
    figures: Mapping[str, Between]  # hours, and as far as prices are known the others
    unused_dollars: float | None = None  # of the bill, what lost efficiency costs
    marks: tuple[str, ...] = ()


def read_prices(texts: Mapping[str, str], where: str) -> dict[str, float]:
    require_known(texts, _PRICES, where)
    if {*_PRICES[:2]} <= texts.keys():
        raise UsageError(
            f"{where} must have {_PRICES[0]} or {_PRICES[1]}, got both. Drop one."
        )
    try:
        return {key: number_from(key == "pue")(text) for key, text in texts.items()}
    except UsageError as error:
        raise UsageError(f"prices in {where} {error}") from None


def costs_of(
    rows: Sequence[SpeedRow], prices: Mapping[str, float], samples: float, units: float
) -> list[Cost]:
    """Return the cost of training on so many samples, of so many units, by row."""
    costs = [_cost_of(row, prices, samples, units) for row in rows]
    dollars = [c.figures["dollars"].middle for c in costs if "dollars" in c.figures]
    least = min((usd for usd in dollars if usd is not None), default=None)
    knee = next((a.size for a, b in pairwise(rows) if _is_knee(a, b)), None)
    for i, (row, figures, _, _) in enumerate(costs):
        is_least = least is not None and figures["dollars"].middle == least
        marks = *["least"] * is_least, *["knee"] * (row.size == knee)
        costs[i] = costs[i]._replace(marks=marks)
    return costs


def _cost_of(
    row: SpeedRow, prices: Mapping[str, float], samples: float, units: float
) -> Cost:
    price = {key: prices.get(key, 0.0) for key in _PRICES}
    size, hours = row.size, row.speed.inverse(samples * units / 3600)
    figures, unused = {"hours": hours}, None
    kw = price["watts_per_rank"] * size.num_ranks / 1e3 * prices.get("pue", _PUE)
    usd = price["usd_per_rank_hour"] * size.num_ranks + price["usd_per_kwh"] * kw
    usd += price["usd_per_node_hour"] * size.num_nodes
    if usd:
        dollars = figures["dollars"] = hours.times(usd)
        figures["$ a million"] = dollars.times(1e6 / samples)
        if dollars.middle is not None and row.efficiency is not None:
            unused = dollars.middle * max(0.0, 1 - row.efficiency)
    if kw:
        figures["kWh"] = hours.times(kw)
        figures["J a sample"] = hours.times(kw * 3.6e6 / samples)
    return Cost(row, figures, unused)


def _is_knee(row: SpeedRow, following: SpeedRow) -> bool:
    """Return True if twice the ranks bring under 1.5 times the speed."""
    if row.speed.middle is None or following.speed.middle is None:
        return False
    doublings = math.log2(following.size.num_ranks / row.size.num_ranks)
    gain = following.speed.middle / row.speed.middle
    return math.log2(gain) < doublings * math.log2(_KNEE)
