"""A trace's summary as text."""

from collections.abc import Sequence

from ronde.render.text import align, name_ranks
from ronde.trace.reading import RankTrace
from ronde.trace.summary import FusionSummary, TensorSummary, TraceSummary
from ronde.units import counted, format_duration, format_size

_MAX_LATE_RANKS = 3
_HEADINGS = ("rank", "host", "operations", "waiting", "moving", "came last", "held up")
_KEY = """\
waiting: a tensor of the rank was ready and another rank's was not; moving: an operation
was carried out; held up: all others were ready for something, and this rank was not.
"""


def draw_trace(name: str, summary: TraceSummary, num_tensors: int) -> str:
    if not summary.num_operations:
        return f"{name}: no operation was recorded.\n" + _notes(summary)
    ranks = summary.trace.ranks
    hosts = {rank.host for rank in ranks}
    where = "" if hosts == {""} else f" on {counted(len(hosts), 'host')}"
    head = (
        f"{name}: {counted(len(ranks), 'rank')}{where}, "
        f"{format_duration(summary.span_s)}, "
        f"{counted(summary.num_operations, 'operation')}.\n"
    )
    parts = [head, _clocks(ranks), _ranks(summary), _KEY]
    parts += [_tensors(summary, num_tensors), _fusion(summary.fusion), _notes(summary)]
    return "\n".join(part for part in parts if part)


def _clocks(ranks: Sequence[RankTrace]) -> str:
    if len(ranks) == 1:
        return ""
    unknown = [rank.rank for rank in ranks if rank.clock_error_us is None]
    if unknown:
        return (
            f"The clocks of {name_ranks(unknown)} were not measured but aligned by "
            "their hosts' time of day, so it is unknown which rank came late.\n"
        )
    worst = max(ranks, key=lambda rank: rank.clock_error_us or 0)
    if not worst.clock_error_us:
        return "All ranks read one clock.\n"
    error = format_duration(worst.clock_error_us / 1e6)
    return (
        f"The clocks are within {error} of rank 0's; "
        f"rank {worst.rank}'s is the least certain.\n"
    )


def _ranks(summary: TraceSummary) -> str:
    rows = [
        [
            str(rank.trace.rank),
            rank.trace.host or "-",
            f"{len(rank.trace.operations):,}",
            _share(rank.waiting_s, summary.span_s),
            _share(rank.moving_s, summary.span_s),
            f"{rank.num_late:,}",
            _share(rank.held_up_s, summary.span_s),
        ]
        for rank in summary.ranks
    ]
    return align([_HEADINGS, *rows], right={*_HEADINGS} - {"host"})


def _share(time_s: float, span_s: float) -> str:
    share = time_s / span_s if span_s else 0.0
    return f"{format_duration(time_s)} {share:6.1%}"


def _tensors(summary: TraceSummary, num_tensors: int) -> str:
    if not summary.tensors:
        return ""
    lines = ["waited longest, over all ranks:"]
    lines += [f"  {_tensor(each)}" for each in summary.tensors[:num_tensors]]
    left = len(summary.tensors) - num_tensors
    if left > 0:
        lines.append(f"  and {counted(left, 'tensor')} more; --tensors N names more")
    if summary.num_unclear:
        lines.append(
            f"  For {counted(summary.num_unclear, 'operation')} it is unknown which "
            "rank came last: the difference is below the clocks' error."
        )
    return "\n".join([*lines, ""])


def _tensor(tensor: TensorSummary) -> str:
    text = (
        f"{tensor.name}: {format_duration(tensor.waiting_s)} in "
        f"{counted(tensor.num_operations, 'operation')}, "
        f"{format_duration(tensor.longest_s)} at worst"
    )
    if not tensor.late_ranks:
        return text
    shown = [
        f"rank {rank} ({count:,} times)" if count != 1 else f"rank {rank} (once)"
        for rank, count in tensor.late_ranks[:_MAX_LATE_RANKS]
    ]
    left = len(tensor.late_ranks) - len(shown)
    more = f" and {counted(left, 'other rank')}" if left else ""
    return f"{text}; for {', '.join(shown)}{more}"


def _fusion(fusion: FusionSummary | None) -> str:
    if fusion is None:
        return ""
    size = ""
    if fusion.mean_bytes:
        size = f", {format_size(round(fusion.mean_bytes))} a collective"
    return (
        f"fusion: {counted(fusion.num_tensors, 'tensor')} in "
        f"{counted(fusion.num_batches, 'collective')}, at most "
        f"{counted(fusion.max_tensors, 'tensor')} in one{size}.\n"
    )


def _notes(summary: TraceSummary) -> str:
    trace = summary.trace
    notes = list(trace.remarks)
    cut = [rank.rank for rank in trace.ranks if not rank.is_whole]
    if cut:
        notes.append(
            f"The program did not end in order on {name_ranks(cut)}: its last half "
            "second may be missing."
        )
    if dropped := sum(rank.num_dropped for rank in trace.ranks):
        notes.append(
            f"{counted(dropped, 'record')} are missing, the oldest: the limit was "
            "reached. A larger --timeline-limit keeps more."
        )
    here = {rank.rank for rank in trace.ranks}
    if missing := [rank for rank in range(trace.size) if rank not in here]:
        notes.append(f"There are no records of {name_ranks(missing)}.")
    return "".join(f"{note}\n" for note in notes)
