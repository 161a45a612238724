"""Table of a load on one server or two."""

from collections.abc import Mapping, Sequence

from ronde.render.text import align, shorten
from ronde.serve import LoadOutcome, median_figures
from ronde.units import grouped

_MOST_SHOWN = 160  # characters of an error
_MOST_LATE = 0.1  # of the time between tokens


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
    num_prompt = sum(each.num_prompt for each in whole)
    lines = [
        f"{name}: {len(whole):,} of {len(requests):,} requests answered, with "
        f"{num_made:,} tokens; their prompts have {num_prompt:,}"
    ]
    num_other = sum(each.num_made != each.max_tokens for each in whole)
    if num_other:
        lines.append(f"{num_other:,} answers are not as long as requested")
    kinds = grouped((each.error.partition(":")[0], each.error) for each in requests)
    for kind, errors in sorted(kinds.items()):
        if kind:
            lines.append(f"{kind}, {len(errors):,} times: {shorten(errors[0], 160)}")
    figures = median_figures(outcomes)
    if figures["client_late_p99_ms"] > _MOST_LATE * figures.get("itl_p50_ms", 0.0):
        lines.append(
            "this client was late by over a tenth of the time between tokens: its own "
            "delays are in the times above"
        )
    return lines
