"""Small all-reduces of ranks that share memory, without messages.

Note [Fast path]
    Normally a cached all-reduce of a few bytes takes three exchanges between ranks: up
    the tree, down the tree, and the reduction. If all ranks share memory, one exchange
    is enough. In a *round* each rank publishes its elements and the number of its
    request in the cache, the *tag*. If all tags are equal, every rank reduces. If not,
    every rank submits its operation in the normal way.

    Every rank enters every round exactly once, so the outcome of a round is the same on
    all ranks. Tags and elements of odd and even rounds are stored apart, and a rank
    enters a round only when the one before is complete. So no rank overwrites tags and
    elements before all ranks have read them.

    A rank refuses the round (tag 0) if it is in a normal wait, or if it computes for
    long while others wait. After a round without a result all ranks skip the fast path
    for a number of operations, which grows each time. The ranks count the same rounds
    and operations, so they return to the fast path at the same time.

    A rank enters the round (a store), then reads the other ranks' words (loads). So the
    last rank sees that the round is complete and wakes the sleepers. A sleeper sets its
    flag, reads the words again, then sleeps on a word, which its waker changes first.
    Several ranks may see that the round is complete; all store the same number.
"""

import time
from typing import NamedTuple

import torch
from torch import Tensor

from ronde.collectives.arithmetic import require_reducible, scale_
from ronde.collectives.engines.shared_memory.phases import ReduceKernel, Scratch
from ronde.collectives.engines.shared_memory.waiting import (
    CONTENTION,
    IS_WEAKLY_ORDERED,
    fence,
    sleep_while,
    wake_all,
)
from ronde.collectives.torch_modes import writing_to
from ronde.coordination.control.doorbell import NEAR
from ronde.coordination.control.shared_memory import (
    LINE,
    PAGE_BYTES,
    ROUND_BYTES,
    ROUNDS_AT,
    SharedMemoryTransport,
)
from ronde.coordination.requests import Entry, Request
from ronde.errors import UsageError

_MAX_PLANS = 1024
_MOST_SKIPPED = 64
_REFUSED = 0  # the tag of a rank that refuses the round
_NUMBER, _TAGS, _SLEEP_STATE, _WAKE = 0, 1, LINE, 2 * LINE
_AWAKE, _ASLEEP, _ASKING = 0, 1, 2


class _Plan(NamedTuple):
    """The reduction of a cached request, with its tensors in shared memory."""

    kernel: ReduceKernel
    prescale: float
    views: list[list[Tensor]]  # by even or odd round, and rank


class FastPath:
    """One rank's fast path; ``wait`` and ``is_awaited`` may run concurrently.

    Attributes:
        num_polls: The number of polls of ``wait`` before it sleeps.
        first_nap_s: The first interval between polls of a sleeping wait; it doubles.
        patience_s: The time until a wait asks the other ranks to refuse the round.
    """

    def __init__(self, shared: SharedMemoryTransport) -> None:
        self.num_polls, self.first_nap_s, self.patience_s = NEAR, 0.001, 0.05
        segments, own = shared.segments, shared.own
        stop = ROUNDS_AT + PAGE_BYTES
        words = [segment.view[ROUNDS_AT:stop].cast("Q") for segment in segments]
        addresses = [segment.address + ROUNDS_AT + 8 * _WAKE for segment in segments]
        self._own, self._address = words[own], addresses[own]
        self._others = list(zip(words, addresses, shared.doorbells, strict=True))
        del self._others[own]
        self._other_words = [each for each, _, _ in self._others]
        self._memories = [segment.tensor for segment in segments]
        self._rank, self._size = own, len(segments)
        self._number = 0  # the last round that this rank entered; the first is 1
        self._has_waiter = False  # a thread is in ``wait``
        self._scratch = Scratch()
        self._plans: dict[int, _Plan | None] = {}
        self._in_progress: tuple[Entry, _Plan] | None = None
        self._num_skipped = self._num_left = 0

    def start(self, entry: Entry, tag: int, request: Request) -> bool:
        """Enter a round with an operation; return False if that is impossible.

        ``tag`` is the request's number in the cache, equal on all ranks and not 0.
        """
        if (
            self._num_left
            or self._in_progress
            or self._has_waiter
            or not self._is_complete(self._number)
        ):
            return False
        plans = self._plans
        if tag not in plans:
            if len(plans) >= _MAX_PLANS:
                plans.clear()
            plans[tag] = self._plan(request)
        plan = plans[tag]
        if plan is None:
            return False
        source, output = entry.operation.tensors[0], entry.operation.outputs[0]
        for tensor in (source, output):
            if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                return False
        own = plan.views[self._number + 1 & 1][self._rank]
        own.copy_(source if source.dim() == 1 else source.view(-1))
        if plan.prescale != 1.0:
            scale_(own, plan.prescale)
        self._in_progress = entry, plan
        self._enter_round(tag)
        return True

    def finish(self, *, is_late: bool = False) -> tuple[Entry, bool] | None:
        """End the round if it is complete; ``is_late`` asks other ranks to enter it.

        Returns None if no round ended, else the entry and True if the entry is over.
        With False the entry must be submitted in the normal way.
        """
        if self._in_progress is None:
            return None
        number, own = self._number, self._own
        if not self._is_complete(number):
            if not is_late:
                return None
            own[_SLEEP_STATE] = _ASKING  # the last rank notifies this one
            fence()
            for words, _, doorbell in self._others:
                if words[_NUMBER] < number:
                    doorbell.notify()
            if not self._is_complete(number):
                return None
        own[_SLEEP_STATE] = _AWAKE  # no other rank may wake it any more
        if self._has_waiter:
            own[_WAKE] = number
            wake_all(self._address)
        (entry, plan), self._in_progress = self._in_progress, None
        index = _TAGS + (number & 1)
        for words in self._other_words:
            if words[index] != own[index]:
                self._skip()
                return entry, False
        self._num_skipped = 0
        _reduce(entry, plan, number)
        return entry, True

    def is_awaited(self) -> bool:
        return any(words[_NUMBER] > self._number for words in self._other_words)

    def is_asked(self) -> bool:
        return any(
            words[_SLEEP_STATE] == _ASKING and words[_NUMBER] > self._number
            for words in self._other_words
        )

    def refuse(self) -> None:
        """Refuse a round that other ranks have entered and this rank has not.

        Call ``finish`` before, as this rank's last round is complete then and must not
        be taken for the refused round.
        """
        if self._in_progress is None and self.is_awaited():
            self._enter_round(_REFUSED)
            self._skip()

    def ran(self) -> None:
        """Count an operation that did not use the fast path."""
        if self._num_left:
            self._num_left -= 1

    def wait(self, timeout_s: float) -> None:
        """Wait until the round is complete or must be refused, at most for the timeout.

        The round must be refused if another rank sleeps in a normal wait. Other threads
        may call ``finish`` meanwhile.
        """
        number, is_complete = self._number, self._is_complete
        if CONTENTION.spin(lambda: is_complete(number), self.num_polls):
            return
        own = self._own
        try:
            self._has_waiter = True
            own[_SLEEP_STATE] = _ASLEEP
            fence()
            self._sleep(number, time.monotonic() + timeout_s)
        finally:
            own[_SLEEP_STATE] = _AWAKE
            self._has_waiter = False

    def _sleep(self, number: int, deadline: float) -> None:
        nap_s = self.first_nap_s
        while True:
            value = self._own[_WAKE]
            if self._is_complete(number):
                return
            sleep_while(self._address, value & 0xFFFFFFFF, nap_s)
            if self._is_complete(number) or time.monotonic() >= deadline:
                return
            if any(
                words[_NUMBER] < number and doorbell.has_sleeper()
                for words, _, doorbell in self._others
            ):
                return
            nap_s *= 2

    def _enter_round(self, tag: int) -> None:
        """Enter the next round, after the last is complete and elements are stored."""
        number = self._number = self._number + 1
        own = self._own
        own[_TAGS + (number & 1)] = tag
        if IS_WEAKLY_ORDERED:
            fence()
        own[_NUMBER] = number
        fence()
        if self._is_complete(number):
            for words, address, doorbell in self._others:
                state = words[_SLEEP_STATE]
                if state == _ASLEEP:
                    words[_WAKE] = number
                    wake_all(address)
                elif state == _ASKING:
                    doorbell.notify()

    def _is_complete(self, number: int) -> bool:
        """Return True if all ranks have entered a round; thread-safe."""
        for words in self._other_words:
            if words[_NUMBER] < number:
                return False
        if IS_WEAKLY_ORDERED:
            fence()
        return True

    def _skip(self) -> None:
        self._num_skipped = min(2 * self._num_skipped or 1, _MOST_SKIPPED)
        self._num_left = self._num_skipped

    def _plan(self, request: Request) -> _Plan | None:
        """Return the reduction of a request; None if the fast path cannot run it."""
        if len(request.shapes) != 1 or request.device != "cpu":
            return None
        dtype = request.torch_dtypes[0]
        num_bytes = torch.Size(request.shapes[0]).numel() * dtype.itemsize
        op, postscale = request.reduce_op, request.postscale
        if not 0 < num_bytes <= ROUND_BYTES:
            return None
        try:
            require_reducible(dtype, op, request.prescale, postscale)
        except UsageError:
            return None
        start = ROUNDS_AT + PAGE_BYTES
        # The views outlive the inference mode of this call.
        with torch.inference_mode(mode=False):
            views = [
                [each[at : at + num_bytes].view(dtype) for each in self._memories]
                for at in (start, start + ROUND_BYTES)
            ]
        kernel = ReduceKernel(dtype, op, self._size, postscale, self._scratch)
        return _Plan(kernel, request.prescale, views)


def _reduce(entry: Entry, plan: _Plan, number: int) -> None:
    output = entry.operation.outputs[0]
    try:
        with writing_to((output,)):
            flat = output if output.dim() == 1 else output.view(-1)
            plan.kernel.combine(plan.views[number & 1], flat)
    except Exception as error:  # noqa: BLE001 - only on this rank: out of memory
        entry.fail(error)
    else:
        if not entry.is_over:
            entry.succeed((output,))
