"""The spread of single iterations' times; pure, and without torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """Times of single iterations, and what sums them up.

    Attributes:
        times_us: The greatest over all ranks, by iteration, the skipped ones too.
        rank_times_us: By rank and iteration.
        num_skipped: Iterations at the beginning that the figures leave out.
    """

    times_us: tuple[float, ...]
    rank_times_us: tuple[tuple[float, ...], ...]
    num_skipped: int = 0

    @classmethod
    def of_ranks(
        cls, rank_times_us: Sequence[Sequence[float]], num_skipped: int
    ) -> "IterationTimes":
        """Take the slowest rank of each iteration."""
        columns = zip(*rank_times_us, strict=True)
        return cls(
            tuple(max(column) for column in columns),
            tuple(tuple(times) for times in rank_times_us),
            num_skipped,
        )

    @property
    def _sorted(self) -> list[float]:
        return sorted(self.times_us[self.num_skipped :])

    @property
    def min_us(self) -> float:
        """The fastest."""
        return self._sorted[0]

    @property
    def max_us(self) -> float:
        """The slowest."""
        return self._sorted[-1]

    @property
    def mean_us(self) -> float:
        """The mean."""
        return sum(self._sorted) / len(self._sorted)

    @property
    def median_us(self) -> float:
        """The middle one; of an even number the upper, as nccl-tests takes it."""
        return self._sorted[len(self._sorted) // 2]

    @property
    def deviation_us(self) -> float:
        """The deviation of the population."""
        mean = self.mean_us
        return math.sqrt(sum((t - mean) ** 2 for t in self._sorted) / len(self._sorted))

    @property
    def variation_percent(self) -> float:
        """The deviation in percent of the mean."""
        return 100 * self.deviation_us / self.mean_us if self.mean_us else 0.0

    def percentile_us(self, percent: int) -> float:
        """Return the time that ``percent`` of the iterations do not exceed."""
        times = self._sorted
        return times[max(0, math.ceil(percent / 100 * len(times)) - 1)]
