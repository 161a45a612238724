"""Hints: on which memory nodes a request for one resource could be met.

A set of nodes is the bits of a number; bit 0 is the first node that has CPUs, whatever
the kernel calls it. Nodes without CPUs have no bit.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Hint(NamedTuple):
    """One way to meet a request.

    Attributes:
        mask: Nodes that it takes; None where any will do.
        is_preferred: Whether no smaller set could ever do.
    """

    mask: int | None
    is_preferred: bool


ANY = (Hint(None, is_preferred=True),)
"""The hints of who has no preference."""

NOWHERE = (Hint(None, is_preferred=False),)
"""The hints of a request that no nodes can meet."""


def filter_hints(
    providers: Sequence[Mapping[str, Sequence[Hint] | None] | None],
) -> list[tuple[Hint, ...]]:
    """Return the hints of each resource; nobody's silence is an obstacle.

    Args:
        providers: Of each, hints by resource: None where it has no preference, none at
            all where it cannot meet the request.
    """
    found: list[tuple[Hint, ...]] = []
    for provided in providers:
        if not provided:
            found.append(ANY)
            continue
        of_each = provided.values()
        found += [
            ANY if hints is None else tuple(hints) or NOWHERE for hints in of_each
        ]
    return found


def counted_hints(
    total: Sequence[int],
    free: Sequence[int],
    quantity: int,
    is_allowed: Callable[[int], bool] | None = None,
) -> tuple[Hint, ...]:
    """Return a hint for each set of nodes that can meet a request now.

    Preferred are the smallest that could meet it if all were free: what others have
    scattered is no excuse.

    Args:
        total: What each node has, by bit.
        free: What of that is free.
        quantity: What is asked for, at least 1.
        is_allowed: Whether a set may be used; None where all may.
    """
    had, left = _sums(total), _sums(free)
    masks = range(1, len(had))
    smallest = min((m.bit_count() for m in masks if had[m] >= quantity), default=0)
    return tuple(
        Hint(mask, mask.bit_count() == smallest)
        for mask in masks
        if left[mask] >= quantity and (is_allowed is None or is_allowed(mask))
    )


def _sums(counts: Sequence[int]) -> list[int]:
    """Return what each set of nodes has together, by its mask."""
    sums = [0]
    for count in counts:
        sums += [each + count for each in sums]
    return sums
