"""Options on what ``ronde run`` shows and writes, and what they make."""

import argparse
import re

from ronde.errors import RondeError, UsageError
from ronde.launch.output.sink import OutputSink
from ronde.launch.program import absolute_path
from ronde.render.console import Console
from ronde.render.lines import Tag, TagPlace, parse_tag
from ronde.render.rank_ranges import RankChoice, parse_ranks


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--tag``, ``--only``, ``--log-dir``, ``--error-file`` and ``--record``."""
    add = parser.add_argument_group("output").add_argument
    add(
        "--tag",
        metavar="WHAT",
        help="prefix of each line: rank ([3]), host ([node2:3]) or none; with "
        ",time also the time of day (default: rank, with several hosts "
        "host)",
    )
    add(
        *("-v", "--verbose"),
        action="store_true",
        help="show the time of each step of the start, and what a slow one waits for",
    )
    add("--no-prefix", action="store_true", help="as --tag none")
    add(
        "--only",
        metavar="RANKS",
        help="show only these ranks, as 0,4-7 or 0-63:8; files have all",
    )
    add("--local-ranks-filter", dest="only_local", help=argparse.SUPPRESS)
    add(
        "--log-dir",
        default="",
        metavar="DIR",
        help="also write each rank's output to files under DIR on this host",
    )
    add("-t", "--tee", help=argparse.SUPPRESS)
    add(
        "--error-file",
        default="",
        metavar="FILE",
        help="write how the job ended to FILE, as JSON",
    )
    add(
        "--record",
        default="",
        metavar="FILE",
        help="append plan, timings and ends to FILE, as lines of JSON",
    )


def make_sink(options: argparse.Namespace, log_dir: str = "") -> OutputSink:
    """Return what shows and writes a job's output as the options say.

    Args:
        log_dir: Directory for log files that another option names, or empty.
    """
    log_dir = log_dir or options.log_dir
    log_dir = str(absolute_path(log_dir)) if log_dir else ""
    sink: OutputSink = Console(
        1, 2, tag=_tag(options), only=_only(options), log_dir=log_dir
    )
    if log_dir:
        from ronde.launch.output.files import RankLogs

        sink = RankLogs(sink, log_dir)
    if options.error_file:
        from ronde.launch.output.files import ErrorFile

        sink = ErrorFile(sink, options.error_file)
    return sink


def require_tee(options: argparse.Namespace) -> str:
    """Return what to say of torchrun's ``--tee``; empty where there is nothing.

    What it asks for is what ``--log-dir`` does: all output in files, and shown.
    """
    if options.tee is None:
        return ""
    if not re.fullmatch(r"[0-3]|[0-9]+:[0-3](,[0-9]+:[0-3])*", options.tee):
        raise UsageError(
            "--tee must be 0, 1, 2, 3 or such per local rank, as 0:3,1:1, got "
            f"{options.tee!r}. Type --log-dir DIR in its place; a limit on time is "
            "--timeout TIME."
        )
    return "" if options.log_dir else "--tee writes no files without --log-dir DIR."


def report_error(path: str, error: RondeError, exit_code: int) -> None:
    """Write to the file of ``--error-file`` why a job did not start or broke off.

    Nothing is written without a path, or where the file cannot be: the error itself
    is what the user must see.

    Args:
        path: The option's value, or empty.
    """
    if not path:
        return
    from contextlib import suppress

    from ronde.launch.output.files import write_report

    with suppress(OSError):
        write_report(path, exit_code, str(error))


def _tag(options: argparse.Namespace) -> Tag:
    if not options.no_prefix:
        return parse_tag(options.tag) if options.tag is not None else Tag()
    if options.tag is not None:
        raise UsageError("--no-prefix must stand alone, got --tag too. Drop one.")
    return Tag(TagPlace.NONE)


def _only(options: argparse.Namespace) -> RankChoice | None:
    if options.only is not None and options.only_local is not None:
        raise UsageError(
            "--only must stand alone, got --local-ranks-filter too. Drop one."
        )
    if options.only_local is not None:
        return parse_ranks(options.only_local, "--local-ranks-filter", is_local=True)
    return None if options.only is None else parse_ranks(options.only, "--only")
