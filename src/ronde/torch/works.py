"""Works made of other works."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from ronde.collectives import Look, Work

T = TypeVar("T")


class _OfAnother(Work[T]):
    """What is over when another work is."""

    __slots__ = ("_work",)
    _work: Work[Any]

    def is_done(self) -> bool:
        """Say whether ``wait()`` would not block."""
        return self._work.is_done()

    def wait_watched(self, look: Look) -> bool:
        """Block until it is over or ``look`` says to stop: see ``Work``."""
        return self._work.wait_watched(look)


class Given(_OfAnother[T]):
    """A work whose result was known before it began, such as a tensor in place."""

    __slots__ = ()

    def __init__(self, work: Work[Any], result: T) -> None:
        self._work = work
        self._result = result

    def wait(self) -> T:
        """Wait and return the result."""
        self._work.wait()
        return self._result


class Only(_OfAnother[T]):
    """A work whose result is the only one of another's."""

    __slots__ = ()

    def __init__(self, work: Work[tuple[T, ...]]) -> None:
        self._work = work

    def wait(self) -> T:
        """Wait and return the result."""
        return self._work.wait()[0]


class Exchanged(_OfAnother[tuple[Tensor, Tensor]]):
    """An all-to-all, whose counts of rows become a tensor like the splits it got."""

    __slots__ = ("_device",)

    def __init__(
        self, work: Work[tuple[tuple[Tensor, list[int]], ...]], splits: object
    ) -> None:
        self._work = work
        self._device = splits.device if isinstance(splits, Tensor) else None

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return what was received and, int32, how many rows came from each rank."""
        received, counts = self._work.wait()[0]
        return received, torch.tensor(counts, dtype=torch.int32, device=self._device)
