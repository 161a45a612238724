"""A reducer's rounds over one communicator: see Note [One round] in ``reducer``.

Note [Control flags]
    A rank that has joined (Horovod's ``join``) participates with zeros in the other
    ranks' rounds. Every round begins with the same bucket. Flags at its end are 1 on
    ranks that still train and 0 on joined ranks. The sums of these flags mean:

        0     the number of ranks that train; if 0, the round ends
        1     0 if a parameter is new; then all ranks plan anew after the round
        2     the number of joined ranks, which set it to 1 while the others set 0
        3-5   the steps of the ranks: see ``StepCheck``
        6...  the other buckets, then the sparse gradients: 0 for frozen ones, which are
              not reduced
        last  32 flags for weights that differ, zeros in most rounds: see Note [How
              drift is found] in ``ronde.drift``

    Ranks that train read flag 2 if that needs no synchronisation. The flag matters for
    adding to a gradient after its reduction: see ``Scaling``.
"""

import hashlib
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress, count
from typing import cast

import torch
from torch import Tensor

from ronde.collectives import Communicator, all_gather_json
from ronde.coordination.messages import bits_of, decode_bits, encode_bits
from ronde.coordination.waits import PolledWait, SyncPoint
from ronde.data_parallel.buckets import (
    ARRIVED,
    OVER,
    BucketTuning,
    Gradient,
    GradientBucket,
    Scaling,
    Sum,
    kind_of,
    no_entries,
    reduce_sparse,
)
from ronde.data_parallel.compression import (
    Compressor,
    NoneCompressor,
    require_compressor,
    sum_compressed,
)
from ronde.data_parallel.group import (
    GroupConnector,
    ReducerGroup,
    Steps,
    run,
    run_blocking,
)
from ronde.drift import (
    NUM_FLAGS,
    Background,
    DriftCheck,
    is_apart,
    sum_of_words,
)
from ronde.errors import CollectiveError
from ronde.parallel.buckets import (
    BucketLimits,
    BucketPlan,
    GradientSpec,
    candidate_limits,
    plan_buckets,
)
from ronde.timeline.events import Recorded
from ronde.tuning import TuningOptions

_IS_PLANNED, _JOINED, _STEPS = 1, 2, 3
_NUM_STEP_FLAGS = 3
_NUM_OWN_FLAGS = _STEPS + _NUM_STEP_FLAGS


@dataclass(frozen=True, slots=True)
class ReducerOptions:
    """The settings of a ``Reducer`` and its rounds."""

    is_average: bool = True  # over ranks; False: the sum
    predivide: float = 1.0  # part of the average's divisor, applied before the sum
    passes: int = 1  # backward passes to accumulate before a reduction
    is_passes_average: bool = False  # divide by ``passes`` too
    compressor: type[Compressor] = NoneCompressor
    limits: BucketLimits = field(default_factory=BucketLimits)
    groups: tuple[tuple[int, ...], ...] = ()  # gradients to reduce together
    is_sparse_densified: bool = False  # reduce sparse gradients as dense ones
    is_fusing: bool = False  # backward writes into buckets: see ``fusion``
    tuning: TuningOptions | None = None  # finds better ``limits``
    can_join: bool = True  # False with zero=1: each rank steps a share
    drift: str = "off"  # off, warn or error if weights differ between ranks

    def scaling(self, size: int) -> Scaling:
        passes = self.passes if self.is_passes_average else 1
        if not self.is_average:
            return Scaling(1.0 / passes, 1.0, size)
        if self.predivide == 1.0:
            return Scaling(1.0 / (size * passes), 1.0, size)
        return Scaling(1.0 / (self.predivide * passes), self.predivide / size, size)


class FlagReader:
    """Reads the sums of flags; on an accelerator one round late, to avoid waiting."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, int, torch.Event] | None = None

    def read(self, flags: Tensor, step: int) -> tuple[list[float], int] | None:
        """Return sums and their ``step``, or None if none are available yet."""
        if not flags.is_cpu:
            here = torch.empty_like(flags, device="cpu", pin_memory=True)
            here.copy_(flags, non_blocking=True)
            is_here = torch.Event(flags.device)
            is_here.record()
            last, self._last = self._last, (here, step, is_here)
            if last is None:
                return None
            flags, step, is_here = last
            is_here.synchronize()
        return cast("list[float]", flags.real.tolist()), step


class StepCheck:
    """Finds ranks that ran backward more often than others between optimizer steps.

    Each rank that trains sets one of three flags, chosen by its step count modulo 3. If
    more than one sum is nonzero, a round has added up gradients of different steps.
    """

    def __init__(self) -> None:
        self.num_steps = 0  # of this rank; all ranks reset it together

    @property
    def flag(self) -> int:
        return self.num_steps % _NUM_STEP_FLAGS

    @staticmethod
    def check(sums: Sequence[float], flag: int) -> None:
        """Raise, on all ranks, if the sums of flags show different steps."""
        counts = list(map(round, sums))
        if counts.count(0) == _NUM_STEP_FLAGS - 1:
            return
        # Ranks that ran more backward passes are behind in steps.
        behind = next(i for i in range(_NUM_STEP_FLAGS) if counts[i] and counts[i - 2])
        this = "including this one" if flag == behind else "not on this one"
        raise CollectiveError(
            "Gradients were computed more than backward_passes_per_step times before "
            f"call to step() on {counts[behind]} of {sum(counts)} ranks, {this}. All "
            "ranks must call backward() equally often before each step(). Skip the "
            "extra passes, or accumulate them with a larger backward_passes_per_step."
        )


class RoundChecks:
    """Writes and reads the flags of steps and drift."""

    def __init__(self, drift: str) -> None:
        self.steps, self.drift = StepCheck(), DriftCheck(drift)
        self._is_drift_sought = drift != "off"
        self._did_begin_equal: bool | None = None
        self._reader = FlagReader()
        self._has_sums = True  # the first bucket's memory has sums of drift

    def restart(self) -> None:
        """Restart all checks. Call this on all ranks once step counts have diverged."""
        self.steps, self._reader = StepCheck(), FlagReader()
        self.drift.restart()

    def sum_at_begin(self, parameters: Iterable[Tensor]) -> int | None:
        """Return the checksum of all weights, or None if it is known or not needed."""
        if self._did_begin_equal is not None or not self._is_drift_sought:
            return None
        return sum(map(sum_of_words, parameters))

    def note_begin(self, sums: Sequence[int | None]) -> None:
        if self._did_begin_equal is None:
            self._did_begin_equal = len(set(sums)) == 1

    @property
    def odd(self) -> list[int]:
        return [_STEPS + i for i in range(_NUM_STEP_FLAGS) if i != self.steps.flag]

    def write(self, bucket: GradientBucket) -> None:
        looked = self.drift.pop_flags() if self.drift.sums else None
        if looked is not None:
            bucket.drift.copy_(looked)
        elif self._has_sums:  # of the previous round
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
        """Raise if steps differ; report weights that differ (collective).

        ``ranks`` are the group's global ranks; empty means all ranks.
        """
        found = self._reader.read(bucket.all_flags, self.steps.flag)
        if found is None:
            return
        sums, step = found
        if not has_joined:
            self.steps.check(sums[_STEPS:_NUM_OWN_FLAGS], step)
        drift = sums[-NUM_FLAGS:]
        self._has_sums = not bucket.all_flags.is_cpu or any(drift)
        if self._has_sums and is_apart(drift):
            named = [(gradient.name, gradient.parameter) for gradient in gradients]
            known = Background(
                ranks, not has_joined, self._did_begin_equal, is_reducing=True
            )
            report = partial(self.drift.report, group.communicator, named, known)
            yield from run_blocking(group.waits, report)


def describe(name: str, parameter: Tensor) -> str:
    """Describe the properties of a parameter that must be equal on all ranks."""
    return (
        f"{name} {tuple(parameter.shape)} strides {parameter.stride()} "
        f"{parameter.dtype} on {parameter.device.type}"
    )


def require_equal(everyone: Sequence[list[str] | None]) -> None:
    """Raise if the ranks' lists of descriptions differ; None matches any list."""
    lists = [(rank, theirs) for rank, theirs in enumerate(everyone) if theirs]
    one, mine = lists[0]
    for another, theirs in lists[1:]:
        values = [("num_parameters", len(mine), len(theirs))]
        values += [("parameters", *each) for each in zip(mine, theirs, strict=False)]
        for name, here, there in values:
            if here != there:
                raise CollectiveError(
                    f"{name} must be the same on all ranks, got {here} on rank {one} "
                    f"and {there} on rank {another}. Build the same model on all ranks."
                )


class ReductionRounds:
    """Runs one round after the other; not thread-safe.

    All ranks launch the buckets in the same order, then sparse gradients. A full bucket
    waits for the preceding ones, because collectives are matched by their order.
    """

    # Set by ``_connect``:
    _group: ReducerGroup
    _communicator: Communicator
    _point: SyncPoint

    def __init__(
        self,
        gradients: Sequence[Gradient],
        options: ReducerOptions,
        connector: GroupConnector,
        communicators: list[Communicator],
    ) -> None:
        """``gradients`` may grow later; new communicators go to ``communicators``."""
        self._gradients, self._options = gradients, options
        self._connector, self._communicators = connector, communicators
        self.is_connected = False
        self.waiting: PolledWait | None = None  # the current wait in ``finish``
        self.is_open = False
        self.last_round = 0  # the last round that this rank contributed to
        self.scaling = self._all_scaling = Scaling(1.0, 1.0, 1)
        self.checks = RoundChecks(options.drift)
        self.buckets: list[GradientBucket] = []
        self._num_rounds = 0  # in which any rank trained; equal on all ranks
        self._order: list[int] = []  # of the planned gradients
        self.limits = options.limits
        self._bucket_of: dict[int, GradientBucket] = {}
        self._sparse: list[Gradient] = []
        self._next = 0  # the first bucket that is not launched
        require_compressor(options.compressor)
        self._has_joined = False
        self._num_launched = 0
        self._arrivals: list[int] | None = []
        self._has_new_parameters = False
        self._tuning: BucketTuning | None = None

    def start(self) -> SyncPoint:
        """Begin to connect, if necessary; return the sync point of all ranks."""
        return self._point if self.is_connected else self._connector.start()

    def set_options(self, options: ReducerOptions) -> None:
        self._options = options
        if self.is_connected:
            self.scaling = self._all_scaling = options.scaling(self._communicator.size)

    def _connect(self, *, is_watched: bool = True) -> Steps[None]:
        if self.is_connected:
            return
        self._group = yield from self._connector.connect(is_watched=is_watched)
        self._communicator = self._group.communicator
        self._communicators.append(self._communicator)
        self._point = self._group.start()
        self.is_connected = True
        self.set_options(self._options)

    @property
    def tuned_limits(self) -> BucketLimits | None:
        """The bucket sizes found by tuning, or None before tuning ends."""
        is_over = self._tuning is not None and self._tuning.is_over
        return self.limits if is_over else None

    @property
    def is_complete(self) -> bool:
        return (
            self._next == len(self.buckets)
            and not self._has_new_parameters
            and all(g.num_passes or not g.parameter.requires_grad for g in self._sparse)
        )

    def arrive(self, index: int, *, is_final: bool = True) -> None:
        """Handle a gradient from backward; copy it in now only if ``is_final``."""
        if not self.is_open:
            self._open()
        gradient = self._gradients[index]
        is_first = gradient.num_passes == self._options.passes
        if is_first and self._arrivals is not None:
            self._arrivals.append(index)
        bucket = self._bucket_of.get(index)
        if bucket is None or bucket.is_launched or not is_final:
            return  # sparse, new, late, or not final
        gradient.copy_in(self.scaling)  # while it is in the cache
        if is_first:
            bucket.num_pending -= 1
            if bucket.num_pending == 0:
                self._launch(has_all=False)

    def finish(self) -> Steps[None]:
        """Finish the open round, or run one, and further rounds if necessary."""
        yield from self._connect()
        is_late = True
        while is_late:
            if not self.is_open:
                self._open()
            self._point = self._point._replace(number=self._num_rounds + 1)
            self._group.waits.begin(self._point)
            if self.waiting is not None:
                self.waiting.move_to(self._point)
            is_late = yield from self._complete()
            if self.buckets and self.buckets[0].flags.is_cpu:  # else reading would wait
                num_joined = self.buckets[0].count(_JOINED)
                self.scaling = self._all_scaling.without(num_joined)
            yield from self._tune()
            self.last_round = self._num_rounds
            if self._has_new_parameters:
                is_late |= yield from self._plan_new()

    def participate_with_zeros(self) -> None:
        run(self._connect(is_watched=False))
        if self.is_open:
            run(self.finish())
        for gradient in self._gradients:
            grad = gradient.parameter.grad
            if grad is not None and gradient.is_result(grad):
                # Other ranks' results will overwrite the bucket.
                gradient.assign_grad(grad.clone())
        self._has_joined = True
        is_anyone_left, is_planned = True, bool(self.buckets)
        while is_anyone_left:
            if not is_planned:
                run(self._plan_new())
            if not self.buckets:
                break  # all ranks joined before the first round
            is_anyone_left, is_planned = self._add_zeros()
            if is_anyone_left:
                run(self._tune())
        self.checks.restart()
        self._has_joined = False

    def _open(self) -> None:
        for index, gradient in enumerate(self._gradients):
            if gradient.is_planned and gradient.kind != kind_of(gradient.parameter):
                gradient.forget_plan()
                self._order.remove(index)
        self._has_new_parameters = any(
            g.parameter.requires_grad and not g.is_planned for g in self._gradients
        )
        self._open_buckets()
        self.is_open = True

    def _open_buckets(self) -> None:
        self._next = 0
        for bucket in self.buckets:
            bucket.open()
        if self.buckets:
            frozen = [bucket.is_launched for bucket in self.buckets[1:]]
            frozen += [not g.parameter.requires_grad for g in self._sparse]
            odd = [_JOINED, *compress(count(_NUM_OWN_FLAGS), frozen), *self.checks.odd]
            self.buckets[0].odd_flags = odd + [_IS_PLANNED] * self._has_new_parameters

    def _launch(self, *, has_all: bool) -> None:
        """Start all buckets before the first incomplete one, or all if ``has_all``."""
        for bucket in self.buckets[self._next :]:
            if bucket.num_pending and not has_all:
                return
            self._next += 1
            if not bucket.is_launched:
                bucket.fill(self.scaling)
                if self._next == 1:
                    self.checks.write(bucket)
                bucket.start(self._sum_of(bucket), self.scaling)

    def _complete(self) -> Steps[bool]:
        """Launch and finish all buckets; return True if backward added gradients."""
        self._launch(has_all=True)
        self.is_open = False

        def keep() -> float:
            return self.scaling.without(self.buckets[0].count(_JOINED)).keep

        is_late = False
        for bucket in self.buckets:
            yield from bucket.works
            is_late |= bucket.finish(self.scaling, keep)
        yield from reduce_sparse(self._sparse, self.scaling, self._group)
        if self.buckets:
            self._num_rounds += 1
            yield from self._check()
        return is_late

    def _check(self) -> Steps[None]:
        bucket, group, gradients = self.buckets[0], self._group, self._gradients
        ranks, has_joined = self._point.ranks, self._has_joined
        check = self.checks.check
        return check(bucket, group, gradients, ranks, has_joined=has_joined)

    def _add_zeros(self) -> tuple[bool, bool]:
        """Add zeros in one round; return flags 0 and 1 of Note [Control flags]."""
        self._open_buckets()
        first, *others = self.buckets
        first.odd_flags = (_JOINED,)
        self._launch_zeros(first)
        first.go_to(ARRIVED)
        flags = cast("list[float]", first.flags.real.tolist())
        is_anyone_left, is_planned = map(bool, flags[:2])
        if not is_anyone_left:
            first.drop()
            return False, is_planned
        are_reduced = [bool(flag) for flag in flags[_NUM_OWN_FLAGS:]]
        for bucket in compress(others, are_reduced):
            self._launch_zeros(bucket)
        for bucket in self.buckets:
            bucket.go_to(OVER)
        for gradient in compress(self._sparse, are_reduced[len(others) :]):
            gather = self._communicator.all_gather
            for work in [gather(part) for part in no_entries(gradient)]:
                work.wait()
        self._num_rounds += 1
        run(self._check())
        return True, is_planned

    def _launch_zeros(self, bucket: GradientBucket) -> None:
        bucket.fill_with_zeros()
        bucket.start(self._sum_of(bucket), self._all_scaling, odd=1)

    def _plan_new(self) -> Steps[bool]:
        """Plan for new gradients; return True if a round must follow; collective.

        If there is a plan already, the new gradients are reduced in a round of their
        own, as no gradient may be reduced twice in a round.
        """
        agreed, arrivals = yield from run_blocking(self._group.waits, self._agree)
        new = agreed[::-1]  # backward makes gradients roughly in reverse
        if self._arrivals is not None and new:
            self._arrivals = None
            rest = [index for index in new if index not in set(arrivals)]
            yield from self._arrange([*arrivals, *rest])
            return True
        planned, self._order = self._order, []
        yield from self._arrange(new)
        is_late = False
        if self.buckets and self._has_joined:
            self._add_zeros()
        elif self.buckets:
            self._has_new_parameters = False
            self._open_buckets()
            is_late = yield from self._complete()
        yield from self._arrange([*planned, *new])
        return is_late

    def _agree(self) -> tuple[list[int], list[int]]:
        """Return the indices of new gradients, and rank 0's order of arrivals.

        Also exchanges sparse dimensions, for ranks that did not use an embedding.
        Joined ranks have no vote on the trained parameters. Raises on every rank if
        parameters differ, or one is trained on some ranks and frozen on others.
        """
        gradients, communicator = self._gradients, self._communicator
        mine = [describe(g.name, g.parameter) for g in gradients]
        digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()[:16]
        trained = [g.parameter.requires_grad for g in gradients]
        vote = encode_bits(sum(is_on << i for i, is_on in enumerate(trained)))
        own = (
            digest,
            None if self._has_joined else vote,
            [] if self._options.is_sparse_densified else _sparse_dims(gradients),
            None if communicator.rank else self._arrivals,
            self.checks.sum_at_begin(g.parameter for g in gradients),
        )
        everyone = all_gather_json(communicator, own)
        digests, votes, sparse, arrivals, weights = zip(*everyone, strict=True)
        self.checks.note_begin(weights)
        if len(set(digests)) > 1:
            require_equal(all_gather_json(communicator, mine))
        votes = [each for each in votes if each is not None]
        if len(set(votes)) > 1:
            own = None if self._has_joined else _with_states(mine, trained)
            require_equal(all_gather_json(communicator, own))
        new = bits_of(decode_bits(votes[0])) if votes else []
        new = [index for index in new if not gradients[index].is_planned]
        for index in new:
            gradients[index].sparse_dims = 0
        for index, sparse_dims in chain(*sparse):
            if index in new:
                gradients[index].sparse_dims = sparse_dims
        return new, arrivals[0] or []

    def _arrange(self, order: Sequence[int]) -> Steps[None]:
        """Plan buckets for ``order``, then all other known gradients; collective."""
        self._order = [*order, *sorted(set(self._order) - set(order), reverse=True)]
        specs, dense = self._specs_and_dense()
        plans = plan_buckets(specs, dense, self.limits, self._options.groups)
        sparse = [i for i in self._order if self._gradients[i].sparse_dims]
        if sparse and not plans:
            plans = (BucketPlan((), 0, specs[sparse[0]].kind),)  # for the flags
        gradients, communicator = self._gradients, self._communicator
        for gradient in [gradients[index] for index in self._order]:
            gradient.kind = kind_of(gradient.parameter)
        options = self._options
        if options.is_fusing and options.compressor is NoneCompressor:
            from ronde.data_parallel.fusion import is_fusible

            for gradient in [gradients[index] for index in self._order]:
                gradient.is_fusible = is_fusible(gradient.parameter)
        self._sparse = [gradients[i] for i in sparse]
        num_flags = _NUM_OWN_FLAGS + len(plans) - 1 + len(sparse)

        def allocate() -> list[GradientBucket]:
            return [
                GradientBucket(plan, gradients, communicator, 0 if index else num_flags)
                for index, plan in enumerate(plans)
            ]

        self.buckets = yield from run_blocking(self._group.waits, allocate)
        self._bucket_of.clear()
        for bucket in self.buckets:
            bucket.adopt()
            for slot in bucket.slots:
                self._bucket_of[slot.index] = bucket

    def _specs_and_dense(self) -> tuple[list[GradientSpec], list[int]]:
        parameters = [gradient.parameter for gradient in self._gradients]
        kinds = [(p.dtype, p.device) for p in parameters]
        sizes = [(p.numel(), p.element_size()) for p in parameters]
        specs = [GradientSpec(*s, k) for s, k in zip(sizes, kinds, strict=True)]
        return specs, [i for i in self._order if not self._gradients[i].sparse_dims]

    def _tune(self) -> Steps[None]:
        """Try other bucket sizes, if tuning is enabled; collective in some rounds."""
        options = self._options
        if options.tuning is None or not self.buckets:
            return
        if self._tuning is None:
            self._tuning = BucketTuning(
                f"gradients.{self._gradients[0].name}",
                candidate_limits(*self._specs_and_dense(), self.limits, options.groups),
                self._communicator,
                options.tuning,
            )
        limits = yield from self._tuning.round_done()
        if limits is not None and limits != self.limits:
            self.limits = limits
            yield from self._arrange(self._order)

    def _sum_of(self, bucket: GradientBucket) -> Sum:
        self._num_launched += 1
        total = sum_compressed(self._options.compressor, bucket, self._communicator)
        number, has_joined = self._num_launched, self._has_joined
        return _watched(total, bucket, self._group, number, has_joined=has_joined)


def _sparse_dims(gradients: Sequence[Gradient]) -> list[tuple[int, int]]:
    grads = [gradient.parameter.grad for gradient in gradients]
    return [
        (index, grad.sparse_dim())
        for index, grad in enumerate(grads)
        if grad is not None and grad.is_sparse
    ]


def _with_states(described: Sequence[str], trained: Sequence[bool]) -> list[str]:
    states = ["trained" if is_on else "frozen" for is_on in trained]
    return [f"{d}, {state}" for d, state in zip(described, states, strict=True)]


def _watched(
    total: Sum,
    bucket: GradientBucket,
    group: ReducerGroup,
    number: int,
    *,
    has_joined: bool,
) -> Sum:
    """Sum a bucket under the stall inspector, and record it in timelines."""
    coordinator = group.coordinator
    if coordinator is None:
        yield from total
        return
    name = group.name
    if bucket.gradients:
        name = f"{name}.{bucket.gradients[0].name}"
    begun_ns = time.monotonic_ns()
    # A joined rank may wait without limit.
    num_bytes = bucket.memory.nbytes
    with nullcontext() if has_joined else coordinator.watch(name, number, num_bytes):
        yield from total
    recorder = coordinator.execution.recorder
    if recorder is not None:
        recorder.operation(
            Recorded(
                set_id=group.set_id,
                sequence=number,
                name=name,
                kind="ALLREDUCE",
                submitted_ns=0 if has_joined else begun_ns,
                agreed_ns=0,
                begun_ns=begun_ns,
                ended_ns=time.monotonic_ns(),
                dtype=str(bucket.memory.dtype).removeprefix("torch."),
                shape=tuple(bucket.memory.shape),
                num_fused=len(bucket.gradients),
            )
        )
