"""Search for the setting with the least cost, never worse than the default.

Note [The choice of a setting]
    A *sample* is the median cost of some steps with one setting, without the first step
    after a change. After a warm-up every candidate gets a sample; then the better half
    gets another one, and so on, until one is left or the samples are used up.

    The winner may have been lucky. So it is compared with the default in pairs of
    samples, in alternating order, and must be cheaper by ``min_gain`` in all pairs but
    one; else the default stays.
"""

import csv
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Generic, NamedTuple, TypeVar

from ronde.errors import UsageError

S = TypeVar("S", bound=Hashable)


class TuningLog:
    """A CSV file of samples and of the tuners' choices; the score is 1 / cost."""

    COLUMNS: tuple[str, ...] = (
        "tuned",
        "phase",
        "first_bucket_bytes",
        "bucket_bytes",
        "tensor_fusion_threshold",
        "score",
    )

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("w", newline="") as file:
            csv.writer(file).writerow(self.COLUMNS)

    def add(
        self, tuned: str, phase: str, setting: Mapping[str, int], cost: float | None
    ) -> None:
        """Append a row; the tuner's choice has the phase ``best``."""
        score = f"{1.0 / cost:.6g}" if cost else ""
        row = {"tuned": tuned, "phase": phase, "score": score, **setting}
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self.COLUMNS, restval="").writerow(row)


@dataclass(frozen=True, slots=True)
class TuningOptions:
    """The settings of a search. All but the log must be equal on all ranks."""

    warmup_samples: int = 3  # samples of the default, discarded
    steps_per_sample: int = 10
    max_samples: int = 20  # of the search, without warm-up and final comparison
    num_pairs: int = 6  # of samples in the final comparison
    min_gain: float = 0.03  # part of the default's cost that a winner must save, 0 to 1
    log: TuningLog | None = None  # of rank 0

    def __post_init__(self) -> None:
        least = {"warmup_samples": 0, "steps_per_sample": 1, "max_samples": 1}
        for name, limit in (least | {"num_pairs": 3}).items():
            if (value := getattr(self, name)) < limit:
                raise UsageError(f"{name} must be >= {limit}, got {value}.")
        if not 0.0 <= self.min_gain < 1.0:
            raise UsageError(f"min_gain must be >= 0 and < 1, got {self.min_gain}.")

    @property
    def num_fed(self) -> int:
        """The number of steps between possible changes of the setting."""
        return self.steps_per_sample + 1


class Sample(NamedTuple, Generic[S]):
    """A measured cost of a setting."""

    phase: str  # ``warmup``, ``search`` or ``final``
    setting: S
    cost: float  # the median over the steps, in the unit of ``Tuner.feed``


class Tuner(Generic[S]):
    """Chooses the setting of the next step: see Note [The choice of a setting].

    The first candidate is the default. Once ``is_over``, ``setting`` is the choice.
    In the log, ``name`` stands for the tuner and ``columns`` for its settings.
    """

    def __init__(
        self,
        candidates: Sequence[S],
        options: TuningOptions,
        name: str,
        columns: Callable[[S], Mapping[str, int]],
    ) -> None:
        self._options, self._name, self._columns = options, name, columns
        self._costs: list[float] = []
        self.samples: list[Sample[S]] = []
        self.is_over = False
        self._course = self._run(candidates)
        self._phase, self.setting = "search", candidates[0]
        self._advance(None)

    def feed(self, cost: float) -> None:
        """Record the cost of the last step."""
        self._costs.append(cost)
        if len(self._costs) == self._options.num_fed:
            # The first step after a change pays for it.
            sample = Sample(self._phase, self.setting, median(self._costs[1:]))
            self._costs = []
            self.samples.append(sample)
            self._note(sample.phase, sample.setting, sample.cost)
            self._advance(sample.cost)

    @property
    def best_cost(self) -> float | None:
        """The median cost of ``setting`` after the warm-up; None without samples."""
        counted = [s for s in self.samples if s.phase != "warmup"]
        costs = [s.cost for s in counted if s.setting == self.setting]
        return median(costs) if costs else None

    def _advance(self, cost: float | None) -> None:
        try:
            # None starts the generator.
            self._phase, self.setting = self._course.send(cost)  # pyright: ignore[reportArgumentType]
        except StopIteration as end:
            self.is_over, self.setting = True, end.value
            self._note("best", self.setting, self.best_cost)

    def _note(self, phase: str, setting: S, cost: float | None) -> None:
        if self._options.log is not None:
            self._options.log.add(self._name, phase, self._columns(setting), cost)

    def _run(self, candidates: Sequence[S]) -> Generator[tuple[str, S], float, S]:
        default = candidates[0]
        if len(candidates) == 1:
            return default
        for _ in range(self._options.warmup_samples):
            yield "warmup", default
        budget = self._options.max_samples
        left = list(candidates[:budget])
        costs: dict[S, list[float]] = {candidate: [] for candidate in left}
        while len(left) > 1 and budget >= len(left):
            for candidate in left:
                costs[candidate].append((yield "search", candidate))
            budget -= len(left)
            left.sort(key=lambda candidate: median(costs[candidate]))
            del left[(len(left) + 1) // 2 :]
        winner, num_lost = left[0], 0
        for number in range(self._options.num_pairs if winner != default else 0):
            pair: dict[S, float] = {}
            for setting in (winner, default) if number % 2 else (default, winner):
                pair[setting] = yield "final", setting
            num_lost += pair[winner] >= (1.0 - self._options.min_gain) * pair[default]
            if num_lost > 1:
                return default
        return winner
