"""The algorithms, one file each: pure functions that return schedules."""

from ronde.collectives.algorithms.catalogue import (
    ALGORITHMS,
    Algorithm,
    find_algorithm,
)

__all__ = ["ALGORITHMS", "Algorithm", "find_algorithm"]
