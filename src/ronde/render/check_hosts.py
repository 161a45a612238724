"""Names of hosts in few words: ``node[1-2,4-64], login``."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

_NUMBERS = re.compile(r"([0-9]+)")
_MAX_DIGITS = 9


class _Run(NamedTuple):
    """Numbers without a gap, and how many they are."""

    text: str
    num_hosts: int


def fold_hosts(names: Iterable[str], most: int = 1 << 16) -> str:
    """Return names in their order; those that differ in one number alone in brackets.

    What comes out is what ``-H`` takes, unless the end is only counted.

    Args:
        names: Each is told once.
        most: How many names and ranges to give; the hosts that are left are counted.
    """
    parts = [_NUMBERS.split(name) for name in dict.fromkeys(names)]
    varying = _varying_places(parts)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for part in parts:
        place = varying[_skeleton(part)]
        # An address is no number that counts up, and no list has brackets of its own.
        if not place or len(part[place]) > _MAX_DIGITS or _is_literal(part):
            groups["".join(part), "", ""] = []
            continue
        before, behind = "".join(part[:place]), "".join(part[place + 1 :])
        groups.setdefault((before, "[]", behind), []).append(part[place])
    return _join(groups, most)


def _join(groups: Mapping[tuple[str, str, str], Sequence[str]], most: int) -> str:
    words: list[str] = []
    num_left = 0
    for (before, brackets, behind), numbers in groups.items():
        runs = list(_runs(numbers)) if brackets else [_Run("", 1)]
        shown = runs[: max(0, most)]
        most -= len(shown)
        num_left += sum(run.num_hosts for run in runs[len(shown) :])
        inner = ",".join(run.text for run in shown)
        if shown:
            is_one = len(numbers) <= 1
            words.append(f"{before}{inner if is_one else f'[{inner}]'}{behind}")
    return ", ".join(words) + (f" and {num_left} more" if num_left else "")


def _skeleton(part: list[str]) -> tuple[str, ...]:
    return tuple(part[::2])


def _varying_places(parts: list[list[str]]) -> dict[tuple[str, ...], int]:
    """Return by skeleton where its names' last number that varies is; 0 for none."""
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for part in parts:
        alike.setdefault(_skeleton(part), []).append(part)
    return {
        skeleton: max(
            (n for n in range(1, len(same[0]), 2) if len({p[n] for p in same}) > 1),
            default=0,
        )
        for skeleton, same in alike.items()
    }


def _is_literal(part: list[str]) -> bool:
    return any(mark in text for text in part[::2] for mark in "[]:, \t")


def _runs(numbers: Iterable[str]) -> Iterator[_Run]:
    """Yield ``1``, ``4-64``: what counts up, written at the width of its low end."""
    ordered = sorted(numbers, key=lambda text: (int(text), len(text)))
    first, count = ordered[0], 1
    for text in [*ordered[1:], ""]:
        if text and text == f"{int(first) + count:0{len(first)}d}":
            count += 1
            continue
        last = f"{int(first) + count - 1:0{len(first)}d}"
        yield _Run(first if count == 1 else f"{first}-{last}", count)
        first, count = text, 1
