"""Predicted training speeds as a table, with their reasons, and as JSON."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ronde.plan.answer import Answer, Between, Inputs, Row
from ronde.plan.cost import Cost
from ronde.plan.what_if import Outcome
from ronde.render.text import align, wrap
from ronde.units import format_duration

_WIDTH = 100
_RIGHT = ("ranks", "nodes", "step", "efficiency", "hours", "kWh", "global batch")


class PlanReport(NamedTuple):
    """A prediction with the answers to further questions."""

    inputs: Inputs
    answer: Answer
    what_if: tuple[Outcome, ...] = ()
    advice: tuple[Outcome, ...] = ()  # best first
    is_advice_asked: bool = False
    costs: tuple[Cost, ...] = ()
    fit: tuple[str, ...] = ()  # sentences on memory and traffic


def draw_plan(report: PlanReport) -> str:
    """Return tables of at most 100 columns, and sentences."""
    rows = report.answer.rows
    unit = f"{report.answer.setup.program.unit}/s"
    table = [["ranks", "nodes", "step", unit, "80 %", "efficiency", "binds"]]
    table += [_cells(row) for row in rows]
    text = _wrapped([_header(report)]) + align(table, right=(*_RIGHT, unit))
    text += "\n" + _wrapped([_binding(rows[-1], unit), _help(report), *report.fit])
    text += _what_if(report.what_if)
    if report.is_advice_asked:
        text += _advice(report.advice)
    text += _costs(report.costs)
    origins = report.inputs.lines()
    return (
        text
        + "\n"
        + _wrapped([*origins, *(f"note: {w}" for w in report.answer.warnings)])
    )


def _wrapped(lines: Iterable[str]) -> str:
    return "".join(wrap("", line, _WIDTH, indent=2) for line in lines if line)


def _header(report: PlanReport) -> str:
    setup = report.answer.setup
    program, cluster, base = setup.program, setup.cluster, setup.points[0].size
    batch = "an unknown batch"
    if base.batch is not None:
        batch = f"{base.batch:g} {'samples' if program.units_a_sample != 1 else program.unit}"
    sent = "?" if program.overlap is None else program.overlap
    sizes = ", ".join(f"{p.size.num_ranks:,}" for p in setup.points)
    words = [
        *filter(None, [program.name]),
        f"{batch} a rank",
        f"{program.algorithm or program.exchange}".replace("_", " "),
        f"overlap {sent}",
        f"known at {sizes} ranks on nodes of {cluster.ranks_per_node}",
    ]
    if cluster.node_gbit_per_s:
        words.append(f"{cluster.node_gbit_per_s:g} Gbit/s a node")
    if base.num_ranks > 1:
        words.append(f"efficiency by {base.num_ranks} ranks")
    return ", ".join(words)


def _cells(row: Row) -> list[str]:
    size, speed, step = row.size, row.speed, row.step
    interval = f"{number(speed.low)} .. {number(speed.high)}"
    return [
        f"{size.num_ranks:,}",
        f"{size.num_nodes:,}",
        "-" if step.middle is None else format_duration(step.middle),
        "-" if speed.middle is None else number(speed.middle),
        "measured" if row.is_measured else interval,
        "-" if row.efficiency is None else f"{row.efficiency:.0%}",
        " and ".join(row.binds),
    ]


def number(value: float) -> str:
    """Write a figure with at least three digits."""
    digits = 0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 10 else 3
    return f"{value:,.{digits}f}"


def _between(figure: Between, sign: str = "") -> str:
    ends = f"{sign}{number(figure.low)} .. {sign}{number(figure.high)}"
    return ends if figure.middle is None else f"{sign}{number(figure.middle)} ({ends})"


def _binding(row: Row, unit: str) -> str:
    name, whole_s = row.binds[0], sum(row.parts_s.values())
    if name == "compute":
        return f"With {row.size.num_ranks:,} ranks computing binds: no other part costs over 3 %."
    saved_s = row.saved_s[name]
    faster = (
        ""
        if row.speed.middle is None
        else (
            f"; without it {number(row.speed.middle * whole_s / (whole_s - saved_s))} {unit}"
        )
    )
    return (
        f"With {row.size.num_ranks:,} ranks {name} costs {format_duration(saved_s)} of "
        f"{format_duration(whole_s)}{faster}."
    )


def _help(report: PlanReport) -> str:
    if not report.advice:
        return "No change that ronde tries gains over 3 %: computing binds."
    best = report.advice[0]
    ratio = best.ratios[-1]
    return (
        f"Most would help: {best.change.name} ({best.change.kind}), "
        f"{_between(ratio)} times the speed."
    )


def _what_if(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return ""
    names = [f"{size.num_ranks:,} ranks" for size in outcomes[0].sizes]
    table = [["what if", *names]]
    table += [
        [o.change.name, *(f"x {_between(ratio)}" for ratio in o.ratios)]
        for o in outcomes
    ]
    return "\n" + align(table)


def _advice(outcomes: Sequence[Outcome]) -> str:
    table = [["change", "kind", "speed"]]
    table += [
        [o.change.name, o.change.kind, f"x {_between(o.ratios[-1])}"] for o in outcomes
    ]
    return "\n" + align(table) if outcomes else ""


def _costs(costs: Sequence[Cost]) -> str:
    if not costs:
        return ""
    table = [
        ["ranks", "global batch", "hours", "dollars", "a million", "kWh", "unused", ""]
    ]
    for cost in costs:
        size = cost.row.size
        batch = "-" if size.batch is None else f"{size.batch * size.num_ranks:,.0f}"
        figures = (cost.dollars, cost.dollars_a_million, cost.kwh)
        table.append(
            [
                f"{size.num_ranks:,}",
                batch,
                _between(cost.hours),
                *("-" if each is None else _between(each) for each in figures),
                "-" if cost.unused_dollars is None else number(cost.unused_dollars),
                ", ".join(cost.marks),
            ]
        )
    return "\n" + align(table, right=("ranks", "global batch"))


def plan_as_json(report: PlanReport) -> dict[str, Any]:
    """Return JSON's types; the form is that of ``ronde plan --json``."""
    return {
        "inputs": report.inputs.as_json(),
        "parameters": {k: list(v) for k, v in report.answer.parameters.items()},
        "rows": [_row_as_json(row) for row in report.answer.rows],
        "what_if": [_outcome_as_json(each) for each in report.what_if],
        "advice": [_outcome_as_json(each) for each in report.advice],
        "cost": [
            {
                "ranks": cost.row.size.num_ranks,
                **{k: v for k, v in cost._asdict().items() if k != "row"},
            }
            for cost in report.costs
        ],
        "notes": [*report.fit, *report.answer.warnings],
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    return {
        "ranks": row.size.num_ranks,
        "nodes": row.size.num_nodes,
        "batch": row.size.batch,
        "step_s": row.step.middle,
        "units_per_s": row.speed.middle,
        "low": row.speed.low,
        "high": row.speed.high,
        "efficiency": row.efficiency,
        "parts_s": dict(row.parts_s),
        "binds": list(row.binds),
        "is_measured": row.is_measured,
    }


def _outcome_as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "change": outcome.change.name,
        "kind": outcome.change.kind,
        "rows": [
            {"ranks": size.num_ranks, "units_per_s": speed, "ratio": ratio}
            for size, speed, ratio in zip(
                outcome.sizes, outcome.speeds, outcome.ratios, strict=True
            )
        ],
    }
