"""What a round's control flags are checked for: equal steps and equal weights.

Note [Control flags]
    A rank that has joined (Horovod's ``join``) participates with zeros in the rounds of
    the others, each of which begins with the same bucket, whatever is trained. That one
    ends with flags, ones on every rank that is still training and zeros on those that
    only participate. Their sums show:

        0     whether anybody is left; if not, nobody runs the rest of the round
        1     whether no parameter is new; if one is, all plan anew after the round
        2     how many have joined: here they put the one, and the others zero
        3-5   at which step they are: see ``StepCheck``
        6...  which other buckets, then which sparse gradients, are reduced at all: what
              is frozen is left out
        last  whether weights differ, 32 flags, zeros in most rounds: see Note [How
              drift is found] in ``ronde.drift``

    Ranks that train look at the third where it costs nothing; it matters for gradients
    that are added to after their reduction: see ``Scaling``.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from torch import Tensor

from ronde.data_parallel.buckets import Gradient, GradientBucket
from ronde.data_parallel.group import ReducerGroup, Steps, aside
from ronde.drift import (
    NUM_FLAGS,
    Background,
    DriftCheck,
    FlagReader,
    is_apart,
    sum_of_words,
)
from ronde.errors import CollectiveError

SETTLED, JOINED, _STEPS = 1, 2, 3
_NUM_STEP_FLAGS = 3
NUM_OWN_FLAGS = _STEPS + _NUM_STEP_FLAGS


class StepCheck:
    """Finds ranks that ran backward unequally often between two optimizer steps.

    Each rank that trains sets one of three flags, that of its steps modulo three. More
    than one sum that is not zero: a round has added up gradients of different steps.
    """

    def __init__(self) -> None:
        self.num_steps = 0  # that this rank took since all ranks began to count

    @property
    def flag(self) -> int:
        return self.num_steps % _NUM_STEP_FLAGS

    @staticmethod
    def check(sums: Sequence[float], flag: int) -> None:
        """Raise on all ranks, where a round's flags show that their steps differ."""
        counts = list(map(round, sums))
        if counts.count(0) == _NUM_STEP_FLAGS - 1:
            return
        # Behind in steps is who ran more backward passes before this one.
        behind = next(i for i in range(_NUM_STEP_FLAGS) if counts[i] and counts[i - 2])
        this = "including this one" if flag == behind else "not on this one"
        raise CollectiveError(
            "Gradients were computed more than backward_passes_per_step times before "
            f"call to step() on {counts[behind]} of {sum(counts)} ranks, {this}. All "
            "ranks must call backward() equally often before each step(). Skip the "
            "extra passes, or accumulate them with a larger backward_passes_per_step."
        )


class RoundChecks:
    """Writes and reads those flags, from one round to the next."""

    def __init__(self, drift: str) -> None:
        """Begin; ``drift`` is the mode of a ``DriftCheck``."""
        self.steps, self.drift = StepCheck(), DriftCheck(drift)
        self._is_drift_sought = drift != "off"
        self._did_begin_equal: bool | None = None
        self._reader = FlagReader()
        self._has_sums = True  # of drift, in the first bucket's memory

    def restart(self) -> None:
        """Begin again on all ranks, that took unequally many steps."""
        self.steps, self._reader = StepCheck(), FlagReader()
        self.drift.restart()

    def sum_at_begin(self, parameters: Iterable[Tensor]) -> int | None:
        """Return the checksum of all weights, the first time."""
        if self._did_begin_equal is not None or not self._is_drift_sought:
            return None
        return sum(map(sum_of_words, parameters))

    def note_begin(self, sums: Sequence[int | None]) -> None:
        """Note the checksums of all ranks."""
        if self._did_begin_equal is None:
            self._did_begin_equal = len(set(sums)) == 1

    @property
    def odd(self) -> list[int]:
        """Flags that are zero here."""
        return [_STEPS + i for i in range(_NUM_STEP_FLAGS) if i != self.steps.flag]

    def write(self, bucket: GradientBucket) -> None:
        """Write the flags of what the last step's look has found."""
        looked = self.drift.take_flags()
        if looked is not None:
            bucket.drift.copy_(looked)
        elif self._has_sums:  # of the round before
            bucket.drift.zero_()

    def check(
        self,
        bucket: GradientBucket,
        group: ReducerGroup,
        gradients: Sequence[Gradient],
        ranks: tuple[int, ...],
        *,
        has_joined: bool,
    ) -> Steps[None]:
        """Raise where steps differ; report weights that do. Collective if any do.

        ``ranks`` are the group's among all, or empty for all.
        """
        found = self._reader.read(bucket.all_flags, self.steps.flag)
        if found is None:
            return
        sums, step = found
        if not has_joined:
            self.steps.check(sums[_STEPS:NUM_OWN_FLAGS], step)
        drift = sums[-NUM_FLAGS:]
        self._has_sums = not bucket.all_flags.is_cpu or any(drift)
        if is_apart(drift):
            named = [(gradient.name, gradient.parameter) for gradient in gradients]
            known = Background(
                ranks, not has_joined, self._did_begin_equal, is_reducing=True
            )
            report = partial(self.drift.report, group.communicator, named, known)
            yield from aside(group.waits, report)
