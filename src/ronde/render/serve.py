"""Table of a load on one server or two."""

from collections.abc import Mapping, Sequence

from ronde.render.text import align, shorten
from ronde.serve.load import LoadOutcome, median_figures
from ronde.units import counted, grouped


def draw_load(runs: Mapping[str, Sequence[LoadOutcome]]) -> str:
    """Return a row a figure and a column a server; the ratio is first by second."""
    columns = [median_figures(outcomes) for outcomes in runs.values()]
    rows = [["", *runs, *(["ratio"] if len(runs) > 1 else [])]]
    for name in columns[0]:
        values = [each[name] for each in columns if name in each]
        cells = [f"{value:,.2f}" for value in values]
        if len(values) > 1 and values[1]:
            cells.append(f"{values[0] / values[1]:.2f}")
        rows.append([name.replace("_", " "), *cells])
    notes = [line for each in runs.items() for line in _notes(*each)]
    return align(rows, right=rows[0][1:]) + "".join(f"# {line}\n" for line in notes)


def _notes(name: str, outcomes: Sequence[LoadOutcome]) -> list[str]:
    requests = [each for outcome in outcomes for each in outcome.requests]
    whole = [each for each in requests if not each.error]
    num_made = sum(each.num_made for each in whole)
    num_sent = sum(each.usage.get("prompt_tokens", 0) for each in whole)
    text = f"{name}: {len(whole):,} of {counted(len(requests), 'request')} answered"
    lines = [f"{text}, with {num_made:,} tokens for {num_sent:,} of prompts"]
    if num_other := sum(each.num_made != each.max_tokens for each in whole):
        lines.append(f"{counted(num_other, 'answer')} not as long as requested")
    failed = [(each.error.partition(":")[0], each.error) for each in requests]
    for kind, errors in sorted(grouped(failed).items()):
        if kind:
            lines.append(f"{kind}: {len(errors):,}, such as {shorten(errors[0], 160)}")
    figures = median_figures(outcomes)
    if figures["client_late_p99_ms"] > figures.get("itl_p50_ms", 0.0) / 10:
        lines.append("the times above have delays of this client: see client late")
    return lines
