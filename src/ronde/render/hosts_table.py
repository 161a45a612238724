"""The hosts that cannot take part in a job, and what to do about each."""

from collections.abc import Sequence

from ronde.errors import HostFailure

_HEAD = ("host", "what is wrong", "what to do")
_LONGEST_CHARS = 60
_MOST_NAMES = 8


def tabulate_failures(
    failures: Sequence[HostFailure], ready: Sequence[str] = ()
) -> str:
    """Return a table of hosts, a line each; hosts with equal lines share one."""
    by_row: dict[tuple[str, str], list[str]] = {}
    for each in failures:
        row = (each.failure.reason, each.failure.cure)
        by_row.setdefault(row, []).append(each.host)
    rows = [_HEAD, *((_fold(hosts), *row) for row, hosts in by_row.items())]
    widths = [
        min(_LONGEST_CHARS, max(len(row[column]) for row in rows))
        for column in range(len(_HEAD) - 1)
    ]
    lines = [_line(row, widths) for row in rows]
    if ready:
        lines.append(f"ready: {_fold(ready)}")
    return "".join(f"ronde:   {line}\n" for line in lines)


def _fold(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    num_more = len(names) - _MOST_NAMES
    return f"{shown} and {num_more} more" if num_more > 0 else shown


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    *first, last = row
    cells = [text.ljust(width) for text, width in zip(first, widths, strict=True)]
    return "  ".join((*cells, last)).rstrip()
