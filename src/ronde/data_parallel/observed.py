"""Tells timelines and the stall inspector of buckets."""

import time
from collections.abc import Iterable
from typing import Any

from ronde.collectives import Communicator, Work
from ronde.coordination.coordinator import Coordinator
from ronde.coordination.waits import Watch
from ronde.data_parallel.bond import Bond
from ronde.data_parallel.bucket_reduction import (
    BucketContent,
    BucketReduction,
    PendingSum,
)
from ronde.timeline.events import Recorded


class ObservedReduction(BucketReduction):
    """Lets another reduction do the work, and says when it began and ended.

    Args:
        reduction: Does the work.
        bond: Names the reducer.
        coordinator: Of the ranks; what is under way is watched by it, and told to its
            recorder while it has one.

    Attributes:
        has_joined: Whether this rank only keeps up with the others.
    """

    def __init__(
        self, reduction: BucketReduction, bond: Bond, coordinator: Coordinator
    ) -> None:
        self.has_joined = False
        self._reduction = reduction
        self._set_id, self._name = bond.set_id, bond.name
        self._coordinator = coordinator
        self._num_launched = 0

    def launch(self, content: BucketContent, communicator: Communicator) -> PendingSum:
        """Start the sum."""
        submitted_ns = 0 if self.has_joined else time.monotonic_ns()
        gradients = content.gradients
        name = f"{self._name}.{gradients[0].name}" if gradients else self._name
        # One that has joined may wait for as long as the others like.
        watch = None if self.has_joined else self._coordinator.watch(name)
        begun_ns = time.monotonic_ns()
        pending = self._reduction.launch(content, communicator)
        self._num_launched += 1
        recorded = Recorded(
            set_id=self._set_id,
            sequence=self._num_launched,
            name=name,
            kind="ALLREDUCE",
            submitted_ns=submitted_ns,
            agreed_ns=0,
            begun_ns=begun_ns,
            ended_ns=0,
            dtype=str(content.memory.dtype).removeprefix("torch."),
            shape=tuple(content.memory.shape),
            num_fused=len(gradients),
        )
        return _ObservedSum(pending, self._coordinator, watch, recorded)


class _ObservedSum(PendingSum):
    def __init__(
        self,
        pending: PendingSum,
        coordinator: Coordinator,
        watch: Watch | None,
        recorded: Recorded,
    ) -> None:
        self._pending = pending
        self._coordinator = coordinator
        self._watch = watch
        self._recorded = recorded

    def works(self) -> Iterable[Work[Any]]:
        return self._pending.works()

    def arrive(self) -> None:
        self._pending.arrive()

    def advance(self) -> None:
        self._pending.advance()

    def finish(self) -> None:
        try:
            self._pending.finish()
        finally:
            if self._watch is not None:
                self._watch.done()
        recorder = self._coordinator.recorder
        if recorder is not None:
            recorder.operation(self._recorded._replace(ended_ns=time.monotonic_ns()))
