"""Reduce gradients over all ranks while backward still runs.

Note [One round]
    A *round* reduces every bucket once, in plan order, on every rank: that fixed order
    is what makes negotiation needless. A round opens with the first gradient that is
    ready and is finished at the end of the same backward pass, so that after
    ``backward()`` all gradients are what one process would have: clipping, inspecting
    and ``GradScaler`` need no care. What no rank used stays None. Ranks whose graphs
    differ agree, as long as each of them made some gradient, or none made any.

    ``synchronize()`` runs a round when none has run since the last step, or when
    something was added after it, so a rank without any gradient takes part from there.

    Adding to a finished gradient (a second ``backward()``) is right as well: a result,
    scaled by ``Scaling.keep``, enters the next round once a rank and comes out as it
    was. Adding while the bucket is under way goes to a fresh ``.grad``, since the
    bucket's gradients are detached meanwhile, and one more round follows.

    Under reentrant checkpointing the end of an inner backward finishes the round only
    if all gradients are there; else the outer end does, or ``synchronize()``.
"""

import dataclasses
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ronde.collectives import Communicator
from ronde.data_parallel.agreement import agree_on_order, check_same_gradients
from ronde.data_parallel.bucket_queue import BucketQueue
from ronde.data_parallel.buckets import BucketLimits
from ronde.data_parallel.compression import (
    GradientCompression,
    NoneCompressor,
    reduction_of,
)
from ronde.data_parallel.gradient import Gradient, Scaling
from ronde.data_parallel.gradient_bucket import GradientBucket
from ronde.data_parallel.hooks import (
    call_at_end_of_backward,
    call_before_gradient,
    call_on_gradient,
    current_backward,
    is_nested_backward,
)
from ronde.errors import UsageError


@dataclass(frozen=True, slots=True)
class ReducerOptions:
    """How gradients are reduced.

    Attributes:
        is_average: Average over ranks, else sum.
        predivide: Part of the average's divisor that is applied before the sum.
        passes: Backward passes to accumulate before a reduction.
        is_passes_average: Divide by ``passes`` too.
        compressor: What travels.
        limits: Bucket sizes.
        groups: Indices of gradients that must be reduced together.
        is_sparse_densified: Reduce sparse gradients as dense ones.
    """

    is_average: bool = True
    predivide: float = 1.0
    passes: int = 1
    is_passes_average: bool = False
    compressor: GradientCompression = NoneCompressor
    limits: BucketLimits = field(default_factory=BucketLimits)
    groups: tuple[tuple[int, ...], ...] = ()
    is_sparse_densified: bool = False

    def scaling(self, size: int) -> Scaling:
        """Return the factors for ``size`` ranks."""
        return Scaling.of(
            size,
            is_average=self.is_average,
            predivide=self.predivide,
            passes=self.passes if self.is_passes_average else 1,
        )


class Reducer:
    """Keeps the gradients of some parameters in step with the other ranks'.

    Collective to create and to use: every rank has the same parameters in the same
    order. Only parameters that require a gradient take part; one that begins to later
    joins with the next round.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        communicator: Communicator,
        options: ReducerOptions,
    ) -> None:
        self._communicator = communicator
        self._options = options
        self._scaling = options.scaling(communicator.size)
        self._reduction = reduction_of(options.compressor)
        self._gradients: list[Gradient] = []
        self._queue = BucketQueue(
            self._gradients, options.limits, options.groups, communicator
        )
        self._arrivals: list[int] | None = []
        self._is_open = False
        self._armed_backward = -1
        self._num_rounds = 0
        self._lock = threading.Lock()
        self._hooks: list[RemovableHandle] = []
        self.add(named_parameters)
        self._release = weakref.finalize(self, _release, self._hooks, communicator)
        self._release.atexit = False

    def add(self, named_parameters: Sequence[tuple[str, Tensor]]) -> None:
        """Take more parameters in, from the next round on; collective."""
        options = self._options
        for name, parameter in named_parameters:
            index = len(self._gradients)
            self._gradients.append(Gradient(name, parameter))
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            self._hooks.append(call_on_gradient(parameter, index, self._on_gradient))
            if not options.is_average or options.is_passes_average:
                self._hooks.append(
                    call_before_gradient(parameter, index, self._before_gradient)
                )

    @property
    def num_buckets(self) -> int:
        """Collectives a round; 0 before the first."""
        return len(self._queue)

    def set_passes(self, passes: int) -> None:
        """Accumulate ``passes`` backward passes before a reduction from now on."""
        self._options = dataclasses.replace(self._options, passes=passes)
        self._scaling = self._options.scaling(self._communicator.size)

    def synchronize(self) -> None:
        """Reduce what is not reduced yet; collective.

        Raises:
            CollectiveError: The reduction failed, or the ranks' models differ.
        """
        with self._lock:
            is_dirty = any(gradient.num_passes for gradient in self._gradients)
            if self._is_open or is_dirty or self._num_rounds == 0:
                self._finish_round()

    def step_done(self) -> None:
        """Note that the optimizer has stepped: the next step needs a new round."""
        self._num_rounds = 0

    def close(self) -> None:
        """Take the hooks off the parameters and close the communicator."""
        self._release()

    @torch.no_grad()
    def _before_gradient(self, index: int) -> None:
        gradient = self._gradients[index]
        grad = gradient.parameter.grad
        if gradient.is_reduced and grad is not None and grad is gradient.view:
            grad.mul_(self._scaling.keep)
            gradient.is_reduced = False

    @torch.no_grad()
    def _on_gradient(self, index: int) -> None:
        gradient = self._gradients[index]
        self._refuse_sparse(gradient)
        with self._lock:
            gradient.num_passes += 1
            if gradient.num_passes < self._options.passes:
                return
            self._arm()
            if not self._is_open:
                self._open_round()
            bucket = self._queue.bucket_of(index)
            if bucket.is_launched:
                return
            gradient.move(self._scaling)  # now, while it is in the cache
            if gradient.num_passes > self._options.passes:
                return
            if self._arrivals is not None:
                self._arrivals.append(index)
            bucket.num_pending -= 1
            if bucket.num_pending == 0:
                self._queue.launch_full(self._launch)

    def _refuse_sparse(self, gradient: Gradient) -> None:
        grad = gradient.parameter.grad
        if grad is None or not grad.is_sparse or self._options.is_sparse_densified:
            return
        raise UsageError(
            f"gradients must be dense, got a sparse one for {gradient.name}. "
            "Pass sparse_as_dense=True, or make the embedding with sparse=False."
        )

    def _arm(self) -> None:
        # By number, since a backward that raises never calls back.
        backward = current_backward()
        if backward != self._armed_backward:
            self._armed_backward = backward
            call_at_end_of_backward(self._on_backward_end)

    @torch.no_grad()
    def _on_backward_end(self) -> None:
        with self._lock:
            if not self._is_open:
                return
            if not self._queue.is_all_launched and is_nested_backward():
                self._armed_backward = -1
                return
            self._finish_round()

    def _open_round(self) -> None:
        newcomers = self._queue.newcomers()
        if newcomers:
            check_same_gradients(self._communicator, self._gradients)
            # Backward makes gradients roughly in reverse; the first round shows how.
            self._queue.add(newcomers[::-1])
        self._queue.open()
        self._is_open = True

    def _launch(self, bucket: GradientBucket) -> None:
        bucket.launch(self._communicator, self._scaling, self._reduction)

    @torch.no_grad()
    def _finish_round(self) -> None:
        is_late = True
        while is_late:
            if not self._is_open:
                self._open_round()
            self._queue.launch_rest(self._launch)
            self._is_open = False
            self._num_rounds += 1
            is_late = self._queue.finish(self._scaling)
            if self._arrivals is not None:
                order = agree_on_order(self._communicator, self._arrivals)
                self._arrivals = None
                self._queue.rearrange(order)


def _release(hooks: list[RemovableHandle], communicator: Communicator) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
    communicator.close()
