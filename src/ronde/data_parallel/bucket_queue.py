"""All gradients of a reducer, started strictly one after the other.

Note [What the first bucket tells]
    A rank that has joined (Horovod's ``join``) adds nothing any more, but every bucket
    needs it. So it keeps up with the rounds of the others, each of which begins with
    the same bucket, whatever is trained. That one ends with notes, ones on every rank
    that is still training and zeros on those that only keep up. Their sums tell:

        0     whether anybody is left; if not, nobody runs the rest of the round
        1     whether no gradient is new; if one is, all plan anew after the round
        2     how many have joined: here they put the one, and the others zero
        3-5   at which step they are: see ``step_check``
        6...  which other buckets, then which sparse gradients, are reduced at all: what
              is frozen is left out

    Ranks that train know all but the third and the steps. They look at the third where
    it costs nothing; it matters for gradients that are added to after their reduction:
    see ``Scaling``.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from itertools import compress, count

from ronde.collectives import Communicator
from ronde.coordination.waits import Waits
from ronde.data_parallel.bucket_reduction import BucketReduction
from ronde.data_parallel.bucket_tuning import candidate_limits
from ronde.data_parallel.buckets import Bucket, BucketLimits, GradientSpec, plan_buckets
from ronde.data_parallel.gradient import Gradient, Scaling
from ronde.data_parallel.gradient_bucket import GradientBucket
from ronde.data_parallel.resumable import Steps, aside
from ronde.data_parallel.sparse_gradients import SparseGradients
from ronde.data_parallel.step_check import NUM_MARKS, StepCheck

Launch = Callable[[GradientBucket], None]
_SETTLED, _JOINED, _STEPS = 1, 2, 3
_NUM_OWN_NOTES = _STEPS + NUM_MARKS


class Others(Enum):
    """What the other ranks did in a round that this one only kept up with."""

    HAVE_JOINED = auto()
    WENT_ON = auto()
    HAVE_NEWCOMERS = auto()


class BucketQueue:
    """The buckets in the order in which every rank starts them, then what is sparse.

    A bucket that is full waits for those before it: the ranks' collectives must meet.

    Args:
        gradients: All gradients, planned or not; the list may grow.
        limits: Bucket sizes.
        groups: Indices of gradients that must share a bucket.
        communicator: Reduces the buckets, and allocates them.
        waits: Those of this process; None where there are none.

    Attributes:
        num_rounds: Rounds that any rank added something to; equal on all ranks.
        steps: Whether they are at the same step.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        limits: BucketLimits,
        groups: Sequence[Sequence[int]],
        communicator: Communicator,
        waits: Waits | None,
    ) -> None:
        self._communicator = communicator
        self._waits = waits
        self._gradients = gradients
        self._limits = limits
        self._groups = groups
        self._buckets: list[GradientBucket] = []
        self._bucket_of: dict[int, GradientBucket] = {}
        self._order: list[int] = []
        self._sparse = SparseGradients((), communicator)
        self._next = 0
        self.num_rounds = 0
        self.steps = StepCheck()

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def limits(self) -> BucketLimits:
        """The sizes at which buckets are full."""
        return self._limits

    @property
    def order(self) -> Sequence[int]:
        """The planned gradients, in the order in which they are reduced."""
        return self._order

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing from this round any more."""
        is_all_launched = self._next == len(self._buckets)
        return is_all_launched and not self._sparse.num_pending

    def bucket_of(self, index: int) -> GradientBucket | None:
        """Return the home of a gradient; None for a sparse one and a newcomer."""
        return self._bucket_of.get(index)

    def newcomers(self) -> list[int]:
        """Return the gradients that are to be reduced and are not planned yet."""
        return [
            index
            for index, gradient in enumerate(self._gradients)
            if gradient.parameter.requires_grad and not gradient.is_planned
        ]

    def rearrange(self, order: Sequence[int]) -> Steps[None]:
        """Plan anew along ``order``; collective.

        Planned gradients that it leaves out come last.
        """
        rest = sorted(set(self._order) - set(order), reverse=True)
        self._order = [*order, *rest]
        specs = self._specs()
        sparse = [i for i in self._order if self._gradients[i].sparse_dims]
        plans = plan_buckets(specs, self._dense(), self._limits, self._groups)
        if sparse and not plans:
            plans = (Bucket((), 0, specs[sparse[0]].kind),)  # for the notes
        self._sparse = SparseGradients(
            [self._gradients[i] for i in sparse], self._communicator
        )
        yield from self._allocate(plans)

    def candidates(self) -> list[BucketLimits]:
        """Return the limits that there are, and those that lead to other buckets."""
        return candidate_limits(
            self._specs(), self._dense(), self._limits, self._groups
        )

    def resize(self, limits: BucketLimits) -> Steps[None]:
        """Plan anew for other limits, if they are others; collective."""
        if limits != self._limits:
            self._limits = limits
            yield from self.rearrange(self._order)

    def _dense(self) -> list[int]:
        return [i for i in self._order if not self._gradients[i].sparse_dims]

    def _specs(self) -> list[GradientSpec]:
        return [_spec(gradient) for gradient in self._gradients]

    def _allocate(self, plans: Sequence[Bucket]) -> Steps[None]:
        num_notes = _NUM_OWN_NOTES + len(plans) - 1 + len(self._sparse.gradients)

        def allocate() -> list[GradientBucket]:
            return [
                GradientBucket.allocate(
                    plan,
                    self._gradients,
                    self._communicator,
                    num_notes=0 if place else num_notes,
                )
                for place, plan in enumerate(plans)
            ]

        self._buckets = yield from aside(self._waits, allocate)
        self._bucket_of = {}
        for bucket, plan in zip(self._buckets, plans, strict=True):
            bucket.adopt()
            for slot in plan.slots:
                self._bucket_of[slot.index] = bucket

    def open(self, *, has_newcomers: bool = False) -> None:
        """Begin a round."""
        for bucket in self._buckets:
            bucket.open()
        self._next = 0
        if self._buckets:
            self._buckets[0].silent = self._silent(has_newcomers=has_newcomers)

    def _silent(self, *, has_newcomers: bool) -> list[int]:
        sparse = [g.parameter for g in self._sparse.gradients]
        frozen = [bucket.is_launched for bucket in self._buckets[1:]]
        frozen += [not parameter.requires_grad for parameter in sparse]
        silent = [_JOINED, *compress(count(_NUM_OWN_NOTES), frozen)]
        silent += [_STEPS + i for i in range(NUM_MARKS) if i != self.steps.mark]
        return [_SETTLED, *silent] if has_newcomers else silent

    def launch_full(self, launch: Launch) -> None:
        """Start the buckets that wait for nothing and nobody before them."""
        while self._next < len(self) and not self._buckets[self._next].num_pending:
            launch(self._buckets[self._next])
            self._next += 1

    def launch_rest(self, launch: Launch) -> None:
        """Start all that is left, with zeros for what is missing."""
        for bucket in self._buckets[self._next :]:
            launch(bucket)
        self._next = len(self._buckets)

    def finish(self, scaling: Scaling) -> Steps[bool]:
        """Wait for all; say whether backward added to one that was under way.

        Raises:
            CollectiveError: A sum failed, or ranks are at different steps.
        """
        for bucket in self._buckets:
            yield from bucket.works()
            bucket.advance()

        def keep() -> float:
            return scaling.without(self._buckets[0].count(_JOINED)).keep

        is_late = False
        for bucket in self._buckets:
            yield from bucket.works()
            is_late |= bucket.finish(scaling, keep)
        yield from self._sparse.reduce(scaling, self._waits)
        if self._buckets:
            self.num_rounds += 1
            self.steps.check(self._buckets[0].notes[_STEPS:_NUM_OWN_NOTES])
        return is_late

    def num_joined(self) -> int:
        """Return how many ranks only kept up with the last round.

        On an accelerator 0, since it would have to be waited for.
        """
        is_near = bool(self._buckets) and self._buckets[0].notes.is_cpu
        return self._buckets[0].count(_JOINED) if is_near else 0

    def keep_up(self, scaling: Scaling, reduction: BucketReduction) -> Others:
        """Take part in a round of the others without adding anything; collective."""
        self.open()
        first, *others = self._buckets
        first.silent = (_JOINED,)
        first.launch_nothing(self._communicator, scaling, reduction)
        notes = first.read_notes()
        is_anyone_left, is_settled = notes[:2]
        are_reduced = [bool(note) for note in notes[_NUM_OWN_NOTES:]]
        if not is_anyone_left:
            first.pending = None
            return Others.HAVE_JOINED
        for bucket in compress(others, are_reduced):
            bucket.launch_nothing(self._communicator, scaling, reduction)
        for bucket in self._buckets:
            bucket.advance()
        for bucket in self._buckets:
            bucket.drop()
        self._sparse.reduce_nothing(are_reduced[len(others) :])
        self.num_rounds += 1
        return Others.WENT_ON if is_settled else Others.HAVE_NEWCOMERS


def _spec(gradient: Gradient) -> GradientSpec:
    parameter = gradient.parameter
    kind = (parameter.dtype, parameter.device)
    return GradientSpec(parameter.numel(), parameter.element_size(), kind)
