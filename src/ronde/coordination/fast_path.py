"""Small all-reduces that every rank asks for at once: agreed and reduced in one go.

Note [Fast path]
    A cached all-reduce of a few bytes takes two hand-offs in the ordinary way, up the
    tree and down, and one more to reduce. Where all ranks share memory, one does: each
    shows its number of the request together with its elements, and where all numbers
    are the same every rank reduces. If not, all go the ordinary way, each with what it
    had. Which of the two it is comes from the round alone, so it is the same on all
    ranks: see ``control/rounds.py``, Note [One exchange].

    A rank that is in an ordinary wait, or computes for long while others ask, refuses
    the round. After a round without a result all leave some runs to the ordinary way,
    more and more of them; all have seen the same rounds and the same runs, so they
    come back together.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ronde.collectives.arithmetic import require_reducible, scale_
from ronde.collectives.engines.shared_memory.reductions import ReduceKernel, Scratch
from ronde.collectives.torch_modes import writing_to
from ronde.coordination.control.rounds import REFUSED, ROUND_BYTES, Rounds
from ronde.coordination.entries import Entry
from ronde.coordination.operations import Kind
from ronde.coordination.requests import Request
from ronde.errors import UsageError

ENGINES = ("auto", "shared_memory")
"""Communicators that reduce so few bytes of one host in the same way."""
_MAX_PLANS = 1024
_MOST_SKIPPED = 64


class _Plan(NamedTuple):
    """How a request is reduced.

    Attributes:
        kernel: Makes one tensor of all ranks'.
        prescale: Multiplies this rank's before.
        views: Where all ranks show theirs, in even and odd rounds.
    """

    kernel: ReduceKernel
    prescale: float
    views: list[list[Tensor]]


class FastPath:
    """One rank's part; one thread at a time, save for ``rounds.wait``.

    Attributes:
        rounds: Shared with the other ranks.
    """

    def __init__(self, rounds: Rounds, rank: int, size: int) -> None:
        self.rounds = rounds
        self._rank, self._size = rank, size
        self._scratch = Scratch()
        self._plans: dict[int, _Plan | None] = {}
        self._under_way: tuple[Entry, _Plan] | None = None
        self._num_skipped = 0
        self._num_left = 0

    def start(self, entry: Entry, tag: int, request: Request) -> bool:
        """Show the others an operation; say whether that was possible.

        Args:
            entry: The operation; nothing else is under way.
            tag: The request's number in the cache, the same on all ranks; not 0.
            request: What the operation asks for.
        """
        rounds = self.rounds
        if (
            self._num_left
            or self._under_way
            or rounds.has_waiter
            or not rounds.is_complete(rounds.number)
        ):
            return False
        plans = self._plans
        if tag in plans:
            plan = plans[tag]
        else:
            if len(plans) >= _MAX_PLANS:
                plans.clear()
            plan = plans[tag] = self._plan(request)
        if plan is None:
            return False
        source, output = entry.operation.tensors[0], entry.operation.outputs[0]
        if not (_is_plain(source) and _is_plain(output)):
            return False
        own = plan.views[rounds.number + 1 & 1][self._rank]
        own.copy_(_flat(source))
        if plan.prescale != 1.0:
            scale_(own, plan.prescale)
        self._under_way = entry, plan
        rounds.take_part(tag)
        return True

    def finish(self, *, is_late: bool = False) -> tuple[Entry, bool] | None:
        """End the round if all ranks have come to it.

        Args:
            is_late: Have the others answer if they have not.

        Returns:
            What this rank showed, and whether it is over now, or else is to go the
            ordinary way; None where nothing ended.
        """
        if self._under_way is None:
            return None
        rounds = self.rounds
        number = rounds.number
        if not rounds.is_complete(number):
            if is_late:
                rounds.ask()
            if not (is_late and rounds.is_complete(number)):
                return None
        rounds.rest()
        (entry, plan), self._under_way = self._under_way, None
        if not rounds.is_unanimous():
            self._fail()
            return entry, False
        self._num_skipped = 0
        output = entry.operation.outputs[0]
        try:
            with writing_to((output,)):
                plan.kernel.combine(plan.views[number & 1], _flat(output))
        except Exception as error:  # noqa: BLE001 - of this rank alone: out of memory
            entry.fail(error)
        if not entry.is_over:
            entry.succeed((output,))
        return entry, True

    def refuse(self) -> None:
        """Have others that wait for this rank go the ordinary way."""
        rounds = self.rounds
        # Nobody can be ahead of a round that is not complete.
        if rounds.is_awaited():
            rounds.take_part(REFUSED)
            self._fail()

    def ran(self) -> None:
        """Note that something was run in the ordinary way."""
        if self._num_left:
            self._num_left -= 1

    def _fail(self) -> None:
        self._num_skipped = min(2 * self._num_skipped or 1, _MOST_SKIPPED)
        self._num_left = self._num_skipped

    def _plan(self, request: Request) -> _Plan | None:
        """Return how a request is reduced; None where that is not done here."""
        is_alone = len(request.shapes) == 1
        if (
            request.kind is not Kind.ALLREDUCE
            or not is_alone
            or request.device != "cpu"
        ):
            return None
        dtype: torch.dtype = getattr(torch, request.dtypes[0])
        numel = torch.Size(request.shapes[0]).numel()
        op, postscale = request.reduce_op, request.postscale
        if not 0 < numel * dtype.itemsize <= ROUND_BYTES:
            return None
        try:
            require_reducible(dtype, op, request.prescale, postscale)
        except UsageError:
            return None
        kernel = ReduceKernel(dtype, op, self._size, postscale, self._scratch)
        return _Plan(kernel, request.prescale, self.rounds.views(dtype, numel))


def _is_plain(tensor: Tensor) -> bool:
    """Say whether a tensor's memory is its elements, one after the other."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 1 else tensor.view(-1)
