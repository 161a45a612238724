"""Print how training scales, from the records that the examples append."""

import sys
from collections.abc import Sequence
from pathlib import Path

from ronde.errors import UsageError
from ronde.records import Record, read_records

HEADINGS = ("run", "images/s", "speed-up", "efficiency", "test accuracy")


def scaling_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Make one row a training; the first with one rank is what others compare with.

    Efficiency is the speed-up divided by the ranks. The row without communication is
    the ceiling: what as many ranks do on this machine when nothing is exchanged.

    Raises:
        UsageError: There is no training on one rank.
    """
    alone = [record.values for record in records if record.values["size"] == 1]
    if not alone:
        raise UsageError(
            f"records must hold a training on 1 rank, got {len(records)} trainings on "
            f"more. Run the example once with -n 1 and the same --json."
        )
    rows: list[tuple[str, ...]] = []
    for values in (record.values for record in records):
        size = values["size"]
        speed_up = values["images_per_s"] / alone[0]["images_per_s"]
        how = "" if values["is_communicating"] else ", no communication"
        rows.append(
            (
                f"{size} rank{'s' if size > 1 else ''}{how}",
                f"{values['images_per_s']:.0f}",
                f"{speed_up:.2f}",
                f"{speed_up / size:.0%}",
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
        print(f"\n{table(scaling_rows(records))}")
    except (UsageError, OSError) as error:
        print(f"scaling_table.py: {error}", file=sys.stderr)
        return 64
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
