"""Hours, money and energy of a training, from speeds and the user's prices."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.plan.answer import Between, Row
from ronde.plan.facts import number_from, require_known

_KNEE = 1.5  # the least gain of speed from twice the ranks
_JOULES = 3.6e6  # of a kWh


@dataclass(frozen=True, slots=True)
class Prices:
    """The user's prices; None for unknown ones."""

    usd_per_rank_hour: float | None = None
    usd_per_node_hour: float | None = None
    watts_per_rank: float | None = None
    pue: float = 1.3  # power of the building by that of the ranks
    usd_per_kwh: float = 0.0

    @classmethod
    def read(cls, texts: Mapping[str, str], where: str) -> "Prices":
        """Read prices by name; raise ``UsageError`` for a wrong one."""
        values: dict[str, float] = {}
        for key, text in texts.items():
            require_known(key, cls.__slots__, where)
            try:
                values[key] = number_from(float(key == "pue"))(text)
            except UsageError as error:
                raise UsageError(f"{key} in {where} {error}") from None
        return cls(**values)

    def usd_per_hour(self, row: Row) -> float | None:
        """Return the price of an hour of all ranks; None without any price."""
        n, watts = row.size.num_ranks, self.watts_per_rank
        usd = [
            None if self.usd_per_rank_hour is None else self.usd_per_rank_hour * n,
            None
            if self.usd_per_node_hour is None
            else self.usd_per_node_hour * row.size.num_nodes,
            None
            if watts is None or not self.usd_per_kwh
            else watts * n / 1e3 * self.pue * self.usd_per_kwh,
        ]
        known = [each for each in usd if each is not None]
        return sum(known) if known else None


class Cost(NamedTuple):
    """The cost of a training on a number of ranks."""

    row: Row
    hours: Between
    dollars: Between | None
    dollars_a_million: Between | None  # samples
    kwh: Between | None
    joules_a_sample: Between | None
    unused_dollars: float | None  # of the bill, the share that lost efficiency costs
    marks: tuple[str, ...] = ()


def costs_of(
    rows: Sequence[Row], prices: Prices, num_samples: float, units_a_sample: float
) -> list[Cost]:
    """Return the cost of training on so many samples, for each row."""
    costs = [_cost_of(row, prices, num_samples, units_a_sample) for row in rows]
    priced = [(c.dollars.middle, i) for i, c in enumerate(costs) if c.dollars]
    known = [(usd, i) for usd, i in priced if usd is not None]
    least = min(known)[1] if known else -1
    knee = _find_knee(rows)
    return [
        cost._replace(marks=(*["least cost"] * (i == least), *["knee"] * (i == knee)))
        for i, cost in enumerate(costs)
    ]


def _cost_of(
    row: Row, prices: Prices, num_samples: float, units_a_sample: float
) -> Cost:
    hours = row.speed.inverse(num_samples * units_a_sample / 3600)
    usd = prices.usd_per_hour(row)
    kw = None
    if prices.watts_per_rank is not None:
        kw = prices.watts_per_rank * row.size.num_ranks / 1e3 * prices.pue
    dollars = None if usd is None else hours.times(usd)
    kwh = None if kw is None else hours.times(kw)
    unused = None
    if dollars and dollars.middle is not None and row.efficiency is not None:
        unused = dollars.middle * max(0.0, 1 - row.efficiency)
    return Cost(
        row,
        hours,
        dollars,
        dollars and dollars.times(1e6 / num_samples),
        kwh,
        kwh and kwh.times(_JOULES / num_samples),
        unused,
    )


def _find_knee(rows: Sequence[Row]) -> int:
    """Return the first row after which twice the ranks bring too little."""
    for index, (row, following) in enumerate(pairwise(rows)):
        if row.speed.middle is None or following.speed.middle is None:
            continue
        doublings = math.log2(following.size.num_ranks / row.size.num_ranks)
        gain = math.log2(following.speed.middle / row.speed.middle)
        if gain < doublings * math.log2(_KNEE):
            return index
    return -1
