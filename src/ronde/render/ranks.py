"""Ranks in words, both ways: ``0,4-7`` or ``0-63:8``."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ronde.errors import UsageError

_MAX_RANGES = 4
_MAX_HOSTS = 4


class RankChoice(NamedTuple):
    """Some of a job's ranks."""

    ranges: tuple[range, ...]
    option: str  # that named them, for messages
    is_local: bool = False  # the numbers count from 0 on every host

    def among(self, hosts: Sequence[str]) -> frozenset[int]:
        numbers = list(range(len(hosts)))
        if self.is_local:
            seen: Counter[str] = Counter()
            for rank, host in enumerate(hosts):
                numbers[rank] = seen[host]
                seen[host] += 1
        highest = max(each[-1] for each in self.ranges)
        if highest > max(numbers):
            raise UsageError(
                f"{self.option} must name ranks of 0..{max(numbers)}, got {highest}. "
                "Name others, or leave the option out to see all."
            )
        return frozenset(
            rank
            for rank, number in enumerate(numbers)
            if any(number in each for each in self.ranges)
        )


def parse_ranks(text: str, option: str, *, is_local: bool = False) -> RankChoice:
    """Read ``3``, ``0-7``, ``0-7:2`` (every second) or several with commas between."""
    ranges = tuple(_parse_range(part.strip()) for part in text.split(","))
    if not all(ranges):
        raise UsageError(
            f"{option} must be ranks as 0,4-7 or 0-63:8, got {text!r}. Type: {option} 0"
        )
    return RankChoice(ranges, option, is_local)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ``0-3, 5``; the end of a long list is only counted."""
    ordered = sorted(ranks)
    runs: list[range] = []
    for rank in ordered:
        if runs and rank == runs[-1].stop:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    shown = [f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs[:_MAX_RANGES]]
    num_left = sum(len(run) for run in runs[_MAX_RANGES:])
    return ", ".join(shown) + (f" and {num_left} more" if num_left else "")


def _parse_range(text: str) -> range:
    span, has_step, step = text.partition(":")
    first, has_last, last = span.partition("-")
    words = [first, last if has_last else first, step if has_step else "1"]
    # Nine digits: a number that no machine takes seconds to read.
    if not all(w.isascii() and w.isdecimal() and len(w) <= 9 for w in words):
        return range(0)
    start, end, by = map(int, words)
    return range(start, end + 1, by) if by else range(0)


def format_places(places: Sequence[tuple[int, str]]) -> str:
    """Return ``ranks 2-5 on node2, node3`` for ranks and the names of their hosts."""
    hosts = dict.fromkeys(host for _, host in places)
    where = ", ".join(hosts) if len(hosts) <= _MAX_HOSTS else f"{len(hosts)} hosts"
    ranks = sorted({rank for rank, _ in places})
    return f"rank{'s' if len(ranks) != 1 else ''} {format_ranks(ranks)} on {where}"
