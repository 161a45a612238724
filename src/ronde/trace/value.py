"""A trace as a value, wherever it was read from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ronde.timeline.events import Recorded
from ronde.timeline.lateness import Arrival, Key


@dataclass(frozen=True, slots=True)
class RankTrace:
    """One rank's records.

    Attributes:
        rank: Among all.
        host: Its name; empty where nobody said.
        clock_error_us: How far its times may be off rank 0's clock; None where nobody
            measured.
        num_dropped: Operations that are missing.
        is_whole: Whether its recording ended in order.
        operations: On the common clock.
    """

    rank: int
    host: str
    clock_error_us: float | None
    num_dropped: int
    is_whole: bool
    operations: Sequence[tuple[Key, Recorded]]

    def joined(self, later: "RankTrace") -> "RankTrace":
        """Add the same rank's next recording."""
        errors_us = (self.clock_error_us, later.clock_error_us)
        known_us = [error for error in errors_us if error is not None]
        return RankTrace(
            self.rank,
            self.host,
            max(known_us) if len(known_us) == len(errors_us) else None,
            self.num_dropped + later.num_dropped,
            is_whole=self.is_whole and later.is_whole,
            operations=[*self.operations, *later.operations],
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """Records of all ranks that are known.

    Attributes:
        size: Number of ranks of the job; 0 where nobody said.
        ranks: Ascending.
        arrivals: Who came last, for operations of which that is known.
        remarks: What the file cannot tell, in sentences.
    """

    size: int
    ranks: Sequence[RankTrace]
    arrivals: Mapping[Key, Arrival]
    remarks: Sequence[str]
