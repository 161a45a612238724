"""Predicted training speed, and the parts of a step below it, as a picture in SVG."""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise

from ronde.plan.answer import SpeedRow
from ronde.plan.step import PARTS
from ronde.render.plan import PlanReport, header, number, part_name

_COLORS = (
    *("#4e79a7", "#a0cbe8", "#f1ce63", "#e15759"),
    *("#b07aa1", "#bab0ac", "#f28e2b", "#76b7b2", "#9c755f"),
)
_LEFT, _RIGHT = 80, 700
_TOP, _MIDDLE, _BARS, _BOTTOM = 50, 330, 380, 560
_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 605"><style>
text{font:12px sans-serif;fill:#333}.end{text-anchor:end}.mid{text-anchor:middle}
.grid{stroke:#e4e4e4}.ideal{stroke:#999;stroke-dasharray:5 4;fill:none}
.line{stroke:#4e79a7;stroke-width:2;fill:none}.band{fill:#4e79a7;opacity:.22}
.mark{fill:#fff;stroke:#333;stroke-width:2}
</style><rect width="880" height="605" fill="#fff"/>
"""
_Scale = Callable[[float], float]


def draw_chart(report: PlanReport) -> str:
    """Return the curve with its band, measured points and ideal line, and the parts."""
    rows, unit = report.rows, report.inputs.setup.program.unit
    numbers = [row.size.num_ranks for row in rows]
    x = _logarithmic(numbers[0] / 1.6, numbers[-1] * 1.6, _LEFT, _RIGHT)
    ideal = [rows[0].speed.high / numbers[0] * n for n in numbers]
    least = min(row.speed.low for row in rows) / 1.4
    most = max(*ideal, *(row.speed.high for row in rows)) * 1.4
    y = _logarithmic(least, most, _MIDDLE, _TOP)
    speeds = [(x(row.size.num_ranks), row.speed) for row in rows]
    high = [(at, y(speed.high)) for at, speed in speeds]
    low = [(at, y(speed.low)) for at, speed in speeds]
    marks = [at for at, row in zip(high, rows, strict=True) if row.is_measured]
    labels = f"{unit}/s of all ranks; band: 80 %; dashed: linear; circles: given"
    body = [
        *_axes(rows, x, y, (least, most)),
        _text(_LEFT, 22, header(report)),
        _text(_LEFT, _TOP - 8, labels),
        _line("ideal", zip(map(x, numbers), map(y, ideal), strict=True)),
        _line("band", [*high, *reversed(low)]),
        _line("line", ((at, y(speed.middle)) for at, speed in speeds if speed.middle)),
        *(
            f'<circle class="mark" cx="{a:.1f}" cy="{b:.1f}" r="4.5"/>'
            for a, b in marks
        ),
        *_bars(rows, x),
    ]
    return _HEAD + "\n".join(body) + "\n</svg>\n"


def _logarithmic(low: float, high: float, start: float, end: float) -> _Scale:
    scale = (end - start) / math.log(high / low)
    return lambda value: start + scale * math.log(value / low)


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


def _line(kind: str, points: Iterable[tuple[float, float]]) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{path}"/>'


def _tick(at: float, text: str) -> str:
    grid = f'<path class="grid" d="M{_LEFT} {at:.1f}H{_RIGHT}"/>'
    return grid + _text(_LEFT - 8, at + 4, text, "end")


def _axes(
    rows: Sequence[SpeedRow], x: _Scale, y: _Scale, limits: tuple[float, float]
) -> Iterable[str]:
    low, high = (math.floor(math.log10(limit)) for limit in limits)
    digits = (1, 2, 5) if high - low < 3 else (1,)
    for value in (d * 10.0**k for k in range(low, high + 1) for d in digits):
        if _TOP <= (at := y(value)) <= _MIDDLE:
            yield _tick(at, number(value))
    free = 0.0
    for n in (row.size.num_ranks for row in rows):
        if (at := x(n)) >= free:
            free = at + 48
            yield _text(at, _MIDDLE + 18, f"{n:,}", "mid")
            yield _text(at, _BOTTOM + 18, f"{n:,}", "mid")
    yield _text((_LEFT + _RIGHT) / 2, _BOTTOM + 36, "ranks", "mid")


def _bars(rows: Sequence[SpeedRow], x: _Scale) -> Iterable[str]:
    """Yield the parts of a step, stacked at each number of ranks, and their names."""
    most_s = max(sum(row.parts_s.values()) for row in rows)
    yield _text(_LEFT, _BARS - 8, "ms of a step")
    for share in (0.0, 0.5, 1.0):
        at = _BOTTOM - share * (_BOTTOM - _BARS)
        yield _tick(at, f"{share * most_s * 1e3:,.3g}")
    centers = [x(row.size.num_ranks) for row in rows]
    width = min(44.0, *(0.8 * (b - a) for a, b in pairwise(centers)), 44.0)
    for row, center in zip(rows, centers, strict=True):
        bottom = float(_BOTTOM)
        for name, part_s in row.parts_s.items():
            height = part_s / most_s * (_BOTTOM - _BARS)
            bottom -= height
            yield _box(name, center - width / 2, bottom, (width, height))
    largest = {name: max(row.parts_s[name] for row in rows) for name in PARTS}
    shown = [name for name in PARTS if largest[name] > most_s / 500]
    for index, name in enumerate(reversed(shown)):
        yield _box(name, 712, _BARS + 18 * index, (12, 12))
        yield _text(730, _BARS + 18 * index + 11, part_name(name))


def _box(part: str, x: float, y: float, size: tuple[float, float]) -> str:
    fill = _COLORS[PARTS.index(part)]
    return (
        f'<rect x="{x:.1f}" y="{y:.2f}" width="{size[0]:.1f}" height="{size[1]:.2f}" '
        f'fill="{fill}"/>'
    )
