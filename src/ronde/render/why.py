"""The verdict on a job as text."""

import shlex
import time
from collections.abc import Iterable, Sequence

from ronde.monitor.asking import InspectedJob
from ronde.monitor.inspection import Inspection
from ronde.monitor.verdict import Fault, Verdict, describe_hang, find_evidence
from ronde.monitor.view import Shares, WatchedJob, WatchedRank
from ronde.render.text import WIDTH, align, shorten, wrap
from ronde.status.table import JobInfo, WorkerInfo
from ronde.status.values import UNKNOWN
from ronde.units import counted, format_duration

_HINT = "If it is slow: ronde why --slow."
_MOST_ROWS = 32
_MOST_FRAMES = 12
_TITLES = ("rank", "host", "state", "CPU", "step", "in", "for", "line")
_SLOW_TITLES = ("rank", "host", "blame", "own", "input", "GC", "CPU")
_RIGHT = ("rank", "CPU", "step", "for")
_PARTS = (
    "compute",
    "communication",
    "waiting for a late rank",
    "waiting for input",
    "garbage collection",
)
"""The names of ``Shares``, in their order."""


def draw_hang(inspected: InspectedJob, verdict: Verdict) -> str:
    """Format the verdict as a paragraph, followed by a table of the ranks."""
    texts = [
        _headline(inspected, verdict),
        *(fault.text for fault in verdict.faults),
        *(
            f"The kernel of {host} wrote {format_duration(each.age_s)} ago: {each.text}"
            for host, kernel_lines in inspected.kernel_lines.items()
            for each in kernel_lines
        ),
        *find_evidence(verdict, inspected.status, inspected.usages),
    ]
    if inspected.silent:
        texts.append(f"No answer within 3 s from {', '.join(inspected.silent)}.")
    table = _draw_table(inspected, verdict)
    return f"{_head(inspected.status.job)}{_paragraphs(texts)}\n{table}"


def _head(job: JobInfo) -> str:
    ran = format_duration(max(0.0, time.time() - job.started_at))
    text = f"job {job.job_id}: {shlex.join(job.command)}, for {ran}"
    return f"{shorten(text, WIDTH)}\n\n"


def _paragraphs(texts: Iterable[str]) -> str:
    return "".join(wrap("", text, indent=0) for text in texts)


def draw_slow(view: WatchedJob, faults: Sequence[Fault]) -> str:
    """Format the verdict on a slow job, followed by a table of the ranks by blame."""
    texts = [_describe_step(view), *(fault.text for fault in faults)]
    if view.shares and not faults:
        texts.append("No rank, host or network holds it up.")
    ranks = [each for each in view.ranks if each.shares][:_MOST_ROWS]
    rows = [_SLOW_TITLES, *map(_slow_row, ranks)]
    table = "\n" + align(rows, right=_SLOW_TITLES) if ranks else ""
    return f"{_head(view.job)}{_paragraphs(texts)}{table}"


def _describe_step(view: WatchedJob) -> str:
    if view.hang:
        return f"{view.hang} ronde why without --slow shows more."
    if view.shares is None or view.step_s is None:
        return (
            "The program reports no steps. hvd.DistributedOptimizer counts them, or "
            "call ronde.progress(step=...) in each."
        )
    shares = zip(view.shares, _PARTS, strict=True)
    parts = ", ".join(f"{share:.0%} {name}" for share, name in shares if share >= 0.005)
    took = format_duration(view.step_s)
    return f"A step takes {took}. On average over the ranks: {parts}."


def _slow_row(rank: WatchedRank) -> tuple[str, ...]:
    shares, step_s = rank.shares or Shares(1.0, 0.0, 0.0, 0.0, 0.0), rank.step_s or 0.0
    parts = (rank.own_s or 0.0, shares.input * step_s, shares.other * step_s)
    times = [format_duration(round(max(0.0, part), 4)) for part in parts]
    cpu = "-" if rank.cpu is None else f"{rank.cpu:.0%}"
    who = "-" if rank.rank is None else str(rank.rank)
    return (who, shorten(rank.host, 10), f"{rank.blame:.0%}", *times, cpu)


def draw_dumps(verdict: Verdict, num_dumps: int) -> str:
    """Format the verdict on the dumps that ranks left, as a paragraph."""
    text = f"{counted(num_dumps, 'rank')} left a dump. "
    if not verdict.faults:
        text += "All made the same calls, and no rank is missing in a pending one."
    return _paragraphs([text, *(fault.text for fault in verdict.faults)])


def _headline(inspected: InspectedJob, verdict: Verdict) -> str:
    if hang := describe_hang(verdict):
        return hang
    if not any(row.status for row in inspected.status.workers):
        some = " Some ranks are in a collective and others are not." * bool(
            verdict.faults
        )
        return f"The program reports no collectives; its stacks show more.{some}"
    if verdict.waits:
        age = format_duration(verdict.waits[0].age_s)
        return f"The job does not hang: its oldest collective began {age} ago. {_HINT}"
    return f"The job does not hang: no rank waits in a collective. {_HINT}"


def _draw_table(inspected: InspectedJob, verdict: Verdict) -> str:
    """Return a row per rank; if some are left out, those at fault come first."""
    guilty = {rank for fault in verdict.faults for rank in fault.ranks}
    rows = sorted(
        inspected.status.workers, key=lambda row: (row.rank is None, row.rank)
    )
    if (num_left := len(rows) - _MOST_ROWS) > 0:
        rows.sort(key=lambda row: row.rank not in guilty)
    cells = [_row(row, inspected.inspections.get(row.worker)) for row in rows]
    columns = zip(_TITLES, *cells[:_MOST_ROWS], strict=True)
    # Without columns that say nothing.
    shown = [each for each in columns if set(each[1:]) not in ({"-"}, {""})]
    more = f"and {counted(num_left, 'more rank')}; --json shows all\n"
    return align(list(zip(*shown, strict=True)), right=_RIGHT) + more * (num_left > 0)


def _row(row: WorkerInfo, inspection: Inspection | None) -> tuple[str, ...]:
    frame = inspection.user_frame if inspection else None
    collective, status = row.collective, row.status
    state = inspection.state if inspection and row.state == "running" else row.state
    where = f"{frame.file.rpartition('/')[2]}:{frame.line}" if frame else ""
    return (
        "-" if row.rank is None else str(row.rank),
        shorten(row.host, 10),
        state,
        f"{inspection.cpu:.0%}" if inspection else "",
        str(status.step) if status and status.step != UNKNOWN else "-",
        shorten(collective.name, 16) if collective else "",
        format_duration(row.collective_age_s) if collective else "",
        shorten(where, 18),
    )


def draw_stacks(inspections: Sequence[Inspection]) -> str:
    """Return the stack of each rank, the innermost frame last, as Python prints it."""
    parts: list[str] = []
    for inspection in inspections:
        frames = reversed(inspection.frames[:_MOST_FRAMES])
        lines = [f"  {frame.file}:{frame.line} in {frame.function}" for frame in frames]
        lines = lines or [f"  no stack: {inspection.problem}"]
        head = f"worker {inspection.worker}, pid {inspection.pid}:"
        parts += [head, *lines]
    return "\n".join(parts) + "\n"
