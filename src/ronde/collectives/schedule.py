"""Schedules: which rank sends what to whom, round by round, as plain values.

A schedule moves nothing. An engine executes it, a test interprets it, a predictor adds
up its loads; all three see the same object. It never holds all ranks' parts: one rank's
is computed when it is asked for, and the loads are known without any.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Action(StrEnum):
    """What a rank does with chunks of its vector in one round."""

    SEND = "send"
    REDUCE = "reduce"
    """Receive and combine with what is there."""
    COPY = "copy"
    """Receive in place of what is there."""


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """One message, as one of its two ranks sees it."""

    action: Action
    peer: int
    first: int
    """The first of ``count`` consecutive chunks."""
    count: int = 1

    @property
    def is_receive(self) -> bool:
        return self.action is not Action.SEND


Round = tuple[ScheduleStep, ...]
"""What one rank does at once: all that it sends is what it held before the round, and
it writes nothing that it sends."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """A vector cut into consecutive ranges of elements, some of which may be empty."""

    num_chunks: int
    numel: int
    offsets: tuple[int, ...] | None = None
    """Where each chunk begins, and the end; None where they are as even as can be, the
    first ones being the larger."""

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> "Chunks":
        offsets = (0, *itertools.accumulate(sizes))
        return cls(len(sizes), offsets[-1], offsets)

    def start(self, chunk: int) -> int:
        """Return the first element of ``chunk``; of ``num_chunks``, the end."""
        if self.offsets is not None:
            return self.offsets[chunk]
        base, extra = divmod(self.numel, self.num_chunks)
        return chunk * base + min(chunk, extra)

    def span(self, first: int, count: int = 1) -> tuple[int, int]:
        """Return the first element of some consecutive chunks, and the one after."""
        return self.start(first), self.start(first + count)

    def largest(self, count: int = 1) -> int:
        """Return the most elements in ``count`` chunks that follow each other.

        The first chunk follows the last.
        """
        if self.offsets is None:
            base, extra = divmod(self.numel, self.num_chunks)
            return count * base + min(count, extra)
        return max(self._in_ring(first, count) for first in range(self.num_chunks))

    def _in_ring(self, first: int, count: int) -> int:
        """Count the elements of chunks of which the first follows the last."""
        last = first + count
        over = self.start(max(0, last - self.num_chunks))
        return self.start(min(last, self.num_chunks)) - self.start(first) + over


@dataclass(frozen=True, slots=True)
class Load:
    """What the busiest rank has to do in some rounds."""

    num_rounds: int
    numel: int
    """The most elements that any one rank sends, or receives, in any of them."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How ``size`` ranks carry one collective out."""

    name: str
    size: int
    chunks: Chunks
    loads: tuple[Load, ...]
    part: Callable[[int], Iterable[Round]]
    """What one rank does, round by round; rounds in which it does nothing too."""

    @property
    def num_rounds(self) -> int:
        return sum(load.num_rounds for load in self.loads)

    def of_rank(self, rank: int) -> Iterator[Round]:
        return iter(self.part(rank))

    def num_sent(self, rank: int) -> int:
        return sum(
            self.numel_of(step)
            for steps in self.of_rank(rank)
            for step in steps
            if not step.is_receive
        )

    def numel_of(self, step: ScheduleStep) -> int:
        start, stop = self.chunks.span(step.first, step.count)
        return stop - start

    def seconds(self, alpha_s: float, beta_s: float) -> float:
        """Return what the rounds take, one after the other.

        Source: Hockney's model, as in Thakur, Rabenseifner and Gropp, "Optimization of
        collective communication operations in MPICH", 2005.
        """
        return sum(
            load.num_rounds * (alpha_s + beta_s * load.numel) for load in self.loads
        )


def renamed(steps: Round, rank_of: Callable[[int], int]) -> Round:
    """Return the round with other peers: ``rank_of`` tells which."""
    return tuple(replace(step, peer=rank_of(step.peer)) for step in steps)


def runs_of(first: int, count: int, num_chunks: int) -> list[tuple[int, int]]:
    """Cut chunks of which the first follows the last into runs that do not wrap."""
    first %= num_chunks
    fitting = min(count, num_chunks - first)
    runs = [(first, fitting)]
    if fitting < count:
        runs.append((0, count - fitting))
    return runs
