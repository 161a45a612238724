"""Small all-reduces that all ranks of a host want at once: one hand-off, no messages.

Note [Fast path]
    A cached all-reduce of a few bytes takes two hand-offs in the ordinary way, up the
    tree and down, and one more to reduce. Where all ranks share memory, one does: in a
    *round* each shows its number of the request, the *tag*, and its elements, and where
    all tags are the same every rank reduces. If not, all go the ordinary way, each with
    what it had.

    Every rank takes part in every round, once, and cannot take that back: so what comes
    of a round is the same on all ranks. The tags and bytes of a round lie apart from
    those of the next, and nobody takes part in a round before the one before it is
    complete: so they stay until all ranks have come to the next round but one, that is,
    have read them.

    A rank that is in an ordinary wait, or computes for long while others ask, refuses
    the round. After a round without a result all leave some runs to the ordinary way,
    more and more of them; all have seen the same rounds and the same runs, so they
    come back together.

    A rank takes part (a store), then looks who has (loads); the last one so sees all,
    and wakes those who sleep. A sleeper marks that it sleeps, then looks once more,
    then sleeps on a word that its waker changes before it wakes. Several may find that
    they were last, and all store the same number.
"""

import time
from itertools import repeat
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
_REFUSED = 0  # the tag of a rank that has nothing to show
_NUMBER, _TAGS, _SLEEP_STATE, _WAKE = 0, 1, LINE, 2 * LINE
_AWAKE, _ASLEEP, _ASKING = 0, 1, 2


class _Plan(NamedTuple):
    """How a request is reduced; ranks show theirs in views of even and odd rounds."""

    kernel: ReduceKernel
    prescale: float
    views: list[list[Tensor]]


class FastPath:
    """One rank's part; one thread at a time, save for ``wait`` and ``is_awaited``.

    Attributes:
        num_looks: Of ``wait``, before it sleeps.
        first_nap_s: Of its sleep: so long until it looks for itself.
        patience_s: After so long, whoever has not come is to refuse.
    """

    def __init__(self, shared: SharedMemoryTransport) -> None:
        self.num_looks, self.first_nap_s, self.patience_s = NEAR, 0.001, 0.05
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
        self._number = 0  # the last round that this rank took part in; the first is 1
        self._has_waiter = False  # a thread is in ``wait``
        self._scratch = Scratch()
        self._plans: dict[int, _Plan | None] = {}
        self._under_way: tuple[Entry, _Plan] | None = None
        self._num_skipped = self._num_left = 0

    def start(self, entry: Entry, tag: int, request: Request) -> bool:
        """Show the others an operation; return whether that was possible.

        ``tag`` is the request's number in the cache, the same on all ranks; not 0.
        """
        if (
            self._num_left
            or self._under_way
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
            # Its memory must be its elements, one after the other.
            if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                return False
        own = plan.views[self._number + 1 & 1][self._rank]
        own.copy_(source if source.dim() == 1 else source.view(-1))
        if plan.prescale != 1.0:
            scale_(own, plan.prescale)
        self._under_way = entry, plan
        self._take_part(tag)
        return True

    def finish(self, *, is_late: bool = False) -> tuple[Entry, bool] | None:
        """End the round if all have come to it; if ``is_late``, have others answer.

        Returns what this rank showed, and whether it is over now, or else is to go the
        ordinary way; None where nothing ended.
        """
        if self._under_way is None:
            return None
        number, own = self._number, self._own
        if not self._is_complete(number):
            if not is_late:
                return None
            own[_SLEEP_STATE] = _ASKING  # have the last one notify this rank
            fence()
            for words, _, doorbell in self._others:
                if words[_NUMBER] < number:
                    doorbell.notify()
            if not self._is_complete(number):
                return None
        own[_SLEEP_STATE] = _AWAKE  # so that nobody else may wake it any more
        if self._has_waiter:
            own[_WAKE] = number
            wake_all(self._address)
        (entry, plan), self._under_way = self._under_way, None
        place = _TAGS + (number & 1)
        for words in self._other_words:
            if words[place] != own[place]:
                self._skip()
                return entry, False
        self._num_skipped = 0
        _reduce(entry, plan, number)
        return entry, True

    def is_awaited(self) -> bool:
        return any(words[_NUMBER] > self._number for words in self._other_words)

    def is_asked(self) -> bool:
        """Return whether one of them wants an answer now."""
        return any(
            words[_SLEEP_STATE] == _ASKING and words[_NUMBER] > self._number
            for words in self._other_words
        )

    def refuse(self) -> None:
        """Answer those who have come to a round that this rank has not.

        Nobody can be ahead of a round that is not complete: the last one of this rank
        is, but is to be finished before. Else this rank would take the answer for it,
        and ask again for what the others have.
        """
        if self._under_way is None and self.is_awaited():
            self._take_part(_REFUSED)
            self._skip()

    def ran(self) -> None:
        """Note that something ran in the ordinary way."""
        if self._num_left:
            self._num_left -= 1

    def wait(self, timeout_s: float) -> None:
        """Return when the round is complete, or will not be by itself.

        That is: it took too long, or another rank sleeps in an ordinary wait. The
        thread that took part may wait while others call ``finish``.
        """
        number, is_complete, pause = self._number, self._is_complete, CONTENTION.pause
        for _ in repeat(None, CONTENTION.num_looks(self.num_looks)):
            if is_complete(number):
                return
            if not pause():
                break
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

    def _take_part(self, tag: int) -> None:
        """Come to the next round, all bytes being there; the last must be complete."""
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
        """Return whether all have come to a round that this one came to; any thread."""
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
        """Return how an all-reduce is done; None where that is not done here."""
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
        # They outlive the call, and what that was made in.
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
    except Exception as error:  # noqa: BLE001 - of this rank alone: out of memory
        entry.fail(error)
    else:
        if not entry.is_over:
            entry.succeed((output,))
