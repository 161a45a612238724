"""``ronde trace``: words -> timelines -> words, or one timeline."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ronde.arguments import Parser, refuse_verb
from ronde.render.trace_text import draw_trace
from ronde.timeline.chrome import write_trace
from ronde.timeline.recording import DEFAULT_LIMIT_BYTES
from ronde.trace import read_part_files, read_trace, summarize
from ronde.units import parse_size_bytes

HELP = """\
usage: ronde trace show FILE [--tensors N]
       ronde trace merge OUT PART...

show   say in words who waited, how long, for which tensor and for whom
merge  join the records of ranks into one trace

A timeline is written by ronde run --timeline FILE, or where HOROVOD_TIMELINE says.
Open it in ui.perfetto.dev or chrome://tracing to look at it.

ronde trace VERB --help says more.
"""

_SHOW_EPILOG = """\
FILE is a merged trace, the part of a rank, a directory of parts, or what Horovod wrote:
that is of rank 0 alone, and less can be told from it.

example:
  ronde run -n 4 --timeline step.json.gz train.py && ronde trace show step.json.gz
"""

_MERGE_EPILOG = """\
Parts lie beside the timeline, in FILE.parts, where a job did not get to join them.
Those of several hosts are brought to one clock by what the ranks measured.

example:
  ronde trace merge step.json.gz step.json.gz.parts
"""

_NUM_TENSORS = 10


def run(words: Sequence[str]) -> int:
    """Show or merge; return the exit code.

    Args:
        words: What stands after ``trace``.

    Raises:
        UsageError: A file cannot be read or written, or is no timeline.
    """
    match list(words):
        case [] | ["-h" | "--help", *_]:
            print(HELP, end="")
        case ["show", *rest]:
            _show(rest)
        case ["merge", *rest]:
            _merge(rest)
        case other:
            refuse_verb(other[0], ("show", "merge"), "ronde trace")
    return 0


def _show(words: Sequence[str]) -> None:
    parser = _parser("show", "Say in words what a timeline holds.", _SHOW_EPILOG)
    parser.add_argument("file", metavar="FILE", help="a timeline")
    parser.add_argument(
        "--tensors",
        type=_count,
        default=_NUM_TENSORS,
        metavar="N",
        help=f"how many tensors to name (default: {_NUM_TENSORS})",
    )
    if (options := _parse(parser, words)) is None:
        return
    summary = summarize(read_trace(Path(options.file)))
    print(draw_trace(options.file, summary, options.tensors), end="")


def _merge(words: Sequence[str]) -> None:
    parser = _parser("merge", "Join the records of ranks.", _MERGE_EPILOG)
    add = parser.add_argument
    add("out", metavar="OUT", help="the trace; packed where it ends in .gz")
    add("parts", nargs="+", metavar="PART", help="files, or directories of them")
    add("--timeline-limit", default="", metavar="SIZE", help="of OUT (default: 32MiB)")
    if (options := _parse(parser, words)) is None:
        return
    limit = options.timeline_limit
    tracks = read_part_files([Path(part) for part in options.parts])
    num_left_out = write_trace(
        Path(options.out),
        tracks,
        limit_bytes=parse_size_bytes(limit) if limit else DEFAULT_LIMIT_BYTES,
    )
    if num_left_out:
        print(
            f"ronde: {num_left_out} of the oldest operations were left out for the "
            "limit. Give a larger --timeline-limit.",
            file=sys.stderr,
        )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least 0, got {text!r}"
        )
    return int(text)


def _parser(verb: str, description: str, epilog: str) -> Parser:
    parser = Parser(
        f"ronde trace {verb}", description=description, epilog=epilog, add_help=False
    )
    parser.add_argument("-h", "--help", action="store_true", help="print this and exit")
    return parser


def _parse(parser: Parser, words: Sequence[str]) -> argparse.Namespace | None:
    """Return the options; None where help was asked for, and printed."""
    if any(word in ("-h", "--help") for word in words):
        print(parser.format_help(), end="")
        return None
    return parser.parse_args(words)
