"""Measured training steps -> a table."""

from ronde.bench.training.catalogue import ModelFacts, Unit
from ronde.bench.training.outcome import Phase, Setting, TrainingOutcome, Variant

_HEADINGS = {
    Phase.INPUT: "input",
    Phase.HOST_TO_DEVICE: "to-device",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.UPDATE: "update",
}
_EXPOSED = "exposed"
_WIDTH = 10


def draw_table(outcome: TrainingOutcome) -> str:
    """Return lines of text: what was measured, a row a variant, and the ratios."""
    lines = [*_header(outcome), *_rows(outcome)]
    if outcome.setting.num_ranks > 1:
        lines += _ratios(outcome)
    return "".join(f"{line}\n" for line in lines)


def draw_models(models: list[ModelFacts]) -> str:
    """Return a line a model: parameters, multiply-adds of a sample, usual batch."""
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
    if model.unit is Unit.IMAGES:
        return "an image"
    return f"{model.units_per_sample} tokens"


def _header(outcome: TrainingOutcome) -> list[str]:
    model, setting = outcome.options.model, outcome.setting
    what = f"{model.num_parameters:,} parameters, {_macs(model)} forward"
    threads = _count(setting.num_threads, "thread")
    where = f"{_count(setting.num_ranks, 'rank')} on {setting.device}, {threads} each"
    rounds = _count(len(outcome.rounds), "round")
    how = f"{rounds} of {_count(outcome.num_steps, 'step')}"
    return [
        f"# {model.name}: {what} for {_sample(model)}",
        f"# {where}: {setting.device_name}",
        f"# {', '.join(_choices(outcome))}",
        f"# ms a step: medians over {how}, of the slowest rank",
        *_split_note(setting),
    ]


def _choices(outcome: TrainingOutcome) -> list[str]:
    options, setting = outcome.options, outcome.setting
    choices = [f"batch {options.batch} a rank", options.dtype, options.optimizer]
    if options.is_channels_last:
        choices.append("channels last")
    if options.is_compiled:
        choices.append("compiled")
    if setting.num_ranks > 1:
        choices += [f"engine {setting.engine}", f"compression {options.compression}"]
    return choices


def _split_note(setting: Setting) -> list[str]:
    if setting.device == "cpu":
        return []
    return ["# the split is of further steps, the device synchronised after each part"]


def _rows(outcome: TrainingOutcome) -> list[str]:
    headings = [f"{outcome.options.model.unit}/s", "step"]
    for phase, heading in _HEADINGS.items():
        headings.append(heading)
        if phase is Phase.BACKWARD:
            headings.append(_EXPOSED)
    labels = {v: _label(v, outcome.setting.num_ranks) for v in outcome.variants()}
    width = max(map(len, labels.values()))
    lines = [" " * width + "".join(f"{each:>{_WIDTH}}" for each in headings)]
    for variant, label in labels.items():
        cells = [f"{outcome.units_per_s(variant):.1f}", _ms(outcome.step_s(variant))]
        for phase in _HEADINGS:
            cells.append(_ms(outcome.phase_s(variant, phase)))
            if phase is Phase.BACKWARD:
                is_exposed = variant is Variant.ALL_RANKS
                cells.append(_ms(outcome.exposed_s()) if is_exposed else "-")
        lines.append(f"{label:{width}}" + "".join(f"{c:>{_WIDTH}}" for c in cells))
    return lines


def _ratios(outcome: TrainingOutcome) -> list[str]:
    ratios = (
        f"speed-up {outcome.speed_up():.2f}",
        f"efficiency {outcome.efficiency():.1%}",
        f"{outcome.fraction_of_ceiling():.1%} of the ceiling (no communication)",
    )
    lines = [f"# {', '.join(ratios)}"]
    if outcome.exposed_s() < 0:
        lines.append("# exposed communication below 0: it is less than the noise here")
    return lines


def _label(variant: Variant, num_ranks: int) -> str:
    match variant:
        case Variant.ONE_RANK:
            return "1 rank"
        case Variant.ALL_RANKS:
            return _count(num_ranks, "rank")
        case Variant.NO_COMMUNICATION:
            return f"{_count(num_ranks, 'rank')}, no communication"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


def _ms(duration_s: float) -> str:
    return f"{duration_s * 1e3:.2f}"
