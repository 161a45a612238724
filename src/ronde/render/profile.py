"""The report on a profile as text."""

import shlex
from collections.abc import Sequence

from ronde.monitor.advice import find_advice, find_headline, name_report
from ronde.monitor.profiling import LineReport, ProfileReport, ProfileShares
from ronde.render.text import align, shorten, wrap
from ronde.units import counted, format_duration, format_size

LABELS = {
    "compute": "compute",
    "communication": "communication",
    "waiting": "waiting for a rank",
    "input": "input",
    "checkpoint": "checkpoint, files",
    "sync": "waiting for the GPU",
    "other": "other",
}
_WIDTH = 100
_BAR = 50
_MOST_LINES, _MOST_RANKS = 15, 32


def draw_profile(report: ProfileReport) -> str:
    """Format headline, shares, advice, lines and ranks, in at most 100 columns."""
    job = report.job
    lines = [
        find_headline(report),
        shorten(f"job {job.job_id}: {shlex.join(job.command)}", _WIDTH - 3),
        describe_sampling(report),
    ]
    bars = [
        f"{label:20}{getattr(report.shares, kind):6.1%}  "
        f"{'#' * round(_BAR * getattr(report.shares, kind))}".rstrip()
        for kind, label in LABELS.items()
    ]
    advice = [wrap("- ", each.text, _WIDTH, indent=2) for each in find_advice(report)]
    parts = ["\n".join([*lines, "", *bars, ""]), "".join(advice)]
    parts += [_draw_lines(report), _draw_ranks(report)]
    text = "\n".join(part for part in parts if part)
    # A program's source may have anything in it.
    return "".join(sign if sign.isprintable() or sign == "\n" else " " for sign in text)


def describe_sampling(report: ProfileReport) -> str:
    samples = counted(sum(rank.num_samples for rank in report.ranks), "sample")
    ranks, length = len(report.ranks), format_duration(report.duration_s)
    return (
        f"{samples} of {counted(ranks, 'rank')} in {length}, "
        f"{report.rate_hz} a second of each."
    )


def _draw_lines(report: ProfileReport) -> str:
    titles = ("share", "most of it", "ranks", "line", "source")
    rows = [_line_row(line) for line in report.lines[:_MOST_LINES]]
    more = counted(len(report.lines) - len(rows), "more line")
    text = align([titles, *rows], right=("share",)) if rows else ""
    return text + f"and {more}\n" * (len(report.lines) > len(rows))


def _line_row(line: LineReport) -> Sequence[str]:
    kind = max(LABELS, key=lambda kind: getattr(line.shares, kind))
    on_ranks = [sum(shares) for shares in line.rank_shares]
    return (
        f"{sum(line.shares):.1%}",
        LABELS[kind],
        f"{min(on_ranks):.0%}-{max(on_ranks):.0%}",
        shorten(line.location, 24),
        shorten(line.text, 28),
    )


def _draw_ranks(report: ProfileReport) -> str:
    """Return a row per rank; if some are left out, those awaited most come first."""
    shown = [*report.ranks]
    if (num_left := len(shown) - _MOST_RANKS) > 0:
        shown.sort(key=lambda rank: -rank.blame)
    fields = [f for f in ProfileShares._fields if getattr(report.shares, f) >= 0.0005]
    titles = ("rank", "host", *fields, "awaited", "memory")
    rows = [
        (
            name_report(rank).removeprefix("rank "),
            shorten(rank.host, 10),
            *(f"{getattr(rank.shares, field):.1%}" for field in fields),
            f"{rank.blame:.1%}",
            format_size(rank.rss_bytes),
        )
        for rank in shown[:_MOST_RANKS]
    ]
    more = f"and {counted(num_left, 'more rank')}\n" * (num_left > 0)
    return align([titles, *rows], right={*titles} - {"host"}) + more
