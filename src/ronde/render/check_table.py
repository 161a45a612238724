"""Hosts x families, a mark in each cell."""

import re
from collections.abc import Mapping, Sequence

from ronde.check.check import Check, Family, Severity
from ronde.check.judging import Judgement
from ronde.render.check_hosts import fold_hosts
from ronde.render.wrapping import WIDTH

FINE, UNREAD, NOTHING = "ok", "?", "-"

MARKS = {Severity.FAIL: "x", Severity.WARN: "!", Severity.INFORM: FINE}

_COLOURS = {FINE: "32", MARKS[Severity.WARN]: "33", MARKS[Severity.FAIL]: "1;31"}
_GAP = "  "
_NAME = "name"
_MIN_NAME = 16


def tabulate_hosts(
    hosts: Sequence[str],
    judgement: Judgement,
    checks: Sequence[Check],
    *,
    is_coloured: bool = False,
    width: int = WIDTH,
) -> str:
    """Return the table; hosts with equal marks share a line.

    Args:
        hosts: All that were asked for, in the user's order.
        judgement: Of what is known of them.
        checks: That were to be made; families without any have no column.
        is_coloured: Whether marks have colours.
        width: Columns to keep to.
    """
    families = [f for f in Family if any(check.family is f for check in checks)]
    marks = _mark(hosts, judgement, {check.id: check.family for check in checks})
    rows: dict[tuple[str, ...], list[str]] = {}
    for host in hosts:
        row = tuple(marks.get((host, family), NOTHING) for family in families)
        rows.setdefault(row, []).append(host)
    taken = sum(len(_GAP) + len(family) for family in families)
    room = max(_MIN_NAME, width - taken)
    cells = {row: _wrap_names(fold_hosts(names), room) for row, names in rows.items()}
    num_chars = max(len(line) for cell in [[_NAME], *cells.values()] for line in cell)
    head = _GAP.join([_NAME.ljust(num_chars), *families])
    lines = [head.rstrip()]
    for row, (first, *more) in cells.items():
        shown = [
            paint(mark, is_coloured=is_coloured, width=len(family))
            for mark, family in zip(row, families, strict=True)
        ]
        lines += [_GAP.join([first.ljust(num_chars), *shown]).rstrip(), *more]
    return "".join(f"{line}\n" for line in lines)


def paint(mark: str, *, is_coloured: bool, width: int = 0) -> str:
    """Return a mark in its colour, with blanks behind it up to a width."""
    blanks = " " * (width - len(mark))
    if not is_coloured or mark not in _COLOURS:
        return mark + blanks
    return f"\x1b[{_COLOURS[mark]}m{mark}\x1b[0m{blanks}"


def _mark(
    hosts: Sequence[str], judgement: Judgement, families: Mapping[str, Family]
) -> dict[tuple[str, Family], str]:
    """Return the mark of each cell that has one: the worst that is there."""
    known = set(hosts)
    marks = {
        (each.host, families[each.check]): UNREAD
        for each in judgement.unread
        if each.check in families
    }
    marks |= dict.fromkeys(judgement.made, FINE)
    for each in reversed(judgement.findings):
        for host in each.hosts if each.check in families else ():
            if host in known:
                # The worst stands first, so it is written last.
                marks[host, families[each.check]] = MARKS[each.severity]
    return marks


def _wrap_names(text: str, width: int) -> list[str]:
    """Return lines of names, cut behind commas alone; at least one."""
    lines = [""]
    for piece in re.split("(?<=,)", text):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece if lines[-1] else piece.lstrip()
    return [line.rstrip() for line in lines]
