"""Priors of the unknowns of a step, read from the data file beside this module.

``scripts/fit_priors.py`` writes the file; ``docs/plan.md`` explains it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Draws = NDArray[np.float64]
_SHARES = ("leak", "leak_sharded", "launch")  # at most 1
_FILE = Path(__file__).with_name("priors.json")
QUANTILE_90 = 1.2816
"""The quantile 90 % of a standard normal distribution."""
SITUATIONS = ("inside", "across", "beyond")
"""A prediction for one node; for several if none or if one such speed is known."""


class Prior(NamedTuple):
    """A log-normal distribution: its median, and its 90 % quantile over the median."""

    middle: float
    ratio: float

    @property
    def deviation(self) -> float:
        """The standard deviation of the logarithm."""
        return math.log(self.ratio) / QUANTILE_90


@dataclass(frozen=True)
class Priors:
    """Distributions of the unknowns of a step, and of the model's errors."""

    unknowns: Mapping[str, Prior]
    flat: float  # probability of a flat ring, else two levels
    ring_latency: float  # of latency that grows with the ranks, up to 12 lg n messages
    servers_on_all: float  # of parameter servers on all nodes, else a fixed number
    error: float  # standard deviation of a measured log speed
    walk: float  # the same of the model, a doubling of the ranks
    crossing: float  # doublings that the step to several nodes counts as
    widening: Mapping[str, float]  # of an interval of 80 %, by situation

    def values(self, z: Draws) -> dict[str, Draws]:
        """Return draws of the unknowns from standard normal draws, a column each."""
        found: dict[str, Draws] = {}
        for index, (name, prior) in enumerate(self.unknowns.items()):
            drawn = prior.middle * np.exp(prior.deviation * z[:, index])
            found[name] = np.minimum(drawn, 1.0) if name in _SHARES else drawn
        return found


@cache
def load_priors() -> Priors:
    """Return the priors of this version of ronde."""
    content = json.loads(_FILE.read_text(encoding="utf-8"))
    unknowns = {name: Prior(*pair) for name, pair in content["unknowns"].items()}
    return Priors(unknowns=unknowns, **content["others"])
