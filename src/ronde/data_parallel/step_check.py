"""Finds ranks that ran backward unequally often between two optimizer steps."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ronde.errors import CollectiveError

NUM_MARKS = 3


@dataclass(slots=True)
class StepCheck:
    """Compares how many steps the ranks have taken, round by round.

    Each rank that trains marks one of three numbers, that of its steps modulo three. If
    more than one of the sums is not zero, a round has added up the gradients of
    different steps: some rank ran backward more often than the others.

    Attributes:
        num_steps: Steps that this rank has taken since all ranks began to count.
    """

    num_steps: int = 0
    _last: "_Marks | None" = None

    @property
    def mark(self) -> int:
        """The one of the numbers that this rank marks."""
        return self.num_steps % NUM_MARKS

    def check(self, marks: Tensor) -> None:
        """Look at the sums of a round's marks.

        Those of an accelerator are looked at when the next round is over: to read them
        at once, the program would have to wait for the accelerator in every step.

        Raises:
            CollectiveError: On all ranks, where they are not at the same step.
        """
        if marks.is_cpu:
            _check(marks, self.mark)
            return
        last, self._last = self._last, _Marks(marks, self.mark)
        if last is not None:
            last.check()


class _Marks:
    """Marks on their way from an accelerator."""

    def __init__(self, marks: Tensor, mark: int) -> None:
        self._mark = mark
        self._marks = torch.empty_like(marks, device="cpu", pin_memory=True)
        self._marks.copy_(marks, non_blocking=True)
        self._is_here = torch.Event(marks.device)
        self._is_here.record()

    def check(self) -> None:
        self._is_here.synchronize()
        _check(self._marks, self._mark)


def _check(marks: Tensor, mark: int) -> None:
    counts = list(map(round, cast("list[float]", marks.real.tolist())))
    if counts.count(0) == NUM_MARKS - 1:
        return
    # Behind in steps is who ran more backward passes before this one.
    behind = next(i for i in range(NUM_MARKS) if counts[i] and counts[i - 2])
    this = "this one among them" if mark == behind else "not on this one"
    raise CollectiveError(
        "Gradients were computed more than backward_passes_per_step times before call "
        f"to step() on {counts[behind]} of {sum(counts)} ranks, {this}. All ranks must "
        "run backward() equally often before each step(): even the passes out, or have "
        "a larger backward_passes_per_step accumulate them."
    )
