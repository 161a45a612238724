"""Reduce gradients over all ranks while backward still runs.

Note [One round]
    A *round* reduces every bucket once, in plan order, on every rank; due to the fixed
    order no negotiation is needed. A round opens with the first gradient that is ready
    and finishes at the end of the same backward pass. So after ``backward()`` all
    gradients are reduced. Unused gradients stay None. A rank without any gradient adds
    zeros. The plan is made at the end of the first backward, when the order of
    gradients is known, and also which of them are sparse.

    If ranks would deadlock, a round is postponed (*gives way*): see Note [Ranks that
    wait for each other] in ``ronde.coordination.waits``. Then ``backward()`` returns,
    and the rest of the round runs during other waits of its thread, at the latest in
    ``synchronize()`` or the next ``backward()``.

    ``synchronize()`` runs a round if none has run since the last step, or if gradients
    were added after it. Adding to a reduced gradient is allowed: the result, scaled by
    ``Scaling.keep``, enters the next round on each rank and comes out unchanged. While
    a bucket is being summed its gradients are detached, so backward adds to a new
    ``.grad``, and one more round follows.

    Under reentrant checkpointing the end of an inner backward finishes the round only
    if all gradients have arrived; else the outer backward or ``synchronize()`` does.
"""

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ronde.collectives import Communicator
from ronde.collectives.torch_modes import outside_compiler
from ronde.coordination.waits import PolledWait
from ronde.data_parallel.buckets import Gradient
from ronde.data_parallel.group import GroupConnector, ReducerKey, RoundCoroutine
from ronde.data_parallel.hooks import (
    add_hook,
    call_at_end_of_backward,
    current_backward,
    is_last_hook,
    is_nested_backward,
)
from ronde.data_parallel.rounds import ReducerOptions, ReductionRounds
from ronde.errors import UsageError
from ronde.status.steps import own_meter

_NOT_OVER = (
    "the gradients of the last backward() are not reduced yet, as other ranks wait for "
    "this one in another operation. Call optimizer.step() or optimizer.synchronize() "
    "before zero_grad() or another backward()."
)

_siblings: dict[int, list[Gradient]] = {}
"""Gradients of all reducers by the parameter's ``id``."""


class Reducer:
    """Reduces the gradients of some parameters over all ranks.

    Creating one is not collective: ranks connect in the first round. Every rank has the
    same parameters in the same order. Only parameters that require a gradient are
    reduced; one that begins to require a gradient is added in the next round.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        connector: GroupConnector,
        options: ReducerOptions,
    ) -> None:
        self._connector = connector
        self._options = options
        self._gradients: list[Gradient] = []
        self._armed_backward = -1
        self._has_run = False  # since the last step
        self._num_prepared = 0
        self._owner = threading.get_ident()
        self._under_way: RoundCoroutine | None = None  # a postponed round
        self._failures: list[BaseException] = []  # of backward passes; raised later
        self._has_given_way = False
        self._waits = connector.waits  # of the session
        self._lock = threading.Lock()
        self._hooks: list[RemovableHandle] = []
        self._fused: list[RemovableHandle] = []
        self._communicators: list[Communicator] = []
        self.rounds = self._new_rounds()
        self.add(named_parameters)
        ends = self._hooks, self._communicators, self._gradients
        self.close = weakref.finalize(self, _release, *ends)
        """Remove the hooks from the parameters and close the communicator."""
        self.close.atexit = False

    def add(self, named_parameters: Sequence[tuple[str, Tensor]]) -> None:
        for name, parameter in named_parameters:
            siblings = _siblings.setdefault(id(parameter), [])
            gradient = Gradient(name, parameter, siblings=siblings)
            siblings.append(gradient)
            self._gradients.append(gradient)
            self._add_hook(len(self._gradients) - 1, self._on_gradient)
        self._prepare_additions()

    @property
    def key(self) -> ReducerKey:
        return self._connector.key

    @property
    def num_fused(self) -> int:
        return sum(gradient.num_fused for gradient in self._gradients)

    @property
    def last_round(self) -> int:
        return self.rounds.last_round

    @property
    def communicator(self) -> Communicator:
        """The communicator of the rounds; available after the first round."""
        return self._communicators[-1]

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes to accumulate before a reduction."""
        self._options = dataclasses.replace(self._options, passes=passes)
        self.rounds.set_options(self._options)
        self._prepare_additions()

    @torch.no_grad()
    def synchronize(self) -> None:
        with self._lock:
            self._raise_failure()
            self._owner = threading.get_ident()
            is_dirty = any(gradient.num_passes for gradient in self._gradients)
            is_new = self.rounds.is_open or is_dirty or not self._has_run
            if self._under_way is not None or is_new:
                self._finish()

    @torch.no_grad()
    def progress(self) -> None:
        """Continue a postponed round, as far as possible without waiting."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._under_way is not None:
                self._under_way.progress()
                if self._under_way.is_over:
                    self._waits.put_off.pop(self.progress, None)
        finally:
            self._lock.release()

    def forget(self) -> None:
        self._has_run = False

    def refuse_put_off(self) -> None:
        if self._under_way is not None:
            raise AssertionError(_NOT_OVER)

    @torch.no_grad()
    def step_done(self, optimizer: Optimizer | None = None) -> None:
        """Count an optimizer's step; the next step needs a new round."""
        self.forget()
        self.rounds.checks.steps.num_steps += 1
        if optimizer is not None and self.key.size > 1:
            self.rounds.checks.drift.step_done(optimizer)

    def start_connecting(self) -> None:
        """Begin to connect with the other ranks, if necessary; returns at once."""
        if not self._options.can_join:
            raise UsageError(
                "join() cannot be used with zero=1, as this rank's share of the "
                "parameters would not be updated. Run equally many steps on all ranks."
            )
        self.rounds.start()

    @torch.no_grad()
    def participate_with_zeros(self) -> None:
        with self._lock:
            self._raise_failure()
            if self._under_way is not None:
                self._finish()
            self.rounds.participate_with_zeros()
            self._has_run = False

    def unbind(self, *, is_abrupt: bool = False) -> None:
        """Disconnect until the next use; with ``is_abrupt``, calls in progress fail."""
        self._connector.give_up()
        for communicator in self._communicators:
            (communicator.abort if is_abrupt else communicator.close)()
        with self._lock:
            self._communicators.clear()
            self.rounds = self._new_rounds()
            self._failures.clear()
            if self._under_way is not None:
                self._under_way.close()
                self._under_way = None
            self._waits.put_off.pop(self.progress, None)
            for gradient in self._gradients:
                gradient.reset()

    def _raise_failure(self) -> None:
        if self._failures:
            raise self._failures.pop()

    def _new_rounds(self) -> ReductionRounds:
        return ReductionRounds(
            self._gradients, self._options, self._connector, self._communicators
        )

    def _prepare_additions(self) -> None:
        """Make backward finish a postponed round, and scale results that it adds to."""
        if self.rounds.scaling.keep == 1.0 and not self._has_given_way:
            return
        for index in range(self._num_prepared, len(self._gradients)):
            self._add_hook(index, self._before_gradient, is_before=True)
        self._num_prepared = len(self._gradients)

    def _add_hook(
        self, index: int, method: Callable[[int], None], *, is_before: bool = False
    ) -> None:
        gradient = self._gradients[index]
        if gradient.parameter.is_floating_point() or gradient.parameter.is_complex():
            hook = add_hook(gradient, index, method, is_before=is_before)
            self._hooks.append(hook)

    @torch.no_grad()
    def _before_gradient(self, index: int) -> None:
        if self._under_way is not None:
            with self._lock:
                self._finish(can_give_way=True)
            self.refuse_put_off()
        gradient = self._gradients[index]
        grad, keep = gradient.parameter.grad, self.rounds.scaling.keep
        if gradient.is_reduced and grad is not None and gradient.is_result(grad):
            if keep != 1.0:
                grad.mul_(keep)
            gradient.is_reduced = False

    @torch.no_grad()
    def _on_gradient(self, index: int) -> None:
        with self._lock:
            self._raise_failure()
            gradient = self._gradients[index]
            gradient.num_passes += 1
            gradient.is_reduced = False
            if gradient.num_passes < self._options.passes:
                return
            # By number, since a backward that raises calls no callback.
            backward = current_backward()
            if backward != self._armed_backward:
                self._armed_backward = backward
                call_at_end_of_backward(self._on_backward_end, self._failures.append)
                self._unfuse()
                if self._options.is_fusing:
                    from ronde.data_parallel.fusion import fuse

                    self._fused = fuse(self._gradients)
            self.rounds.arrive(index, is_final=is_last_hook(gradient))

    def _unfuse(self) -> None:
        for handle in self._fused:
            handle.remove()
        self._fused = []

    @torch.no_grad()
    @outside_compiler
    def _on_backward_end(self) -> None:
        with self._lock:
            self._unfuse()
            if not self.rounds.is_open:
                return
            if not self.rounds.is_complete and is_nested_backward():
                self._armed_backward = -1
                return
            self._finish(can_give_way=True)

    def _finish(self, *, can_give_way: bool = False) -> None:
        rounds = self.rounds
        under_way = self._under_way or RoundCoroutine(rounds.finish())
        point = rounds.start()
        if not rounds.is_connected:
            self._waits = self._connector.waits
        self._waits.put_off.pop(self.progress, None)
        rounds.waiting = PolledWait(
            self._waits, point, self._owner, can_give_way=can_give_way
        )
        with own_meter().blocked, rounds.waiting as waiting:
            is_over = under_way.run(waiting)
        if not is_over:
            self._under_way = under_way
            self._has_given_way = True
            self._prepare_additions()
            self._waits.put_off[self.progress] = self._owner
            return
        self._under_way = None
        if under_way.failures:
            raise under_way.failures.pop()
        self._has_run = True
        self._prepare_additions()  # from the first round with a joined rank on


def _release(
    hooks: list[RemovableHandle],
    communicators: list[Communicator],
    gradients: list[Gradient],
) -> None:
    for hook in hooks:
        hook.remove()
    for gradient in gradients:
        gradient.siblings.remove(gradient)
        if not gradient.siblings:
            del _siblings[id(gradient.parameter)]
    for communicator in communicators:
        communicator.close()
