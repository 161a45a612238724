"""Why a job failed, in a few lines."""

import signal
from collections.abc import Sequence

from ronde.launch.verdict import RankEnd, Verdict, signal_name


def summarize(verdict: Verdict, log_dir: str = "") -> str:
    """Return what to tell of a job's end; empty where all went well.

    Args:
        verdict: How it ended.
        log_dir: Directory of the job's files, or empty.
    """
    lines: list[str] = []
    cause = verdict.cause
    if cause is not None:
        lines += _blame(cause)
    elif verdict.interrupted_by == signal.SIGPIPE:
        lines.append("nobody reads the output any more, so the job was ended")
    elif verdict.interrupted_by is not None:
        lines.append(f"the job was ended by {signal_name(verdict.interrupted_by)}")
    lines += [
        f"rank {end.rank} failed too: {describe_status(end.status)}"
        for end in verdict.also_failed
    ]
    if lines and verdict.ended:
        lines.append(f"ended because of that: {_ranks(verdict.ended)}")
    if lines and log_dir:
        lines.append(f"the output of every rank is in {log_dir}")
    return "".join(f"ronde: {line}\n" for line in lines)


def _blame(cause: RankEnd) -> list[str]:
    head = (
        f"rank {cause.rank} failed first, after {cause.at_s:.1f} s: "
        f"{describe_status(cause.status)} (pid {cause.pid} on {cause.host})"
    )
    if not cause.stderr_tail:
        return [head, "it wrote nothing to stderr"]
    return [
        head,
        "the last it wrote to stderr:",
        *(f"| {t}" for t in cause.stderr_tail),
    ]


def describe_status(status: int) -> str:
    """Say how a process ended: ``exit code 3``, ``killed by SIGSEGV``."""
    return f"exit code {status}" if status >= 0 else f"killed by {signal_name(-status)}"


def _ranks(ends: Sequence[RankEnd]) -> str:
    """Name ranks with their fate, neighbours with the same fate together."""
    groups: list[tuple[int, int, int]] = []
    for end in ends:
        if groups and groups[-1][1:] == (end.rank - 1, end.status):
            groups[-1] = (groups[-1][0], end.rank, end.status)
        else:
            groups.append((end.rank, end.rank, end.status))
    return ", ".join(
        (f"rank {first}" if first == last else f"ranks {first}-{last}")
        + f" ({describe_status(status)})"
        for first, last, status in groups
    )
