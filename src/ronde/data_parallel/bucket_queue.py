"""All buckets of a reducer, started strictly one after the other."""

from collections.abc import Callable, Sequence

from ronde.collectives import Communicator
from ronde.data_parallel.buckets import BucketLimits, GradientSpec, plan_buckets
from ronde.data_parallel.gradient import Gradient, Scaling
from ronde.data_parallel.gradient_bucket import GradientBucket

Launch = Callable[[GradientBucket], None]


class BucketQueue:
    """The buckets in the order in which every rank starts them.

    A bucket that is full waits for those before it: the ranks' collectives must meet.

    Args:
        gradients: All gradients, planned or not; the list may grow.
        limits: Bucket sizes.
        groups: Indices of gradients that must share a bucket.
        communicator: Reduces the buckets, and allocates them.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        limits: BucketLimits,
        groups: Sequence[Sequence[int]],
        communicator: Communicator,
    ) -> None:
        self._communicator = communicator
        self._gradients = gradients
        self._limits = limits
        self._groups = groups
        self._buckets: list[GradientBucket] = []
        self._bucket_of: dict[int, GradientBucket] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def is_all_launched(self) -> bool:
        """Whether every bucket was started in this round."""
        return self._next == len(self._buckets)

    def bucket_of(self, index: int) -> GradientBucket:
        """Return the home of a planned gradient."""
        return self._bucket_of[index]

    def newcomers(self) -> list[int]:
        """Return the gradients that are to be reduced and have no bucket yet."""
        return [
            index
            for index, gradient in enumerate(self._gradients)
            if gradient.view is None and gradient.parameter.requires_grad
        ]

    def add(self, order: Sequence[int]) -> None:
        """Plan and allocate buckets, behind those that are there; collective."""
        specs = [
            GradientSpec(
                g.parameter.numel(),
                g.parameter.element_size(),
                (g.parameter.dtype, g.parameter.device),
            )
            for g in self._gradients
        ]
        for plan in plan_buckets(specs, order, self._limits, self._groups):
            bucket = GradientBucket.allocate(plan, self._gradients, self._communicator)
            bucket.adopt()
            self._buckets.append(bucket)
            for slot in plan.slots:
                self._bucket_of[slot.index] = bucket

    def rearrange(self, order: Sequence[int]) -> None:
        """Plan anew along ``order``; planned gradients that it leaves out come last."""
        rest = sorted(self._bucket_of.keys() - set(order), reverse=True)
        self._buckets, self._bucket_of = [], {}
        self.add([*order, *rest])

    def open(self) -> None:
        """Begin a round."""
        for bucket in self._buckets:
            bucket.open()
        self._next = 0

    def launch_full(self, launch: Launch) -> None:
        """Start the buckets that wait for nothing and nobody before them."""
        while not self.is_all_launched and not self._buckets[self._next].num_pending:
            launch(self._buckets[self._next])
            self._next += 1

    def launch_rest(self, launch: Launch) -> None:
        """Start all that is left, with zeros for what is missing."""
        for bucket in self._buckets[self._next :]:
            launch(bucket)
        self._next = len(self._buckets)

    def finish(self, scaling: Scaling) -> bool:
        """Wait for all; say whether backward added to one that was under way."""
        for bucket in self._buckets:
            bucket.advance()
        return any([bucket.finish(scaling) for bucket in self._buckets])  # noqa: C419 - all
