"""``ronde bench read`` and ``compare``: tables of results in logs and records."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ronde.arguments import CommandParser, one_of
from ronde.bench.catalog import COLLECTIVES
from ronde.bench.comparison import compare
from ronde.bench.log_reading import read_log
from ronde.bench.log_state import Log
from ronde.bench.options import Exit
from ronde.bench.results import to_record
from ronde.errors import UsageError
from ronde.records import append_record
from ronde.render.bench_tables import draw_comparison, draw_rows, draw_runs

_MAX_DAMAGE = 20
_READING = """\
  --test NAME   collective of logs that do not name it, as all_reduce
  --partial     exit with 0 although a log is damaged or cut; not if a run failed
  -h, --help    show this help and exit
"""
_READ_HELP = f"""\
usage: ronde bench read LOG... [--rows] [--json FILE] [--test NAME] [--partial]

Read what nccl-tests printed.

options:
  --rows        also print all rows
  --json FILE   append a record of each run to FILE
{_READING}
A LOG is the output of nccl-tests, rccl-tests or ronde bench, their JSON, or records; -
is standard input. n is the number of ranks, from the list of devices or else from the
ratio of busbw to algbw; a range means that rounding hides the exact number. A run is
complete if it has its footer and all its rows; rows replaced by ... are no damage.
The peak and the average are busbw.

What is damaged or cut is left out and reported with its line, and the rest is given.
A run failed if it has wrong elements, a rate or average that is no number, or less
bandwidth than NCCL_TESTS_MIN_BW, or if the log shows what ended it: nccl-tests' "Test
failure", or a process that a launcher saw killed. The reason is quoted with its line.

exit code: 0; 6 if a log is damaged or cut; 7 if a run failed, as of ronde bench itself.

examples:
  ronde bench read slurm-1234.out --rows
  mpirun -n 16 all_reduce_perf -b 8 -e 1G -f 2 | ronde bench read -
"""
_COMPARE_HELP = f"""\
usage: ronde bench compare A B [--fail-below RATIO] [--test NAME] [--partial]

Compare two results, each a log, JSON or records.

options:
  --fail-below RATIO
                exit with 7 if the geometric mean of the ratios is below RATIO
{_READING}
Rows are matched by test, type, operation, root and size; where no size is in both, the
highest busbw of each is compared. The ratio is B's busbw divided by A's; with equal
numbers of ranks it is computed from the times, which have more digits.

exit code: 0; 6 if a log is damaged or cut; 7 if a run failed, as for ronde bench read,
or if the geometric mean of the ratios is below --fail-below.

example:
  ronde bench compare before.log after.log --fail-below 0.95
"""
_TYPES = {"NAME": one_of(*COLLECTIVES), "RATIO": float}


def run_read(words: Sequence[str]) -> int:
    parser = CommandParser(
        "ronde bench read", _READ_HELP, types=_TYPES, positionals={"logs": "*"}
    )
    options = parser.read(words)
    if options is None:
        return Exit.OK
    if not options.logs:
        parser.error("a LOG is required, or - for standard input")
    logs = _read(options, options.logs)
    runs = [(n, r) for n, log in zip(options.logs, logs, strict=True) for r in log.runs]
    records = [to_record(run, was_measured_here=False) for _, run in runs]
    try:
        for record in records if options.json else ():
            append_record(Path(options.json), record)
    except OSError as error:
        raise UsageError(
            f"cannot write the --json file {options.json!r}: {error.strerror}."
        ) from error
    if runs:
        print(draw_runs(runs), end="")
    if options.rows:
        for name, each in runs:
            print(f"\n{name}: {each.test or '?'}\n{draw_rows(each)}", end="")
    for name, each in runs:
        for warning in each.warnings:
            print(f"{name}: {warning}.", file=sys.stderr)
    return _end(options, logs)


def run_compare(words: Sequence[str]) -> int:
    parser = CommandParser(
        "ronde bench compare",
        _COMPARE_HELP,
        types=_TYPES,
        positionals={"a": None, "b": None},
    )
    options = parser.read(words)
    if options is None:
        return Exit.OK
    names = (options.a, options.b)
    first, second = logs = _read(options, names)
    if not (first.runs and second.runs):
        return _end(options, logs)
    comparison = compare(first.runs, second.runs)
    print(draw_comparison(comparison, names), end="")
    mean, status = comparison.mean_ratio(), _end(options, logs)
    if mean is None and status == Exit.FAILED:
        return status
    if mean is None:
        raise UsageError(
            "the results cannot be compared, as they have no rows with the same test, "
            "type, operation and root. If a log does not name its test, give --test."
        )
    # NaN is below any ratio.
    if options.fail_below is None or mean >= options.fail_below:
        return status
    print(f"ronde: B/A is {mean:.3f}, below {options.fail_below:g}", file=sys.stderr)
    return Exit.FAILED


def _end(options: argparse.Namespace, logs: Sequence[Log]) -> int:
    failures = [each for log in logs for run in log.runs for each in run.failures]
    damage = [each for log in logs for each in (*log.damage, *log.cuts)]
    found = failures + damage
    for each in found[:_MAX_DAMAGE]:
        print(f"ronde: {each}", file=sys.stderr)
    if (more := len(found) - _MAX_DAMAGE) > 0:
        print(f"ronde: and {more} more", file=sys.stderr)
    if failures:
        return Exit.FAILED
    is_excused = options.partial and all(log.runs for log in logs)
    return Exit.USAGE if damage and not is_excused else Exit.OK


def _read(options: argparse.Namespace, names: Sequence[str]) -> list[Log]:
    if names.count("-") > 1:
        raise UsageError("standard input can be read only once. Name a file.")
    return [_read_file(name, options.test or "") for name in names]


def _read_file(name: str, test: str) -> Log:
    """Read a log; a file that cannot be read becomes a log without runs."""
    is_input = name == "-"
    try:
        content = sys.stdin.buffer.read() if is_input else Path(name).read_bytes()
        text = content.decode("utf-8", errors="replace")
        return read_log(text, "standard input" if is_input else name, test=test)
    except OSError as error:
        return Log([], [f"cannot read the log {name!r}: {error.strerror}."], [])
    except UsageError as error:
        return Log([], [str(error)], [])
