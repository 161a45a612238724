"""``ronde bench read`` and ``compare``: words -> results of others -> tables."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ronde.arguments import Parser
from ronde.bench.catalog import COLLECTIVES
from ronde.bench.comparison import Comparison, compare
from ronde.bench.log_reading import read_log
from ronde.bench.options import Exit
from ronde.bench.results import Run, to_record
from ronde.errors import UsageError
from ronde.records import Record, append_record
from ronde.render.bench_tables import (
    draw_comparison,
    draw_rows,
    draw_runs,
    draw_warnings,
)

_STDIN = "-"

_READ_EPILOG = """\
A log is what nccl-tests, rccl-tests or ronde bench printed, their JSON, or records.
n is the number of ranks: from the list of devices, else from busbw by algbw, which is a
function of it; a range says how far rounding leaves that open. A run is complete when
its footer is there and no row was left out.

exit code: 0; 6 when a log is damaged, or cut within a row (the message has the line).

examples:
  ronde bench read slurm-1234.out --rows
  mpirun -n 16 all_reduce_perf -b 8 -e 1G -f 2 | ronde bench read -
"""

_COMPARE_EPILOG = """\
Rows are matched by test, type, operation, root and size. The ratio is B's busbw by A's;
with as many ranks in both it is taken from the times, which have more digits.

exit code: 0; 7 when the geometric mean of the ratios is below --fail-below.

example:
  ronde bench compare before.log after.log --fail-below 0.95
"""


def run(words: Sequence[str]) -> int:
    """Read or compare; return the exit code.

    Args:
        words: What stands after ``bench``: ``read`` or ``compare`` and its arguments.

    Raises:
        UsageError: A file cannot be read, or is damaged; nothing was written.
    """
    verb, *rest = words
    return _compare(rest) if verb == "compare" else _read(rest)


def _read(words: Sequence[str]) -> int:
    parser = _parser("read", "Read what nccl-tests printed.", _READ_EPILOG)
    add = parser.add_argument
    add("logs", nargs="*", metavar="LOG", help="a file, or - for standard input")
    add("--rows", action="store_true", help="print all rows too")
    add("--json", default="", metavar="FILE", help="append a record for each run")
    _add_reading(parser)
    if (options := _parse(parser, words)) is None:
        return Exit.OK
    if not options.logs:
        parser.error("a log is needed, or - for standard input")
    if options.logs.count(_STDIN) > 1:
        parser.error("standard input can be read but once")
    runs = [
        (name, run)
        for name in options.logs
        for run in _read_file(name, options.test, keeps_partial=options.partial)
    ]
    records = [to_record(run, was_measured_here=False) for _, run in runs]
    if options.json:
        _append(Path(options.json), records)
    print(draw_runs(runs), end="")
    if options.rows:
        for name, each in runs:
            print(f"\n{name}: {each.test or '?'}\n{draw_rows(each)}", end="")
    print(draw_warnings(runs), end="", file=sys.stderr)
    return Exit.OK


def _append(path: Path, records: Sequence[Record]) -> None:
    try:
        for record in records:
            append_record(path, record)
    except OSError as error:
        raise UsageError(
            f"--json must be a file that can be written, got {str(path)!r}: "
            f"{error.strerror}."
        ) from error


def _compare(words: Sequence[str]) -> int:
    parser = _parser("compare", "Set two results side by side.", _COMPARE_EPILOG)
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="a log, JSON or records")
    parser.add_argument(
        "--fail-below",
        type=float,
        metavar="RATIO",
        help="exit with 7 when the geometric mean of the ratios is below this",
    )
    _add_reading(parser)
    if (options := _parse(parser, words)) is None:
        return Exit.OK
    names = (options.a, options.b)
    if names == (_STDIN, _STDIN):
        parser.error("standard input can be read but once")
    first, second = (
        _read_file(name, options.test, keeps_partial=options.partial) for name in names
    )
    comparison = compare(first, second)
    print(draw_comparison(comparison, names), end="")
    return _judge(comparison, options.fail_below)


def _judge(comparison: Comparison, fail_below: float | None) -> Exit:
    """Return the exit code of a comparison, and say why it is none of 0."""
    mean = comparison.mean_ratio()
    if mean is None:
        raise UsageError(
            "two results must have a row in common to be compared, got none with the "
            "same test, type, operation, root and size. --test names a test that a "
            "log does not name."
        )
    # A ratio that is no number is below everything.
    if fail_below is None or mean >= fail_below:
        return Exit.OK
    print(f"ronde: B/A is {mean:.3f}, below {fail_below:g}", file=sys.stderr)
    return Exit.FAILED


def _parser(verb: str, description: str, epilog: str) -> Parser:
    return Parser(
        f"ronde bench {verb}", description=description, epilog=epilog, add_help=False
    )


def _add_reading(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--test",
        default="",
        choices=["", *COLLECTIVES],
        metavar="NAME",
        help="what the logs are of, where they do not say: all_reduce and so on",
    )
    add(
        "--partial",
        action="store_true",
        help="read a log that is cut within a row or JSON up to there",
    )
    add("-h", "--help", action="store_true", help="print this and exit")


def _parse(parser: Parser, words: Sequence[str]) -> argparse.Namespace | None:
    """Return the options; None where help was asked for, and printed."""
    if any(word in ("-h", "--help") for word in words):
        print(parser.format_help(), end="")
        return None
    return parser.parse_args(words)


def _read_file(name: str, test: str, *, keeps_partial: bool) -> list[Run]:
    try:
        content = sys.stdin.buffer.read() if name == _STDIN else Path(name).read_bytes()
    except OSError as error:
        raise UsageError(
            f"log must be a file that can be read, got {name!r}: {error.strerror}."
        ) from error
    source = "standard input" if name == _STDIN else name
    text = content.decode("utf-8", errors="replace")
    return read_log(text, source, test=test, keeps_partial=keeps_partial)
