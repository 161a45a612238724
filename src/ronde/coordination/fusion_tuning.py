"""How much to fuse, chosen by measuring what runs anyway."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ronde.tuning import Tuner, TuningLog, TuningOptions

_MIB = 1 << 20
_SIZES = (64 * _MIB, 16 * _MIB, 4 * _MIB, 256 * _MIB, 1 * _MIB, 32 * _MIB, 8 * _MIB, 0)
"""Thresholds to try, the likeliest first; 0 fuses nothing."""
_MOST_NAMES = 1000
"""A step with more names is cut: names that never come again would make it endless."""


@dataclass(frozen=True, slots=True)
class FusionTuningOptions:
    """How a coordinator finds its fusion threshold.

    Attributes:
        amount: How much is tried.
        log: Takes down what was tried, or None.
    """

    amount: TuningOptions = field(default_factory=TuningOptions)
    log: TuningLog | None = None


class FusionTuning:
    """Tries fusion thresholds; on the root of a process set's coordinators alone.

    A step of a program that names its tensors ends when a name comes again. What it
    costs is its seconds a byte, so that steps of unequal size can be compared:
    Horovod's score, upside down.

    Args:
        default_bytes: The threshold so far.
        options: How.
        change: Is told the threshold from now on, whenever it is another one.
    """

    def __init__(
        self,
        default_bytes: int,
        options: FusionTuningOptions,
        change: Callable[[int], None],
    ) -> None:
        others = [size for size in _SIZES if size != default_bytes]
        self._tuner = Tuner([default_bytes, *others], options.amount)
        self._log = options.log
        self._change = change
        self._names: set[str] = set()
        self._num_bytes = 0
        self._begun_s: float | None = None
        self._ended_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the choice is made: nothing is to be told any more."""
        return self._tuner.is_over

    def ran(self, names: Sequence[str], num_bytes: int, now_s: float) -> None:
        """Note that operations were carried out together.

        Args:
            names: Theirs.
            num_bytes: Of their tensors.
            now_s: When they were over, by any clock that does not jump.
        """
        if self.is_over:
            return
        is_full = len(self._names) >= _MOST_NAMES
        if is_full or not self._names.isdisjoint(names):
            self._end_step()
        if self._begun_s is None:
            # Nothing is known of when the very first began: it only marks the time.
            self._begun_s = now_s
        self._names.update(names)
        self._num_bytes += num_bytes
        self._ended_s = now_s

    def _end_step(self) -> None:
        begun_s = self._ended_s if self._begun_s is None else self._begun_s
        seconds, num_bytes = self._ended_s - begun_s, self._num_bytes
        self._begun_s = self._ended_s
        self._names.clear()
        self._num_bytes = 0
        if not num_bytes:
            return
        before, num_samples = self._tuner.setting, len(self._tuner.samples)
        self._tuner.feed(seconds / num_bytes)
        if len(self._tuner.samples) > num_samples:
            self._write()
        if self._tuner.setting != before:
            self._change(self._tuner.setting)

    def _write(self) -> None:
        if self._log is None:
            return
        tuner = self._tuner
        sample = tuner.samples[-1]
        self._log.add("fusion", sample.phase, _column(sample.setting), sample.cost)
        if tuner.is_over:
            self._log.add("fusion", "best", _column(tuner.setting), tuner.best_cost)


def _column(threshold_bytes: int) -> dict[str, int]:
    return {"tensor_fusion_threshold": threshold_bytes}
