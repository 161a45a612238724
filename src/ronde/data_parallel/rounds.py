"""A reducer's rounds over one communicator: see Note [One round] in ``reducer``."""

from collections.abc import Sequence

from ronde.coordination.waits import Waiting
from ronde.data_parallel.agreement import (
    agree_on_newcomers,
    agree_on_order,
    check_same_gradients,
)
from ronde.data_parallel.bond import Bond
from ronde.data_parallel.bucket_queue import BucketQueue, Others
from ronde.data_parallel.bucket_tuning import BucketTuning
from ronde.data_parallel.buckets import BucketLimits
from ronde.data_parallel.compression import reduction_of
from ronde.data_parallel.gradient import Gradient
from ronde.data_parallel.gradient_bucket import GradientBucket
from ronde.data_parallel.observed import ObservedReduction
from ronde.data_parallel.options import ReducerOptions
from ronde.data_parallel.resumable import Steps, run
from ronde.data_parallel.step_check import StepCheck


class Rounds:
    """Runs rounds, one after the other; not thread-safe.

    Args:
        gradients: All gradients; the list may grow.
        options: How to reduce.
        bond: Ties them to the other ranks.
        arrivals: Gradients that backward has made already, as ``arrive`` takes them.

    Attributes:
        communicator: The ranks.
        place: Where they meet.
        waiting: What ``finish`` is waited for with; None where nobody is to be told.
        is_open: Whether a round is under way.
        last_round: Number of the last round that this rank added something to.
        scaling: The factors.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        options: ReducerOptions,
        bond: Bond,
        arrivals: Sequence[int] = (),
    ) -> None:
        self.communicator = bond.communicator
        self._bond = bond
        self.place = bond.start()
        self.waiting: Waiting | None = None
        self.is_open = False
        self.last_round = 0
        self._gradients = gradients
        self._reduction = reduction_of(options.compressor)
        self._observed = None
        if bond.coordinator is not None:
            self._observed = ObservedReduction(self._reduction, bond, bond.coordinator)
            self._reduction = self._observed
        self._arrivals: list[int] | None = [*arrivals]
        self._has_newcomers = False
        self._tuning: BucketTuning | None = None
        self.set_options(options)
        self._queue = self._new_queue()
        if arrivals:
            self._open()

    def set_options(self, options: ReducerOptions) -> None:
        """Count and scale differently from now on."""
        self._options = options
        self.scaling = self._all_scaling = options.scaling(self.communicator.size)

    @property
    def num_buckets(self) -> int:
        """Collectives a round; 0 before the first."""
        return len(self._queue)

    @property
    def tuned_limits(self) -> BucketLimits | None:
        """The bucket sizes that tuning ended with; None before."""
        is_tuned = self._tuning is not None and self._tuning.is_over
        return self._queue.limits if is_tuned else None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing from the round that is open."""
        return self._queue.is_complete and not self._has_newcomers

    def arrive(self, index: int) -> None:
        """Take a gradient that backward has made; opens a round if none is."""
        if not self.is_open:
            self._open()
        gradient = self._gradients[index]
        is_first = gradient.num_passes == self._options.passes
        if is_first and self._arrivals is not None:
            self._arrivals.append(index)
        bucket = self._queue.bucket_of(index)
        if bucket is None or bucket.is_launched:
            return
        gradient.move(self.scaling)  # now, while it is in the cache
        if is_first:
            bucket.num_pending -= 1
            if bucket.num_pending == 0:
                self._queue.launch_full(self._launch)

    def finish(self) -> Steps[None]:
        """Finish the round that is open, or run one, and those that must follow it.

        Raises:
            CollectiveError: The reduction failed, the ranks' models differ, or some
                ran backward more often than others since their last step.
        """
        is_late = True
        while is_late:
            if not self.is_open:
                self._open()
            self._begin()
            self._queue.launch_rest(self._launch)
            self.is_open = False
            is_late = yield from self._queue.finish(self.scaling)
            self.scaling = self._all_scaling.without(self._queue.num_joined())
            yield from self._tune()
            self.last_round = self._queue.num_rounds
            if self._has_newcomers:
                is_late |= yield from self._admit()

    def step_done(self) -> None:
        """Note that the optimizer has stepped."""
        self._queue.steps.num_steps += 1

    def keep_up(self) -> None:
        """Take part in the others' rounds without adding anything, to the last.

        Raises:
            CollectiveError: A reduction failed, or the ranks' models differ.
        """
        if self.is_open:
            run(self.finish())
        for gradient in self._gradients:
            grad = gradient.parameter.grad
            if grad is not None and grad is gradient.view:
                # The others' results will go where it lies.
                gradient.give(grad.clone())
        if self._observed is not None:
            self._observed.has_joined = True
        self._follow_others()
        self._queue.steps = StepCheck()  # on all ranks, that took unequally many
        if self._observed is not None:
            self._observed.has_joined = False

    def _follow_others(self) -> None:
        others = Others.WENT_ON if len(self._queue) else Others.HAVE_NEWCOMERS
        while others is not Others.HAVE_JOINED:
            if others is Others.HAVE_NEWCOMERS:
                run(self._admit(has_joined=True))
            if not len(self._queue):
                return  # all had joined before anything was to be reduced
            others = self._queue.keep_up(self._all_scaling, self._reduction)
            if others is not Others.HAVE_JOINED:
                run(self._tune())

    def _begin(self) -> None:
        """Note that this rank has come to the next round, and will see it through."""
        if self._bond.coordinator is None:
            return
        name, number = self._bond.name, self._queue.num_rounds + 1
        self.place = self._bond.coordinator.point(name, number)
        self._bond.coordinator.waits.begin(self.place)
        if self.waiting is not None:
            self.waiting.move_to(self.place)

    def _open(self) -> None:
        self._has_newcomers = bool(self._queue.newcomers())
        self._queue.open(has_newcomers=self._has_newcomers)
        self.is_open = True

    def _admit(self, *, has_joined: bool = False) -> Steps[bool]:
        """Plan for gradients that are to be reduced from now on; collective.

        If others are planned already, reduces the newcomers by themselves: what is
        reduced once in this round must not be again.

        Returns:
            Whether a round must follow.
        """
        communicator, queue = self.communicator, self._queue
        yield from check_same_gradients(communicator, self._gradients)
        agreed = yield from agree_on_newcomers(
            communicator,
            self._gradients,
            has_joined=has_joined,
            is_sparse_densified=self._options.is_sparse_densified,
        )
        newcomers = agreed[::-1]  # backward makes gradients roughly in reverse
        if self._arrivals is not None and newcomers:
            arrivals = yield from agree_on_order(communicator, self._arrivals)
            self._arrivals = None
            rest = [index for index in newcomers if index not in set(arrivals)]
            yield from queue.rearrange([*arrivals, *rest])
            return True
        is_late = yield from self._reduce_alone(newcomers, has_joined=has_joined)
        yield from queue.rearrange([*queue.order, *newcomers])
        return is_late

    def _reduce_alone(
        self, newcomers: Sequence[int], *, has_joined: bool
    ) -> Steps[bool]:
        queue = self._new_queue()
        yield from queue.rearrange(newcomers)
        if not len(queue):
            return False
        if has_joined:
            queue.keep_up(self._all_scaling, self._reduction)
            return False
        queue.open()
        queue.launch_rest(self._launch)
        return (yield from queue.finish(self.scaling))

    def _new_queue(self) -> BucketQueue:
        options = self._options
        return BucketQueue(
            self._gradients,
            options.limits,
            options.groups,
            self.communicator,
            self._bond.waits,
        )

    def _tune(self) -> Steps[None]:
        """Try other bucket sizes, if that is asked for; at times collective."""
        options = self._options.tuning
        if options is None or not self.num_buckets:
            return
        if self._tuning is None:
            name = f"gradients.{self._gradients[0].name}"
            candidates = self._queue.candidates()
            self._tuning = BucketTuning(name, candidates, self.communicator, options)
        limits = yield from self._tuning.round_done()
        if limits is not None:
            yield from self._queue.resize(limits)

    def _launch(self, bucket: GradientBucket) -> None:
        bucket.launch(self.communicator, self.scaling, self._reduction)
