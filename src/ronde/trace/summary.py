"""Summary of a trace: the waits by rank and by tensor, and the late ranks."""

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from ronde.timeline.alignment import Arrival, OperationKey, waited_ns
from ronde.trace.reading import RankTrace, Trace

_NS = 1e-9
_DTYPE_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64", "complex64"), 8),
    "complex128": 16,
}


class RankSummary(NamedTuple):
    """Total times of one rank, and the number of operations it delayed."""

    trace: RankTrace
    waiting_s: float
    moving_s: float  # time in which an operation was executed
    num_late: int  # operations for which it was last by more than the clocks' error
    held_up_s: float


class TensorSummary(NamedTuple):
    """The waits of one tensor's operations for late ranks, and those ranks."""

    name: str  # on the wire
    num_operations: int  # with a known last rank
    waiting_s: float  # sum of times between the first and last submission
    longest_s: float  # the longest of these times
    late_ranks: Sequence[tuple[int, int]]  # ranks with counts, highest count first


class FusionSummary(NamedTuple):
    """Numbers and sizes of the fused collectives on the rank with the most records."""

    num_tensors: int
    num_batches: int  # collectives
    mean_bytes: float  # mean size of a batch; 0 if dtypes are unknown
    max_tensors: int  # tensors in the largest batch


class TraceSummary(NamedTuple):
    """Totals of a trace, and summaries of its ranks, tensors and fused collectives."""

    trace: Trace
    span_s: float  # from the first event to the last
    num_operations: int  # different operations, over all ranks
    num_unclear: int  # operations whose ranks differ by less than the clocks' error
    ranks: Sequence[RankSummary]
    tensors: Sequence[TensorSummary]  # the longest wait first
    fusion: FusionSummary | None  # None if nothing was recorded


def summarize(trace: Trace) -> TraceSummary:
    records = [record for rank in trace.ranks for _, record in rank.operations]
    begins = (min(r.submitted_ns or r.begun_ns, r.begun_ns) for r in records)
    span_ns = max((r.ended_ns for r in records), default=0) - min(begins, default=0)
    error_ns = _error_ns(trace)
    clear = {
        key: arrival
        for key, arrival in trace.arrivals.items()
        if arrival.margin_ns > error_ns
    }
    return TraceSummary(
        trace,
        span_s=span_ns * _NS,
        num_operations=len({key for rank in trace.ranks for key, _ in rank.operations}),
        num_unclear=len(trace.arrivals) - len(clear),
        ranks=[_rank(rank, trace, clear.values()) for rank in trace.ranks],
        tensors=_tensors(trace.arrivals, clear),
        fusion=_fusion(trace.ranks),
    )


def _error_ns(trace: Trace) -> float:
    """Return the largest sum of two ranks' clock errors; infinity if one is unknown."""
    errors_us = [rank.clock_error_us for rank in trace.ranks]
    known_us = sorted(error for error in errors_us if error is not None)
    if len(known_us) < len(errors_us):
        return math.inf if len(errors_us) > 1 else 0
    return sum(known_us[-2:]) * 1000


def _rank(rank: RankTrace, trace: Trace, clear: Iterable[Arrival]) -> RankSummary:
    waits = [
        (record.submitted_ns, record.submitted_ns + waited_ns(record, arrival))
        for key, record in rank.operations
        if (arrival := trace.arrivals.get(key)) is not None and record.submitted_ns
    ]
    moves = [(record.begun_ns, record.ended_ns) for _, record in rank.operations]
    late = [arrival for arrival in clear if arrival.late_rank == rank.rank]
    held_up = [
        (arrival.late_ns - arrival.margin_ns, arrival.late_ns) for arrival in late
    ]
    return RankSummary(
        trace=rank,
        waiting_s=covered(waits) * _NS,
        moving_s=covered(moves) * _NS,
        num_late=len(late),
        held_up_s=covered(held_up) * _NS,
    )


def covered(intervals: Iterable[tuple[int, int]]) -> int:
    total, end = 0, -1
    for first, last in sorted(intervals):
        if last > end:
            total += last - max(first, end)
            end = last
    return total


def _tensors(
    arrivals: Mapping[OperationKey, Arrival], clear: Container[OperationKey]
) -> list[TensorSummary]:
    waits_ns: dict[str, list[int]] = {}
    late: dict[str, Counter[int]] = {}
    for key, arrival in arrivals.items():
        wait_ns = arrival.late_ns - arrival.early_ns
        waits_ns.setdefault(key.name, []).append(wait_ns)
        counts = late.setdefault(key.name, Counter())
        if key in clear:
            counts[arrival.late_rank] += 1
    found: list[TensorSummary] = []
    for name, all_ns in waits_ns.items():
        figures = (len(all_ns), sum(all_ns) * _NS, max(all_ns) * _NS)
        found.append(TensorSummary(name, *figures, late[name].most_common()))
    return sorted(found, key=lambda tensor: (-tensor.waiting_s, tensor.name))


def _fusion(ranks: Sequence[RankTrace]) -> FusionSummary | None:
    fullest = max(ranks, key=lambda rank: len(rank.operations), default=None)
    if fullest is None or not fullest.operations:
        return None
    records = [record for _, record in fullest.operations]
    # Each negotiated tensor has a record, each bucket of gradients has one.
    fused = [record.num_fused for record in records if record.agreed_ns]
    buckets = [record.num_fused for record in records if not record.agreed_ns]
    num_batches = len(buckets) + round(sum(1 / max(number, 1) for number in fused))
    num_bytes = sum(math.prod(r.shape) * _DTYPE_BYTES.get(r.dtype, 0) for r in records)
    return FusionSummary(
        num_tensors=len(fused) + sum(buckets),
        num_batches=num_batches,
        mean_bytes=num_bytes / max(num_batches, 1),
        max_tensors=max(fused + buckets),
    )
