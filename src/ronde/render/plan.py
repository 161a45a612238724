"""Predicted training speeds as tables and sentences, and as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ronde.plan.answer import Between, SpeedRow
from ronde.plan.cost import Cost
from ronde.plan.measurements import Inputs
from ronde.plan.what_if import WhatIfSpeeds
from ronde.render.text import align, wrap
from ronde.units import counted, format_duration

_WIDTH = 100
_LEAST_GAIN = 1.03
_COST_NOTE = (
    "batch: of all ranks; a larger one may need more epochs. $ a million: samples. "
    "kWh: with a PUE of 1.3 unless given. unused: dollars of the bill that lost "
    "efficiency costs. knee: twice the ranks bring under 1.5 times the speed."
)


class PlanReport(NamedTuple):
    """A prediction, with the answers to further questions."""

    inputs: Inputs
    rows: Sequence[SpeedRow]
    parameters: Mapping[str, tuple[float, float, float, str]]
    notes: Sequence[str] = ()
    what_if: Sequence[WhatIfSpeeds] = ()
    advice: Sequence[WhatIfSpeeds] = ()
    costs: Sequence[Cost] = ()
    effective_draws: float = 0.0  # of the unknowns


def draw_plan(report: PlanReport, *, is_advice_shown: bool = False) -> str:
    """Return tables of at most 100 columns, and sentences."""
    rows, unit = report.rows, f"{report.inputs.setup.program.unit}/s"
    right = ("ranks", "nodes", "step", unit, "efficiency")
    table = [["ranks", "nodes", "step", unit, "80 %", "efficiency", "binds"]]
    table += [_cells(row) for row in rows]
    best = sorted(report.advice, key=lambda each: each.gain, reverse=True)
    best = [outcome for outcome in best if outcome.gain > _LEAST_GAIN]
    text = _wrapped([header(report)]) + align(table, right=right) + "\n"
    text += _wrapped([_binding(rows[-1], unit), _advice(best), *report.notes])
    text += _changes("what if", report.what_if)
    text += _changes("change", best if is_advice_shown else ())
    ranks = report.inputs.setup.program.model_ranks
    return text + _costs(report.costs, ranks) + "\n" + _wrapped(_origins(report.inputs))


def _wrapped(lines: Iterable[str]) -> str:
    return "".join(wrap("", line, _WIDTH, indent=2) for line in lines)


def header(report: PlanReport) -> str:
    setup = report.inputs.setup
    program, cluster, base = setup.program, setup.cluster, setup.points[0].size
    noun = program.unit if program.units_a_sample == 1 else "samples"
    of = "rank" if program.model_ranks == 1 else f"copy of {program.mesh}"
    batch = f"{base.batch or 0:g} {noun} a {of}"
    sizes = ", ".join(f"{point.size.num_ranks:,}" for point in setup.points)
    words = (
        program.name,
        batch if base.batch else "time of one sample on a rank",
        (program.algorithm or program.exchange).replace("_", " "),
        f"overlap {program.overlap or 'unknown'}",
        f"speed known of {sizes} ranks on nodes of {cluster.ranks_per_node}",
        f"{cluster.node_gbit_per_s:g} Gbit/s" if cluster.node_gbit_per_s else "",
        f"efficiency by {base.num_ranks} ranks" if base.num_ranks > 1 else "",
    )
    return ", ".join(filter(None, words))


def part_name(part: str) -> str:
    return f"{part} nodes" if part.startswith("bandwidth") else part


def number(value: float) -> str:
    """Write a figure with two digits or more, and at most nine characters."""
    if value < 0.1:
        return f"{value:.2g}"
    if value >= 1e7:
        return f"{value / 1e6:,.1f}M" if value < 1e10 else f"{value:.4g}"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def _between(figure: Between, sign: str = "") -> str:
    ends = f"{number(figure.low)}..{number(figure.high)}"
    if figure.middle is None:
        return f"{sign}{ends}"
    is_known = figure.low == figure.high
    return f"{sign}{number(figure.middle)}{'' if is_known else f' ({ends})'}"


def _cells(row: SpeedRow) -> list[str]:
    speed, step_s, middle = row.speed, row.step.middle, ["-", "-", "-"]
    if speed.middle is not None and step_s is not None:
        efficiency = f"{row.efficiency:.0%}"
        middle = [format_duration(step_s), number(speed.middle), efficiency]
    interval = f"{number(speed.low)} .. {number(speed.high)}"
    interval = "given" if row.is_measured else interval
    binds = ", ".join(row.binds[:2])
    binds = part_name(binds) if len(row.binds) == 1 else binds
    sizes = [f"{n:,}" for n in row.size[:2]]
    return [*sizes, *middle[:2], interval, middle[2], binds]


def _binding(row: SpeedRow, unit: str) -> str:
    name, whole_s = row.binds[0], sum(row.parts_s.values())
    where = f"With {counted(row.size.num_ranks, 'rank')}"
    if name not in row.saved_s:
        return f"{where} no part but computing takes over 3 %."
    saved_s = row.saved_s[name]
    text = f"{format_duration(saved_s)} of {format_duration(whole_s)}"
    if row.speed.middle is not None:
        faster = row.speed.middle * whole_s / (whole_s - saved_s)
        text += f"; without it {number(faster)} {unit}"
    return f"{where}, {part_name(name)}: {text}."


def _advice(best: Sequence[WhatIfSpeeds]) -> str:
    if not best:
        return "No change that was tried gains over 3 %."
    change, ratio = best[0].change, _between(best[0].ratios[-1])
    return f"Most would help: {change.name} ({change.kind}), {ratio} times the speed."


def _changes(heading: str, outcomes: Sequence[WhatIfSpeeds]) -> str:
    if not outcomes:
        return ""
    kinds = ["kind"] if outcomes[0].change.kind else []
    sizes = [counted(size.num_ranks, "rank") for size in outcomes[0].sizes]
    table = [[heading, *kinds, *sizes]]
    for change, _, _, ratios in outcomes:
        cells = (_between(ratio, "x ") for ratio in ratios)
        table.append([change.name, *filter(None, [change.kind]), *cells])
    return "\n" + align(table)


def _costs(costs: Sequence[Cost], model_ranks: int) -> str:
    if not costs:
        return ""
    names = [name for name in costs[0].figures if name != "J a sample"]
    table = [["ranks", "batch", *names, "unused", ""]]
    for row, figures, unused, marks in costs:
        n, batch = row.size.num_ranks, row.size.batch
        of_all = "-" if batch is None else f"{batch * n / model_ranks:,.0f}"
        cells = [_between(figures[name]) for name in names]
        # One interval is that of all: they differ by factors.
        short = [cell.partition(" ")[0] for cell in cells]
        cells = [*short[:1], *cells[1:2], *short[2:]] if cells[1:] else cells
        end = ["-" if unused is None else number(unused), ", ".join(marks)]
        table.append([f"{n:,}", of_all, *cells, *end])
    return "\n" + align(table, right=("ranks", "batch")) + _wrapped([_COST_NOTE])


def _origins(inputs: Inputs) -> Iterable[str]:
    for name in ("measured", "stated", "assumed", "unknown"):
        keys: Sequence[str] = getattr(inputs, name)
        wider = " (intervals are wider)" if name == "unknown" else ""
        if keys:
            yield f"{name}: {', '.join(keys)}{wider}"
    yield from (f"left out: {each}" for each in inputs.left_out)


def plan_as_json(report: PlanReport) -> dict[str, Any]:
    """Return JSON's types; the form is that of ``ronde plan --json``."""
    inputs = report.inputs._asdict()
    del inputs["setup"]
    return {
        "inputs": inputs,
        "parameters": dict(report.parameters),
        "effective_draws": report.effective_draws,
        "rows": [_plain_row(row) for row in report.rows],
        "what_if": [_plain_outcome(each) for each in report.what_if],
        "advice": [_plain_outcome(each) for each in report.advice],
        "cost": [
            {"ranks": row.size.num_ranks, "figures": dict(figures), "unused": unused}
            for row, figures, unused, _ in report.costs
        ],
        "notes": list(report.notes),
    }


def _plain_row(row: SpeedRow) -> dict[str, Any]:
    names = ("efficiency", "parts_s", "binds", "is_measured")
    return {
        **dict(zip(("ranks", "nodes", "batch"), row.size, strict=False)),
        **dict(zip(("low", "units_per_s", "high"), row.speed, strict=True)),
        **{name: getattr(row, name) for name in names},
        "step_s": row.step.middle,
    }


def _plain_outcome(outcome: WhatIfSpeeds) -> dict[str, Any]:
    change, sizes, speeds, ratios = outcome
    rows = [
        {"ranks": size.num_ranks, "units_per_s": speed, "ratio": ratio}
        for size, speed, ratio in zip(sizes, speeds, ratios, strict=True)
    ]
    return {"change": change.name, "kind": change.kind, "rows": rows}
