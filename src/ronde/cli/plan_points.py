"""``ronde plan points``: a table of speeds, its empty cells predicted."""

import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from ronde.arguments import CommandParser
from ronde.errors import UsageError
from ronde.plan.sheet import ADDED, complete, read_sheet

_HELP = """\
usage: ronde plan points SHEET

Predict every empty throughput of a table in CSV from the other rows of its series, and
print the table with the columns predicted, low, high and binds. Of five speeds four lie
between low and high. - is standard input.

SHEET needs the columns series, gpus and throughput (of all GPUs); every further one
narrows the intervals: nodes or gpus_per_node, kind (weak, strong, accumulation or
model_parallel), parameters, unit, units_a_sample, batch_a_gpu, accumulation, precision,
method (all_reduce, parameter server; BSP-... without overlap, WFBP-... tensor by
tensor), sharding (FULL_SHARD, SHARD_GRAD_OP), intra_link, intra_gb_per_s,
node_gbit_per_s and transport (tcp, rdma). Other columns are kept.

options:
  -h, --help  show this help and exit

exit code: 0; 1 if a series has no prediction, with the reason; 64 for a wrong table

example:
  ronde plan points sheet.csv > filled.csv
"""
_EXIT_LEFT_OUT = 1


def run(words: Sequence[str]) -> int:
    parser = CommandParser("ronde plan points", _HELP, positionals={"sheet": None})
    options = parser.read(words)
    if options is None:
        return 0
    try:
        text = (
            sys.stdin.read()
            if options.sheet == "-"
            else Path(options.sheet).read_text(encoding="utf-8-sig")
        )
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"SHEET must be a file in CSV, got {error}.") from error
    columns, rows = read_sheet(io.StringIO(text, newline=""))
    left_out, notes = complete(rows)
    out = csv.DictWriter(
        sys.stdout, [*dict.fromkeys((*columns, *ADDED))], lineterminator="\n"
    )
    out.writeheader()
    out.writerows(row.cells for row in rows)
    for note in (*left_out, *notes):
        print(f"ronde: {note}", file=sys.stderr)
    return _EXIT_LEFT_OUT if left_out else 0
