"""Measure training steps of four frameworks, and write a dated report with plots.

Run it as ``python benchmarks/framework_study.py`` where TensorFlow, Keras, JAX and
optax are installed. Every cell (a model in a framework) is a run of
``ronde bench train``, whose variants take turns. The cells take turns, too, in a new
order each cycle, so that a machine that slows down slows all of them. Figures are
medians over the cycles.

It writes a folder: ``README.md``, plots, and all records as JSON lines. With ``--keep``
the cells of earlier commands stay in the report, so that a study can be made in parts.
A cell that could not be measured is in it with the last line that it printed.
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
# Of the legend's names in order, on light and on dark ground.
COLOURS = (
    ("#8c959f", "#768390"),
    ("#00796b", "#4db6ac"),
    ("#3f6fb5", "#7aa5e6"),
    ("#c75d0c", "#e8964f"),
    ("#8e4585", "#c48abb"),
    ("#b58900", "#dcc060"),
)
STYLE = """
.p{--ink:#24292f;font:13px system-ui,sans-serif}
@media(prefers-color-scheme:dark){.p{--ink:#e6edf3}}
.p text{fill:var(--ink)} .p .b{font-weight:600} .p line{stroke:var(--ink)}
"""
LIMIT_S = 1800.0

Cell = tuple[str, str]  # model, framework
Values = dict[str, Any]  # of a record


class Bar(NamedTuple):
    """One line of a plot: lengths by the legend's names, one behind the other."""

    lengths: dict[str, float]
    label: str = ""  # the first of a group has one
    name: str = ""  # behind the figure


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
    """Draw horizontal bars as SVG, in the colours of the reader's theme."""
    left, width, height, gap = 170, 440, 17, 9
    longest = max((sum(bar.lengths.values()) for bar in bars), default=0.0) or 1.0
    classes = {name: f"c{number}" for number, name in enumerate(names)}
    lines = [f'<text x="10" y="20" class="b">{escape(title)}</text>']
    x, y = 10.0, 34.0
    shown = {name for bar in bars for name in bar.lengths}
    for name, colour in classes.items():
        if name not in shown:
            continue
        lines += [
            f'<rect x="{x}" y="{y}" width="12" height="12" class="{colour}"/>',
            f'<text x="{x + 17}" y="{y + 11}">{escape(name)}</text>',
        ]
        x += 36 + 7.2 * len(name)
    y = 52.0
    for bar in bars:
        x, y = float(left), y + (gap if bar.label else 0)
        lines.append(f'<text x="10" y="{y + 12:.0f}">{escape(bar.label)}</text>')
        for name, length in bar.lengths.items():
            share = length / longest * width
            lines.append(
                f'<rect x="{x:.1f}" y="{y:.0f}" width="{share:.1f}" '
                f'height="{height - 3}" class="{classes[name]}"/>'
            )
            x += share
        total = sum(bar.lengths.values())
        figure = f"{total:.{2 if total < 10 else 0}f} {unit} {bar.name}".rstrip()
        lines.append(f'<text x="{x + 6:.1f}" y="{y + 12:.0f}">{escape(figure)}</text>')
        y += height
    box = f'viewBox="0 0 800 {y + 8:.0f}" width="800" role="img"'
    shades = list(zip(classes.values(), COLOURS, strict=False))
    light = "".join(f".p .{name}{{fill:{pair[0]}}}" for name, pair in shades)
    dark = "".join(f".p .{name}{{fill:{pair[1]}}}" for name, pair in shades)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="p" {box}>',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}{light}",
            f"@media(prefers-color-scheme:dark){{{dark}}}</style>",
            *lines,
            "</svg>\n",
        ]
    )


def speed_bars(cells: dict[Cell, Values]) -> list[Bar]:
    bars: list[Bar] = []
    for (model, framework), values in cells.items():
        label = f"{model}, {framework}"
        for variant, figures in values["variants"].items():
            if variant != "no_communication":
                bars.append(Bar({VARIANTS[variant]: 100 * figures["share"]}, label))
                label = ""
    return bars


def part_bars(cells: dict[Cell, Values], model: str) -> list[Bar]:
    """Return the parts of steps in each framework; noise below 0 counts as 0."""
    bars: list[Bar] = []
    for (_, framework), values in ((k, v) for k, v in cells.items() if k[0] == model):
        label = framework
        for variant, figures in values["variants"].items():
            lengths = {name: max(0.0, figures[part]) for part, name in PARTS.items()}
            bars.append(Bar(lengths, label, VARIANTS[variant]))
            label = ""
    return bars


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def write_report(
    options: argparse.Namespace,
    cells: dict[Cell, Values],
    missing: dict[Cell, str],
    machine: str,
) -> Path:
    plots = {"speed.svg": "speed with communication"}
    title = f"Speed of {options.ranks} ranks, in % of that without communication"
    names, bars = list(VARIANTS.values()), speed_bars(cells)
    folder: Path = options.folder
    (folder / "speed.svg").write_text(plot(title, "%", names, bars))
    for model in dict.fromkeys(each for each, _ in cells):
        title = f"{model}: the parts of a step, ms, {options.ranks} ranks"
        drawn = plot(title, "ms", list(PARTS.values()), part_bars(cells, model))
        (folder / f"{model}.svg").write_text(drawn)
        plots[f"{model}.svg"] = f"parts of a step, {model}"
    path = folder / "README.md"
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
        "has as many threads as the rank has cores. Medians over the runs of each "
        f"cell; a run has {options.rounds} rounds, in which the variants take turns. "
        f"Versions: {', '.join(sorted(versions))}."
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
    parser.add_argument("--cycles", type=int, default=1, help="runs of each cell")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each run")
    parser.add_argument("--steps", type=int, default=0, help="steps a round")
    parser.add_argument("--keep", action="store_true", help="add to earlier cells")
    folder = HERE / f"frameworks-{time.strftime('%Y-%m-%d')}"
    parser.add_argument("--folder", type=Path, default=folder, help="of the report")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    records = options.folder / "records.jsonl"
    if not options.keep:
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
    every = product(BATCHES, FRAMEWORKS)
    cells = {cell: medians(runs[cell]) for cell in every if cell in runs}
    machine = str(found[0].values["device_name"]) if found else "no record"
    print(write_report(options, cells, missing, machine))


if __name__ == "__main__":
    main()
