"""Works made of other works."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ronde.collectives import Work

T = TypeVar("T")
U = TypeVar("U")


class Mapped(Generic[T, U]):
    """A work whose result goes through a function, once."""

    def __init__(self, work: Work[T], function: Callable[[T], U]) -> None:
        self._work = work
        self._function = function
        self._results: list[U] = []

    def is_done(self) -> bool:
        """Say whether ``wait()`` would not block."""
        return self._work.is_done()

    def wait(self) -> U:
        """Return the function of the result."""
        if not self._results:
            self._results.append(self._function(self._work.wait()))
        return self._results[0]


class All(Generic[T]):
    """Several works as one, whose result is the tuple of theirs."""

    def __init__(self, works: Sequence[Work[T]]) -> None:
        self._works = works

    def is_done(self) -> bool:
        """Say whether all are done."""
        return all(work.is_done() for work in self._works)

    def wait(self) -> tuple[T, ...]:
        """Wait for all."""
        return tuple([work.wait() for work in self._works])
