"""Many values in few words: ``0-7, 125 times``."""

from collections.abc import Sequence
from itertools import groupby

_MAX_RUNS = 8


def format_runs(values: Sequence[str]) -> str:
    """Return what the values are, in their order; equal and counted up ones together.

    Of what stays long after that, the end is counted only.
    """
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    words = [_word(*run) for run in _counted_up(runs)]
    shown = [
        word if count == 1 else f"{word}, {count} times"
        for word, count in ((w, len(list(same))) for w, same in groupby(words))
    ]
    rest = len(shown) - _MAX_RUNS
    return "; ".join(shown[:_MAX_RUNS]) + (f"; and {rest} more" if rest > 0 else "")


def _counted_up(runs: list[tuple[str, int]]) -> list[tuple[list[str], int]]:
    """Join runs of one length whose values count up: ``0``, ``1`` or ``a8``, ``a9``."""
    joined: list[tuple[list[str], int]] = []
    for value, count in runs:
        if joined and joined[-1][1] == count and _follows(joined[-1][0][-1], value):
            joined[-1][0].append(value)
        else:
            joined.append(([value], count))
    return joined


def _follows(before: str, after: str) -> bool:
    """Whether the two are alike but for a number at the end that is one higher."""
    number = _number_at_end(before)
    name = before.removesuffix(number)
    return bool(number) and after == f"{name}{int(number) + 1:0{len(number)}d}"


def _number_at_end(text: str) -> str:
    return text[len(text.rstrip("0123456789")) :]


def _word(values: list[str], count: int) -> str:
    if len(values) == 1:
        return values[0] if count == 1 else f"{values[0]}, {count} times"
    between = "-" if values[0].isdecimal() else " to "
    word = f"{values[0]}{between}{values[-1]}"
    return word if count == 1 else f"{word}, each {count} times"
