"""Priors of the unknowns of a step, fitted to published speeds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ronde.plan.step import Draws

_TO_80 = 1.2816


class Prior(NamedTuple):
    """A log-normal distribution: its median, and the ratio of its 90 % quantile."""

    middle: float
    ratio: float


_HAND = {
    "rdma_share": Prior(0.6, 1.5),
    "tcp_gb_per_s": Prior(2.2, 3.4 / 2.2),
    "nvlink_share": Prior(0.67, 1.05 / 0.67),
    "pcie_gb_per_s": Prior(5.0, 1.5),
    "alpha_rdma": Prior(2.1, 3.3 / 2.1),
    "alpha_tcp": Prior(6.3, 9.8 / 6.3),
    "window": Prior(0.67, 1.4),
    "leak": Prior(0.3, 2.2),
    "leak_sharded": Prior(0.2, 2.5),
    "host": Prior(0.040, 2.1),
    "growth": Prior(0.007, 2.1),
    "launch": Prior(0.022, 1.9),
    "update": Prior(0.014, 3.2),
    "server": Prior(1.75, 1.36),
    "interference": Prior(0.2, 2.0),
    "fit": Prior(1.0, 1.066),
    "missing_between": Prior(0.042, 7.6),
    "missing_inside": Prior(0.016, 2.4),
}


@dataclass(frozen=True)
class Priors:
    unknowns: Mapping[str, Prior] = field(default_factory=lambda: dict(_HAND))
    flat: float = 0.91
    ring_latency: float = 0.86
    servers_on_all: float = 0.9
    error: float = 0.004
    walk: float = 0.01
    crossing: float = 3.0
    widening: Mapping[str, float] = field(
        default_factory=lambda: {"inside": 1.2, "across": 1.2, "beyond": 1.6}
    )

    @property
    def names(self) -> list[str]:
        return list(self.unknowns)

    def values(self, z: Draws) -> Mapping[str, Draws]:
        found = {}
        for index, (name, prior) in enumerate(self.unknowns.items()):
            drawn = prior.middle * np.exp(np.log(prior.ratio) / _TO_80 * z[:, index])
            found[name] = np.minimum(drawn, 1.0) if name.startswith("leak") else drawn
        return found
