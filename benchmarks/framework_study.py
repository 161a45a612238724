"""Measure training steps of four frameworks, and write a dated report with plots.

Run it as ``python benchmarks/framework_study.py`` where TensorFlow, Keras, JAX and
optax are installed. Every cell (a model in a framework) is a run of
``ronde bench train``, whose variants take turns. The cells take turns, too, in a new
order each cycle, so that a machine that slows down slows all of them. Figures are
medians over the cycles.

It writes ``frameworks-DATE.md``, two plots beside it, and all records as JSON lines. A
cell that could not be measured is in the report with the last line that it printed.
"""

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ronde.records import read_records

HERE = Path(__file__).parent
FRAMEWORKS = ("torch", "tensorflow", "keras", "jax")
# The batch of each rank: large enough for a usual step, small enough for a processor.
BATCHES = {"mnist_cnn": 100, "mlp": 32, "alexnet": 8, "googlenet": 4, "resnet50": 4}
VARIANTS = {
    "no_communication": "no communication",
    "all_ranks": "ronde",
    "bare": "ronde, bare loop",
    "peer": "own strategy",
    "parameter_server": "parameter server",
    "data_parallel": "DataParallel",
}
PARTS = {
    "input": "input",
    "host_to_device": "host to device",
    "forward": "forward",
    "backward": "backward",
    "exposed": "exposed communication",
    "update": "update",
}
COLOURS = ("#7f7f7f", "#1b9e77", "#386cb0", "#d95f02", "#c51b7d", "#e6ab02")
LIMIT_S = 1800.0

Cell = tuple[str, str]  # model, framework
Values = dict[str, Any]  # of a record


class Bar(NamedTuple):
    """One line of a plot: lengths by the legend's names, one behind the other."""

    label: str
    lengths: dict[str, float]


def measure(cell: Cell, options: argparse.Namespace, path: Path) -> str:
    """Run one cell, which appends its record; return why it failed, else nothing."""
    model, framework = cell
    words = [sys.executable, "-m", "ronde", "bench", "train", "--device", "cpu"]
    words += ["--model", model, "--framework", framework, "-n", str(options.ranks)]
    words += ["--batch", str(BATCHES[model]), "--rounds", str(options.rounds), "--peer"]
    words += ["--json", str(path)]
    if options.steps:
        words += ["--steps", str(options.steps)]
    if framework == "torch":
        words += ["--reduce", "parameter_server"]
    try:
        ended = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"not finished in {LIMIT_S:.0f} s"
    if ended.returncode == 0:
        return ""
    lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
    return lines[-1].removeprefix("ronde: ")


def medians(runs: Sequence[Values]) -> Values:
    """Return a cell's figures: medians over its runs."""

    def over(figures: Iterable[float]) -> float:
        return statistics.median(figures)

    variants: dict[str, Values] = {}
    for name in [each for each in VARIANTS if each in runs[0]["variants"]]:
        own = [run["variants"][name] for run in runs]
        floor = [run["variants"]["no_communication"]["step_ms"] for run in runs]
        pairs = list(zip(floor, own, strict=True))
        variants[name] = {
            "step_ms": over(each["step_ms"] for each in own),
            "units_per_s": over(each["units_per_s"] for each in own),
            "share": over(none / each["step_ms"] for none, each in pairs),
            "exposed": over(each.get("exposed_ms", 0.0) for each in own),
            **{
                part: over(each["phases_ms"][part] for each in own)
                for part in PARTS
                if part != "exposed"
            },
        }
    first = {key: runs[0][key] for key in ("framework_version", "backend", "torch")}
    efficiency = over(run["efficiency"] for run in runs)
    is_in_step = all(run["is_in_step"] for run in runs)
    return first | {
        "variants": variants,
        "efficiency": efficiency,
        "is_in_step": is_in_step,
        "num_runs": len(runs),
    }


def plot(title: str, unit: str, names: Sequence[str], bars: Sequence[Bar]) -> str:
    """Draw horizontal bars as SVG; a bar without a label belongs to the one above."""
    left, width, height = 230, 560, 18
    longest = max((sum(bar.lengths.values()) for bar in bars), default=0.0) or 1.0
    total = 86 + height * len(bars)
    colours = dict(zip(names, COLOURS, strict=False))
    box = f"0 0 {left + width + 110} {total}"
    form = 'font-family="sans-serif" font-size="12"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" {form}>',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
    ]
    for number, name in enumerate(names):
        x = 10 + number * 145
        lines += [
            f'<rect x="{x}" y="36" width="12" height="12" fill="{colours[name]}"/>',
            f'<text x="{x + 17}" y="46">{escape(name)}</text>',
        ]
    for number, bar in enumerate(bars):
        x, y = float(left), 66 + number * height
        lines.append(f'<text x="10" y="{y + 12}">{escape(bar.label)}</text>')
        for name, length in bar.lengths.items():
            share = length / longest * width
            lines.append(
                f'<rect x="{x:.1f}" y="{y}" width="{share:.1f}" height="{height - 4}" '
                f'fill="{colours[name]}"/>'
            )
            x += share
        figure = f"{sum(bar.lengths.values()):.3g} {unit}"
        lines.append(f'<text x="{x + 6:.1f}" y="{y + 12}">{escape(figure)}</text>')
    return "\n".join([*lines, "</svg>\n"])


def speed_bars(cells: dict[Cell, Values]) -> list[Bar]:
    bars: list[Bar] = []
    for (model, framework), values in cells.items():
        label = f"{model}, {framework}"
        for variant, figures in values["variants"].items():
            bars.append(Bar(label, {VARIANTS[variant]: 100 * figures["share"]}))
            label = ""
    return bars


def part_bars(cells: dict[Cell, Values], model: str) -> list[Bar]:
    """Return the parts of ronde's step in each framework; noise below 0 counts as 0."""
    return [
        Bar(
            f"{model}, {framework}",
            {
                name: max(0.0, values["variants"]["all_ranks"][part])
                for part, name in PARTS.items()
            },
        )
        for (its_model, framework), values in cells.items()
        if its_model == model
    ]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def write_report(
    options: argparse.Namespace,
    cells: dict[Cell, Values],
    missing: dict[Cell, str],
    machine: str,
) -> Path:
    date = time.strftime("%Y-%m-%d")
    stem = options.folder / f"frameworks-{date}"
    plots = {f"{stem.name}-speed.svg": "share of the step without communication"}
    title = f"Speed with communication, {options.ranks} ranks: the higher, the better"
    names, bars = list(VARIANTS.values()), speed_bars(cells)
    shown = [name for name in names if any(name in bar.lengths for bar in bars)]
    stem.with_name(next(iter(plots))).write_text(plot(title, "%", shown, bars))
    for model in dict.fromkeys(each for each, _ in cells):
        name = f"{stem.name}-{model}.svg"
        bars = part_bars(cells, model)
        title = f"The parts of a step with ronde, {model}"
        stem.with_name(name).write_text(plot(title, "ms", list(PARTS.values()), bars))
        plots[name] = f"parts of a step, {model}"
    path = stem.with_suffix(".md")
    path.write_text("\n".join(_report(options, cells, missing, plots, machine)))
    return path


def _report(
    options: argparse.Namespace,
    cells: dict[Cell, Values],
    missing: dict[Cell, str],
    plots: dict[str, str],
    machine: str,
) -> list[str]:
    versions = {
        f"{framework} {values['framework_version']} on {values['backend']}"
        for (_, framework), values in cells.items()
    }
    setting = (
        f"{options.ranks} ranks on one host ({machine}), no GPU; a rank's framework "
        "has as many threads as the rank has cores. Medians over at most "
        f"{options.cycles} runs of each cell, in turns; a run has {options.rounds} "
        "rounds of all variants in "
        f"turns. Versions: {', '.join(sorted(versions))}."
    )
    how = (
        "Of torch they are timed one by one. The others compile a step: their parts "
        "are differences between the times of forward, forward and backward, the step "
        "without communication, and the step. With Keras the update includes its "
        "trainer."
    )
    lines = [
        f"# Training steps of four frameworks, {time.strftime('%d %B %Y')}",
        f"`python benchmarks/framework_study.py {' '.join(sys.argv[1:])}`".rstrip(),
        "",
        setting,
        "",
        *(f"![{text}]({name})" for name, text in plots.items()),
        "",
        "## All ranks, by the way of reducing",
        "*Share*: the time of a step without communication by the step's time.",
        "",
    ]
    heads = ("model", "framework", "variant", "ms a step", "images/s", "share")
    rows = [
        (
            *(model, framework, VARIANTS[variant], f"{figures['step_ms']:.2f}"),
            *(f"{figures['units_per_s']:.0f}", f"{figures['share']:.2f}"),
        )
        for (model, framework), values in cells.items()
        for variant, figures in values["variants"].items()
    ]
    lines += [*table(heads, rows), "", "## The parts of a step, ms", ""]
    lines += [how, ""]
    rows = [
        (
            *(model, framework, VARIANTS[variant]),
            *(f"{figures[part]:.2f}" for part in PARTS),
        )
        for (model, framework), values in cells.items()
        for variant, figures in values["variants"].items()
    ]
    lines += table(("model", "framework", "variant", *PARTS.values()), rows)
    lines += ["", "## Checks", ""]
    heads = ("model", "framework", "runs", "efficiency", "equal weights on all ranks")
    rows = [
        (
            *(model, framework, str(values["num_runs"])),
            *(f"{values['efficiency']:.0%}", "yes" if values["is_in_step"] else "NO"),
        )
        for (model, framework), values in cells.items()
    ]
    lines += table(heads, rows)
    if missing:
        lines += ["", "## Not measured", ""]
        rows = [(*cell, reason.replace("|", "/")) for cell, reason in missing.items()]
        lines += table(("model", "framework", "reason"), rows)
    return [*lines, ""]


def main() -> None:
    """Measure all cells and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument(
        "--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS)
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=3, help="runs of each cell")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each run")
    parser.add_argument("--steps", type=int, default=0, help="steps a round")
    parser.add_argument("--folder", type=Path, default=HERE, help="of the report")
    options = parser.parse_args()
    records = options.folder / f"frameworks-{time.strftime('%Y-%m-%d')}.jsonl"
    records.unlink(missing_ok=True)
    order = random.Random(0)
    wanted = list(product(options.models, options.frameworks))
    missing: dict[Cell, str] = {}
    for cycle in range(options.cycles):
        for cell in order.sample(wanted, len(wanted)):
            start_s = time.monotonic()
            reason = measure(cell, options, records)
            if reason:
                missing[cell] = reason
            took = f"{time.monotonic() - start_s:.0f} s"
            print(f"{cycle + 1}: {' '.join(cell)}: {reason or took}", flush=True)
    found = list(read_records(records, "bench_train")) if records.exists() else []
    runs: defaultdict[Cell, list[Values]] = defaultdict(list)
    for record in found:
        runs[record.values["model"], record.values["framework"]].append(record.values)
    cells = {cell: medians(runs[cell]) for cell in wanted if cell in runs}
    machine = str(found[0].values["device_name"]) if found else "no record"
    print(write_report(options, cells, missing, machine))


if __name__ == "__main__":
    main()
