"""Tables of results that were read, compared, or measured from training steps."""

import math
from collections.abc import Iterable, Sequence

from ronde.bench.comparison import PEAK, Comparison, RowKey
from ronde.bench.results import HALVES, Run, Side
from ronde.bench.training.catalogue import ModelFacts, Unit
from ronde.bench.training.outcome import COMMUNICATING, Phase, TrainingOutcome, Variant
from ronde.render.text import align
from ronde.units import counted, format_size, grouped

_RUN_HEADINGS = (
    *("log", "test", "n", "known by", "type", "op", "rows", "sizes", "peak GB/s"),
    *("average GB/s", "wrong", "complete"),
)
_ROW_HEADINGS = ("size", "count", "type", "op", "root")
_SIDE_HEADINGS = ("time us", "algbw", "busbw", "wrong")
_TEXT = frozenset({"log", "test", "engine", "type", "op", "known by", "complete"})
_NONE = "-"
_PHASES = {phase: str(phase) for phase in Phase} | {Phase.HOST_TO_DEVICE: "to-device"}
_WIDTH = 10
_PEERS = {
    "torch": "DistributedDataParallel",
    "tensorflow": "MultiWorkerMirroredStrategy",
    "jax": "psum",
}


def draw_runs(runs: Sequence[tuple[str, Run]]) -> str:
    """Return one line per run, with the name of its log; bandwidths are in GB/s."""
    return _table(_RUN_HEADINGS, [_run_cells(name, run) for name, run in runs])


def draw_rows(run: Run) -> str:
    lines = [
        [
            *(str(row.size_bytes), str(row.count), row.dtype, row.redop or _NONE),
            _NONE if row.root is None else str(row.root),
            *(*_side_cells(row.out_of_place), *_side_cells(row.in_place)),
        ]
        for row in run.rows
    ]
    return _table((*_ROW_HEADINGS, *_SIDE_HEADINGS, *_SIDE_HEADINGS), lines)


def draw_comparison(comparison: Comparison, names: tuple[str, str]) -> str:
    a, b = names
    lines = [f"A: {a}\n", f"B: {b}\n", *(f"{w}.\n" for w in comparison.warnings)]
    lines += ["\nbusbw in GB/s\n", _comparison_table(comparison)]
    mean = comparison.mean_ratio()
    text = "no two rows can be compared"
    text = text if mean is None else f"B/A, geometric mean: {mean:.3f}"
    lines.append(f"\n{text}\n")
    tests = grouped((p.key.test or "?", p) for p in comparison.pairs if p.ratio)
    for test, pairs in tests.items():
        peak_a = max(pair.a_busbw_gb_per_s for pair in pairs)
        peak_b = max(pair.b_busbw_gb_per_s for pair in pairs)
        peaks = f"{_number(peak_a)} and {_number(peak_b)} GB/s"
        lines.append(f"{test}, B/A of the peaks: {peak_b / peak_a:.3f} ({peaks})\n")
    for name, keys in (("A", comparison.only_a), ("B", comparison.only_b)):
        if keys:
            lines.append(f"only in {name}: {counted(len(keys), 'row')}\n")
    return "".join(lines)


def _comparison_table(comparison: Comparison) -> str:
    cells: dict[RowKey, list[str]] = {}
    for pair in comparison.pairs:
        key = pair.key
        titles = [key.test or "?", key.engine or _NONE, key.dtype, key.redop]
        size = "peak" if key.size_bytes == PEAK else format_size(key.size_bytes)
        titles += [str(key.root), size]
        line = cells.setdefault(key, titles + [_NONE] * 3 * len(HALVES))
        start = len(titles) + 3 * HALVES.index(pair.half)
        line[start : start + 3] = [
            _number(pair.a_busbw_gb_per_s),
            _number(pair.b_busbw_gb_per_s),
            _NONE if pair.ratio is None else f"{pair.ratio:.2f}",
        ]
    headings = ["test", "engine", "type", "op", "root", "size"]
    headings += ["A", "B", "B/A", "A in place", "B in place", "B/A"]
    lines = [headings, *cells.values()]
    if not any(pair.key.engine for pair in comparison.pairs):
        for line in lines:
            del line[1]
    return _table(lines[0], lines[1:])


def _run_cells(name: str, run: Run) -> list[str]:
    values = [value for value in run.all_busbw_gb_per_s() if not math.isnan(value)]
    sizes = [row.size_bytes for row in run.rows]
    wrong = run.num_wrong()
    average, count = run.average_busbw_gb_per_s, run.ranks
    ranks = "?" if count.value is None else str(count.value)
    if count.value is not None and count.low != count.high:
        ranks += f" ({count.low}-{count.high})"
    return [
        name,
        run.test or "?",
        ranks,
        str(run.ranks.source),
        _several(row.dtype for row in run.rows),
        _several(row.redop or _NONE for row in run.rows),
        str(len(run.rows)),
        f"{format_size(min(sizes))}-{format_size(max(sizes))}" if sizes else _NONE,
        _number(max(values)) if values else _NONE,
        _NONE if average is None else f"{average:g}",
        "unchecked" if wrong is None else f"{wrong:g}",
        "yes" if run.is_complete else "no",
    ]


def _several(words: Iterable[str]) -> str:
    """Return the common word, or else the number of different words."""
    different = list(dict.fromkeys(words)) or [_NONE]
    return different[0] if len(different) == 1 else f"{len(different)} kinds"


def _side_cells(side: Side | None) -> list[str]:
    if side is None:
        return [_NONE] * 4
    wrong = side.num_wrong
    figures = (side.time_us, side.algbw_gb_per_s, side.busbw_gb_per_s)
    cells = [_NONE if figure is None else _number(figure) for figure in figures]
    return [*cells, "N/A" if wrong is None else f"{wrong:g}"]


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1e6 else f"{value:.3g}"


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return align([headings, *lines], right={*headings} - _TEXT)


def draw_training(outcome: TrainingOutcome) -> str:
    lines = [*_header(outcome), *_rows(outcome)]
    if outcome.setting.num_ranks > 1:
        lines.append(
            f"# speed-up {outcome.speed_up():.2f}, efficiency "
            f"{outcome.efficiency():.1%}, {outcome.fraction_of_ceiling():.1%} of the "
            "ceiling (no communication)"
        )
        for variant, ratio in outcome.speed_over().items():
            other = _variant_names(outcome)[variant]
            lines.append(f"# {ratio:.2f} times as fast as {other}")
        below = "# exposed communication below 0: it is less than the noise here"
        communicating = [v for v in outcome.variants() if v in COMMUNICATING]
        is_noisy = any(outcome.exposed_s(each) < 0 for each in communicating)
        lines += [below] if is_noisy else []
    return "".join(f"{line}\n" for line in lines)


def draw_models(models: list[ModelFacts]) -> str:
    """Return one line per model: parameters, batch, multiply-adds per sample."""
    lines = [f"{'name':12}{'parameters':>13}{'batch':>7}  forward"]
    lines += [
        f"{m.name:12}{m.num_parameters:13,}{m.batch:7}  {_macs(m)} for {_sample(m)}"
        for m in models
    ]
    return "".join(f"{line}\n" for line in lines)


def _macs(model: ModelFacts) -> str:
    mega = model.forward_macs / 1e6
    return f"{mega:.3g} MMAC" if mega < 100 else f"{mega / 1e3:.3g} GMAC"


def _sample(model: ModelFacts) -> str:
    is_image = model.unit is Unit.IMAGES
    return "an image" if is_image else f"{model.units_per_sample} tokens"


def _header(outcome: TrainingOutcome) -> list[str]:
    options, setting = outcome.options, outcome.setting
    model = options.model
    size = f"{model.num_parameters:,} parameters, {_macs(model)} forward"
    threads = counted(setting.num_threads, "thread")
    ranks = counted(setting.num_ranks, "rank")
    rounds = counted(len(outcome.rounds), "round")
    blocks = f"{rounds} of {counted(outcome.num_steps, 'step')}"
    choices = [f"batch {options.batch} a rank", options.dtype, options.optimizer]
    choices += ["channels last"] if options.is_channels_last else []
    if options.framework != "torch":
        version = f"{options.framework} {setting.framework_version}"
        is_keras = options.framework == "keras"
        choices.insert(0, f"{version} on {setting.backend}" if is_keras else version)
    if setting.num_ranks > 1:
        choices += [f"engine {setting.engine}", f"compression {options.compression}"]
    lines = [
        f"# {model.name}: {size} for {_sample(model)}",
        f"# {ranks} on {setting.device}, {threads} each: {setting.device_name}",
        f"# {', '.join(choices)}",
        f"# ms a step: medians over {blocks}, of the slowest rank",
    ]
    note = "# the split is of further steps, the device synchronised after each part"
    if options.framework != "torch":
        note = (
            "# the split is of differences between compiled steps that do more and more"
        )
    is_apart = setting.device != "cpu" or options.framework != "torch"
    return [*lines, note] if is_apart else lines


def _rows(outcome: TrainingOutcome) -> list[str]:
    headings = [f"{outcome.options.model.unit}/s", "step", *_PHASES.values()]
    headings.insert(headings.index("backward") + 1, "exposed")
    labels = _variant_names(outcome)
    width = max(map(len, labels.values()))
    lines = [" " * width + "".join(f"{each:>{_WIDTH}}" for each in headings)]
    for variant, label in labels.items():
        cells = [f"{outcome.units_per_s(variant):.1f}", _ms(outcome.step_s(variant))]
        for phase in _PHASES:
            cells.append(_ms(outcome.phase_s(variant, phase)))
            if phase is Phase.BACKWARD:
                is_exposed = variant in COMMUNICATING
                cells.append(_ms(outcome.exposed_s(variant)) if is_exposed else "-")
        lines.append(f"{label:{width}}" + "".join(f"{c:>{_WIDTH}}" for c in cells))
    return lines


def _variant_names(outcome: TrainingOutcome) -> dict[Variant, str]:
    num_ranks = outcome.setting.num_ranks
    ranks = counted(num_ranks, "rank")
    names = {
        Variant.ONE_RANK: "1 rank",
        Variant.ALL_RANKS: ranks,
        Variant.NO_COMMUNICATION: f"{ranks}, no communication",
        Variant.PARAMETER_SERVER: f"{ranks}, parameter server",
        Variant.BARE: f"{ranks}, ronde.{outcome.setting.backend}",
        Variant.PEER: f"{ranks}, {_PEERS[outcome.setting.backend]}",
        Variant.DATA_PARALLEL: f"1 process, {num_ranks} GPUs, DataParallel",
    }
    return {variant: names[variant] for variant in outcome.variants()}


def _ms(duration_s: float) -> str:
    return f"{duration_s * 1e3:.2f}"
