"""Which algorithms there are, by the names that users give."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ronde.collectives.algorithms import halving_doubling, ring, tree
from ronde.collectives.schedule import Chunks, Schedule
from ronde.errors import UsageError


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A schedule for each collective.

    Attributes:
        name: What users call it.
        all_reduce: Takes the number of ranks and of elements.
        reduce_scatter: Takes one chunk a rank, which that rank is to have.
        all_gather: Takes one chunk a rank, which that rank has.
        broadcast: Takes the number of ranks and of elements, and the root.
    """

    name: str
    all_reduce: Callable[[int, int], Schedule]
    reduce_scatter: Callable[[Chunks], Schedule]
    all_gather: Callable[[Chunks], Schedule]
    broadcast: Callable[[int, int, int], Schedule]


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "ring": Algorithm(
            "ring",
            ring.all_reduce,
            ring.reduce_scatter,
            ring.all_gather,
            ring.broadcast,
        ),
        # A tree cannot save anything where every rank's chunk goes a way of its own.
        "tree": Algorithm(
            "tree",
            tree.all_reduce,
            ring.reduce_scatter,
            ring.all_gather,
            tree.broadcast,
        ),
        "halving_doubling": Algorithm(
            "halving_doubling",
            halving_doubling.all_reduce,
            halving_doubling.reduce_scatter,
            halving_doubling.all_gather,
            halving_doubling.broadcast,
        ),
    }
)
"""The algorithms that run on any ranks, wherever they are."""


def find_algorithm(name: str) -> Algorithm:
    """Return the algorithm of that name.

    Raises:
        UsageError: There is none.
    """
    if name not in ALGORITHMS:
        raise UsageError(
            f"algorithm must be one of {', '.join(ALGORITHMS)}, got {name!r}."
        )
    return ALGORITHMS[name]
