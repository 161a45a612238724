"""Format sentences, lists, ranks and tables for the width of a terminal."""

import textwrap
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.units import (
    format_ranks as format_ranks,  # noqa: PLC0414  for users of ranks
    list_first,
    name_ranks,
)

WIDTH = 80
_MAX_RUNS = 8


def wrap(label: str, text: str, width: int = WIDTH, *, indent: int = 7) -> str:
    """Wrap a text after its label, with later lines indented."""
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=label,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines or [label.rstrip()]) + "\n"


def list_some(names: Sequence[str], most: int = 8, noun: str = "times") -> str:
    """Return a single name, or ``2 times: a, b`` with at most ``most`` names."""
    if len(names) == 1:
        return names[0]
    return f"{len(names)} {noun}: {list_first(names, most)}"


def shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most].rstrip()}..."


def align(
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    gap: str = "  ",
    most: int = 1 << 16,
) -> str:
    """Return a table; the first row has the headings.

    Column widths ignore rows with fewer cells, and characters beyond ``most``.

    Args:
        right: Headings of the columns that are aligned to the right.
    """
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [min(most, max(map(len, cells))) for cells in zip(*full, strict=True)]
    text = ""
    for row in rows:
        cells = [
            cell.rjust(width) if heading in right else cell.ljust(width)
            for heading, cell, width in zip(rows[0], row, widths, strict=False)
        ]
        text += gap.join(cells).rstrip() + "\n"
    return text


def format_runs(values: Sequence[str]) -> str:
    """Format values in order; runs and repeats are joined: ``0-7, 125 times``."""
    joined: list[tuple[list[str], int]] = []
    for value, same in groupby(values):
        count = len(list(same))
        if joined and joined[-1][1] == count and _follows(joined[-1][0][-1], value):
            joined[-1][0].append(value)
        else:
            joined.append(([value], count))
    shown: list[str] = []
    for word, same in groupby(_word(*run) for run in joined):
        count = len(list(same))
        shown.append(word if count == 1 else f"{word}, {count} times")
    rest = len(shown) - _MAX_RUNS
    return "; ".join(shown[:_MAX_RUNS]) + (f"; and {rest} more" if rest > 0 else "")


def _follows(before: str, after: str) -> bool:
    number = before[len(before.rstrip("0123456789")) :]
    name = before.removesuffix(number)
    return bool(number) and after == f"{name}{int(number) + 1:0{len(number)}d}"


def _word(values: list[str], count: int) -> str:
    word, each = values[0], ""
    if len(values) > 1:
        word += f"{'-' if values[0].isdecimal() else ' to '}{values[-1]}"
        each = "each "
    return word if count == 1 else f"{word}, {each}{count} times"


_MAX_HOSTS = 4


class RankChoice(NamedTuple):
    """A selection of a job's ranks."""

    ranges: tuple[range, ...]
    option: str  # for messages
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
                f"{self.option} must name ranks in 0..{max(numbers)}, got {highest}. "
                "Correct it, or leave the option out to see all."
            )
        return frozenset(
            rank
            for rank, number in enumerate(numbers)
            if any(number in each for each in self.ranges)
        )


def parse_ranks(text: str, option: str, *, is_local: bool = False) -> RankChoice:
    """Read ``3``, ``0-7``, ``0-7:2`` (every second rank), or several with commas."""
    ranges = tuple(_parse_range(part.strip()) for part in text.split(","))
    if not all(ranges):
        raise UsageError(
            f"{option} must be ranks such as 0,4-7 or 0-63:8, got {text!r}. "
            f"Type: {option} 0"
        )
    return RankChoice(ranges, option, is_local)


def _parse_range(text: str) -> range:
    span, has_step, step = text.partition(":")
    first, has_last, last = span.partition("-")
    words = [first, last if has_last else first, step if has_step else "1"]
    # A number of more digits may take seconds to convert.
    if not all(w.isascii() and w.isdecimal() and len(w) <= 9 for w in words):
        return range(0)
    start, end, by = map(int, words)
    return range(start, end + 1, by) if by else range(0)


def format_ranks_on_hosts(ranks: Sequence[tuple[int, str]]) -> str:
    """Return ``ranks 2-5 on node2, node3`` for ranks and the names of their hosts."""
    hosts = dict.fromkeys(host for _, host in ranks)
    where = ", ".join(hosts) if len(hosts) <= _MAX_HOSTS else f"{len(hosts)} hosts"
    return f"{name_ranks({rank for rank, _ in ranks})} on {where}"
