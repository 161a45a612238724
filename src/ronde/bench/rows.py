"""What one line of a benchmark says, whoever measured it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Side:
    """One half of a row: out of place or in place.

    Attributes:
        time_us: Microseconds an operation; None where the cell was not printed.
        algbw_gb_per_s: Bytes of the operation by its time, in 1e9 bytes/s.
        busbw_gb_per_s: ``algbw`` times the collective's factor: what a link carries.
        num_wrong: Wrong elements over all ranks; None where nothing was checked.
    """

    time_us: float | None
    algbw_gb_per_s: float | None
    busbw_gb_per_s: float | None
    num_wrong: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One size of one collective.

    Attributes:
        size_bytes: The larger of what a rank sends and receives.
        count: Elements, the argument that each rank gives.
        dtype: nccl-tests' name of the type, such as ``float``.
        redop: ``sum`` and so on, ``none``, or empty where the cell was blank.
        root: The root; -1 or None where there is none.
        out_of_place: None where that half was not measured.
        in_place: None where that half was not measured.
    """

    size_bytes: int
    count: int
    dtype: str
    redop: str
    root: int | None
    out_of_place: Side | None
    in_place: Side | None
