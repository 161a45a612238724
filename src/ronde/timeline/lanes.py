"""Spans that overlap are put side by side: pure."""

import heapq
from collections.abc import Iterable, Sequence

Span = tuple[int, int]
"""Begin and end."""


class Lanes:
    """Gives each span the lowest lane in which nothing overlaps it.

    Spans must be given in the order of their begins.
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self._taken: list[tuple[int, int]] = []
        self.num_lanes = 0

    def place(self, begin: int, end: int) -> int:
        """Return the lane of a span; one that ends where another begins is clear."""
        while self._taken and self._taken[0][0] <= begin:
            heapq.heappush(self._free, heapq.heappop(self._taken)[1])
        if self._free:
            lane = heapq.heappop(self._free)
        else:
            lane = self.num_lanes
            self.num_lanes += 1
        heapq.heappush(self._taken, (max(end, begin + 1), lane))
        return lane


def nest(spans: Iterable[Span], within: Span) -> Sequence[Span]:
    """Cut spans so that each lies within those it begins in, and all within one.

    Args:
        spans: In any order.
        within: What holds them all.

    Returns:
        The spans in the order they were given, cut.
    """
    given = list(spans)
    cut: list[Span] = [within] * len(given)
    open_ends: list[int] = [within[1]]
    order = sorted(range(len(given)), key=lambda i: (given[i][0], -given[i][1]))
    for index in order:
        begin, end = given[index]
        begin = min(max(begin, within[0]), within[1])
        while len(open_ends) > 1 and open_ends[-1] <= begin:
            open_ends.pop()
        end = min(max(end, begin), open_ends[-1])
        cut[index] = (begin, end)
        open_ends.append(end)
    return cut
