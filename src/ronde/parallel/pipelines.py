"""The idle time of pipeline schedules, and the division of layers into stages.

A forward pass is assumed to take one unit of time, a backward pass two, messages none.

Source: Huang et al. 2019 (arXiv:1811.06965) for GPipe; Narayanan et al. 2021
(arXiv:2104.04473) for 1F1B and its interleaved form.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from ronde.errors import UsageError


class ScheduleName(StrEnum):
    """Pipeline schedules, by torch's names."""

    GPIPE = "GPipe"
    ONE_F_ONE_B = "1F1B"
    INTERLEAVED = "Interleaved1F1B"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline schedule with its numbers of ranks, microbatches and chunks.

    Raises:
        UsageError: The sizes do not fit the schedule.
    """

    schedule: ScheduleName
    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1  # Stages of each rank.

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches", "num_chunks"):
            if getattr(self, name) < 1:
                got = getattr(self, name)
                raise UsageError(f"{name} must be at least 1, got {got}.")
        if self.schedule is not ScheduleName.INTERLEAVED:
            if self.num_chunks > 1:
                raise UsageError(
                    f"num_chunks must be 1 with schedule {self.schedule}, got "
                    f"{self.num_chunks}. Use {ScheduleName.INTERLEAVED} for more."
                )
        elif self.num_microbatches % self.num_ranks:
            raise UsageError(
                f"num_microbatches must be a multiple of num_ranks, {self.num_ranks}, "
                f"with schedule {self.schedule}, got {self.num_microbatches}."
            )

    @property
    def idle_share(self) -> float:
        """The theoretical share of a step's time in which a rank is idle."""
        p, m, v = self.num_ranks, self.num_microbatches, self.num_chunks
        return (p - 1) / (v * m + p - 1)


def cut_evenly(costs: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """Divide layers into consecutive stages so that the largest stage cost is minimal.

    Every stage has at least one layer.

    Raises:
        UsageError: There are fewer layers than stages.
    """
    if len(costs) < num_stages:
        raise UsageError(
            f"each stage needs at least one layer, got {len(costs)} layers for "
            f"{num_stages} stages. Cut the model into more layers, or use fewer stages."
        )
    sums = [0.0, *accumulate(costs)]
    # For each stage, lists indexed by the number of layers up to its end.
    largest = [sums]
    starts: list[list[int]] = []
    for stage in range(1, num_stages):
        found = [
            min(
                (max(largest[-1][start], sums[stop] - sums[start]), start)
                for start in range(stage, stop)
            )
            if stop > stage
            else (math.inf, 0)
            for stop in range(len(sums))
        ]
        largest.append([cost for cost, _ in found])
        starts.append([start for _, start in found])
    stages, stop = list[range](), len(costs)
    for begins in reversed(starts):
        stages.append(range(begins[stop], stop))
        stop = begins[stop]
    return (range(stop), *reversed(stages))
