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
    """How much is tried to find a fusion threshold, and where to log it."""

    amount: TuningOptions = field(default_factory=TuningOptions)
    log: TuningLog | None = None


class FusionTuning:
    """Tries fusion thresholds; on the root of a process set's coordinators alone.

    A step of a program that names its tensors ends when a name comes again. What it
    costs is its seconds a byte, so that steps of unequal size can be compared:
    Horovod's score, upside down. ``change`` is called with each new threshold.
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
        return self._tuner.is_over

    def ran(self, names: Sequence[str], num_bytes: int, now_s: float) -> None:
        """Note operations that were carried out together, over by ``now_s``."""
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
        tuner = self._tuner
        before, num_samples = tuner.setting, len(tuner.samples)
        tuner.feed(seconds / num_bytes)
        if len(tuner.samples) > num_samples:
            sample = tuner.samples[-1]
            self._write(sample.phase, sample.setting, sample.cost)
            if tuner.is_over:
                self._write("best", tuner.setting, tuner.best_cost)
        if tuner.setting != before:
            self._change(tuner.setting)

    def _write(self, phase: str, threshold_bytes: int, cost: float | None) -> None:
        if self._log is not None:
            columns = {"tensor_fusion_threshold": threshold_bytes}
            self._log.add("fusion", phase, columns, cost)
