"""Print the scaling of a training, from the records that the examples append."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ronde.errors import UsageError
from ronde.records import Record, read_records

HEADINGS = (
    "run",
    "images/s",
    "speed-up",
    "efficiency",
    "of the ceiling",
    "test accuracy",
)
NOTES = """\
speed-up        images/s divided by those of 1 rank
efficiency      speed-up divided by the ranks
of the ceiling  images/s divided by those of as many ranks that exchange nothing"""

Key = tuple[int, bool]
"""Number of ranks, and whether they communicate."""


def best_of_each(records: Sequence[Record]) -> dict[Key, Mapping[str, Any]]:
    """Return the values of the fastest record of each kind of run, in file order."""
    best: dict[Key, Mapping[str, Any]] = {}
    for values in (record.values for record in records):
        key = (values["size"], values["is_communicating"])
        if key not in best or values["images_per_s"] > best[key]["images_per_s"]:
            best[key] = values
    return best


def scaling_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Make one row for each kind of run.

    Raises:
        UsageError: There is no training on one rank to compare with.
    """
    best = best_of_each(records)
    alone = best.get((1, True))
    if alone is None:
        raise UsageError(
            f"records must hold a training on 1 rank, got {len(records)} others. "
            f"Run the example once with -n 1 and the same --json."
        )
    rows: list[tuple[str, ...]] = []
    for (size, is_communicating), values in best.items():
        rate = values["images_per_s"]
        speed_up = rate / alone["images_per_s"]
        name = "1 rank" if size == 1 else f"{size} ranks"
        if not is_communicating:
            name += ", no communication"
        ceiling = best.get((size, False)) if is_communicating else None
        rows.append(
            (
                name,
                f"{rate:.0f}",
                f"{speed_up:.2f}",
                f"{speed_up / size:.0%}",
                f"{rate / ceiling['images_per_s']:.0%}" if ceiling else "",
                f"{values['test_accuracy']:.1%}",
            )
        )
    return rows


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align the first column left and the others right, under the headings."""
    lines = [HEADINGS, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def main(arguments: Sequence[str]) -> int:
    """Print the table of the file that is named; 64 where that cannot be."""
    if len(arguments) != 1:
        print("usage: scaling_table.py RECORDS", file=sys.stderr)
        return 64
    try:
        records = read_records(Path(arguments[0]), kind="training")
        print(f"\n{table(scaling_rows(records))}\n\n{NOTES}")
    except (UsageError, OSError) as error:
        print(f"scaling_table.py: {error}", file=sys.stderr)
        return 64
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
