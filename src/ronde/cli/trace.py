"""``ronde trace``: show a timeline as text, or merge its parts into one."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ronde.arguments import CommandParser, refuse_verb, whole_number
from ronde.render.trace import draw_trace
from ronde.timeline.chrome import write_trace
from ronde.timeline.recording import DEFAULT_LIMIT_BYTES
from ronde.trace import read_part_files, read_trace, summarize
from ronde.units import parse_size_bytes

_HELP = """\
usage: ronde trace show FILE [--tensors N]
       ronde trace merge OUT PART...

show   show which rank waited for which, how long, and for which tensor
merge  join the records of ranks into one trace

ronde run --timeline FILE and HOROVOD_TIMELINE write timelines. Open one in
ui.perfetto.dev or chrome://tracing to look at it.

ronde trace VERB --help shows more.
"""

_SHOW_HELP = """\
usage: ronde trace show FILE [--tensors N]

Show a timeline as text.

options:
  --tensors N  number of tensors to name (default: 10)
  -h, --help   show this help and exit

FILE is a merged trace, the part of a rank, a directory of parts, or a timeline of
Horovod, which covers rank 0 only and shows less.

example:
  ronde run -n 4 --timeline step.json.gz train.py && ronde trace show step.json.gz
"""

_MERGE_HELP = """\
usage: ronde trace merge OUT PART... [--timeline-limit SIZE]

Join the records of ranks into the trace OUT, compressed where it ends in .gz. Each PART
is a file or a directory of files.

options:
  --timeline-limit SIZE
               largest size of OUT (default: 32MiB)
  -h, --help   show this help and exit

If a job could not join its parts, they are beside the timeline, in FILE.parts. Parts of
several hosts are aligned by the clock offsets that the ranks measured.

example:
  ronde trace merge step.json.gz step.json.gz.parts
"""


def run(words: Sequence[str]) -> int:
    match list(words):
        case [] | ["-h" | "--help", *_]:
            print(_HELP, end="")
        case ["show", *rest]:
            parser = CommandParser(
                "ronde trace show",
                _SHOW_HELP,
                types={"N": whole_number()},
                positionals={"file": None},
            )
            parser.set_defaults(tensors=10)
            if options := parser.read(rest):
                summary = summarize(read_trace(Path(options.file)))
                print(draw_trace(options.file, summary, options.tensors), end="")
        case ["merge", *rest]:
            parser = CommandParser(
                "ronde trace merge",
                _MERGE_HELP,
                types={"SIZE": parse_size_bytes},
                positionals={"out": None, "parts": "+"},
            )
            parser.set_defaults(timeline_limit=DEFAULT_LIMIT_BYTES)
            if options := parser.read(rest):
                _merge(options)
        case other:
            refuse_verb(other[0], ("show", "merge"), "ronde trace")
    return 0


def _merge(options: argparse.Namespace) -> None:
    num_left_out = write_trace(
        Path(options.out),
        read_part_files([Path(part) for part in options.parts]),
        limit_bytes=options.timeline_limit,
    )
    if num_left_out:
        print(
            f"ronde: {num_left_out} of the oldest operations were left out for the "
            "limit. Give a larger --timeline-limit.",
            file=sys.stderr,
        )
