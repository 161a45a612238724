"""Engines side by side, as a table of size by engine."""

from collections.abc import Sequence

from ronde.bench.comparison import Compared, Ratios
from ronde.bench.measured import Heading
from ronde.render.bench_text import number

_TIME, _RATE, _RATIO = 9, 7, 6
_WIDTH = _TIME + _RATE + _RATIO + 4
_KEY = "{:>12}  {:>8}  {:>6}  {:>4}"


def title_lines(heading: Heading, engines: Sequence[str]) -> list[str]:
    """Return the two lines above the rows.

    Args:
        heading: Of the run.
        engines: Their names; ratios are to the first.
    """
    rounds = heading.options.engines.rounds
    place = "in place" if heading.options.test.is_in_place_checked else "out of place"
    names = "".join(f" |{name:^{_WIDTH}}" for name in engines)
    cells = f"{'time':>{_TIME}}  {'busbw':>{_RATE}}  {'ratio':>{_RATIO}}"
    units = f"{'(us)':>{_TIME}}  {'(GB/s)':>{_RATE}}  {'':>{_RATIO}}"
    return [
        f"# engines take turns: medians of {rounds} rounds, {place}",
        f"# ratio: speed by that of {engines[0]}",
        "#",
        f"# {_KEY.format('', '', '', '')}{names}",
        f"# {_KEY.format('size', 'type', 'redop', 'root')}"
        + f" |{cells}" * len(engines),
        f"# {_KEY.format('(B)', '', '', '')}" + f" |{units}" * len(engines),
    ]


def compared_line(compared: Compared) -> str:
    """Return one row; results that are wrong are marked."""
    row = next(iter(compared.rows.values()))
    root = -1 if row.root is None else row.root
    line = "  " + _KEY.format(row.size_bytes, row.dtype, row.redop, root)
    for engine in compared.rows:
        side = compared.side(engine)
        time = number(side.time_us or 0.0, _TIME)
        rate = number(side.busbw_gb_per_s or 0.0, _RATE)
        line += f" |{time}  {rate}  {number(compared.ratio(engine), _RATIO)}"
        line += f" {side.num_wrong:g} WRONG" if side.num_wrong else ""
    return line


def summary_lines(ratios: Ratios, error: str = "") -> list[str]:
    """Return what stands below the rows."""
    lines = ["#"]
    for engine in ratios.logarithms:
        wrong = ratios.num_wrong[engine]
        judged = f"{wrong:g} wrong elements" if wrong else "OK"
        lines.append(f"# {engine:<20} : {ratios.mean(engine):.3g} times, {judged}")
    return [*lines, "#", f"# error: {error}" if error else ""]
