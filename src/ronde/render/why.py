"""The verdict on a job as text."""

import shlex
import time
from collections.abc import Sequence

from ronde.monitor.asking import Picture
from ronde.monitor.looks import Look
from ronde.monitor.verdict import HANG_S, Verdict, Wait
from ronde.render.text import WIDTH, align, name_ranks, shorten, wrap
from ronde.status.table import WorkerInfo
from ronde.status.values import UNKNOWN
from ronde.units import format_duration

_MOST_ROWS = 32
_MOST_FRAMES = 12
_TITLES = ("rank", "host", "pid", "state", "CPU", "step", "in", "for", "line")
_RIGHT = ("rank", "pid", "CPU", "step", "for")


def draw_verdict(picture: Picture, verdict: Verdict) -> str:
    """Return the verdict in a paragraph, then the evidence."""
    job = picture.status.job
    ran = format_duration(max(0.0, time.time() - job.started_at))
    lines = [
        shorten(f"job {job.job_id}: {shlex.join(job.command)}, for {ran}", WIDTH),
        "",
        wrap("", _headline(picture, verdict), indent=0).rstrip(),
        *(wrap("", fault.text, indent=0).rstrip() for fault in verdict.faults),
    ]
    if picture.silent:
        lines.append(f"No answer within 3 s from {', '.join(picture.silent)}.")
    return "\n".join(lines) + "\n\n" + _draw_table(picture)


def _headline(picture: Picture, verdict: Verdict) -> str:
    long = [wait for wait in verdict.waits if wait.age_s >= HANG_S]
    if long:
        return "The job hangs: " + "; ".join(map(_describe, long[:3])) + "."
    if not any(row.status for row in picture.status.workers):
        some = " Some ranks are in a collective and others are not." * bool(
            verdict.faults
        )
        return f"The program reports no collectives; its stacks show more.{some}"
    if verdict.waits:
        age = format_duration(verdict.waits[0].age_s)
        return f"The job does not hang: its oldest collective began {age} ago."
    return "The job does not hang: no rank waits in a collective."


def _describe(wait: Wait) -> str:
    have = "have" if len(wait.ranks) > 1 else "has"
    missing = wait.missing or wait.unknown
    for_whom = f" for {name_ranks(missing)}" if missing else ""
    age = format_duration(wait.age_s)
    own = wait.collective
    return f"{name_ranks(wait.ranks)} {have} waited {age} in {own.name}{for_whom}"


def _draw_table(picture: Picture) -> str:
    rows = sorted(picture.status.workers, key=lambda row: (row.rank is None, row.rank))
    table = [_TITLES, *(_row(row, picture.looks.get(row.worker)) for row in rows)]
    shown = [
        column
        for column in zip(*table[: _MOST_ROWS + 1], strict=True)
        if len(set(column)) > 2 or set(column[1:]) not in ({"-"}, {""})
    ]
    return align(list(zip(*shown, strict=True)), right=_RIGHT)


def _row(row: WorkerInfo, look: Look | None) -> tuple[str, ...]:
    frame = look.user_frame if look else None
    collective, status = row.collective, row.status
    state = look.state if look and row.state == "running" else row.state
    place = f"{frame.file.rpartition('/')[2]}:{frame.line}" if frame else ""
    return (
        "-" if row.rank is None else str(row.rank),
        shorten(row.host, 12),
        str(look.pid if look else row.pid),
        state,
        f"{look.cpu:.0%}" if look else "",
        str(status.step) if status and status.step != UNKNOWN else "-",
        shorten(collective.name, 18) if collective else "",
        format_duration(row.collective_age_s) if collective else "",
        shorten(place, 24),
    )


def draw_stacks(looks: Sequence[Look]) -> str:
    """Return the stack of each rank, the innermost frame last, as Python prints it."""
    parts: list[str] = []
    for look in looks:
        lines = [f"worker {look.worker}, pid {look.pid}:"]
        for frame in reversed(look.frames[:_MOST_FRAMES]):
            lines.append(f"  {frame.file}:{frame.line} in {frame.function}")
        parts.append("\n".join(lines) + (f"  {look.problem}" if look.problem else ""))
    return "\n".join(parts) + "\n"
