"""``ronde profile``: sample the ranks of a job, and report where their time goes."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from ronde.arguments import read_number
from ronde.cli.hosts import find_run_hosts
from ronde.cli.run import make_run_parser, require_listen_or_agent, run_job
from ronde.errors import LaunchError, UsageError
from ronde.launch.bootstrap import start_local_agent
from ronde.launch.environments import own_environment
from ronde.launch.host import is_here
from ronde.launch.limits import EXIT_UNWRITTEN, Timeouts
from ronde.launch.signals import caught_signals
from ronde.launch.status import JobConnection, list_jobs
from ronde.monitor.asking import choose_job
from ronde.monitor.collecting import ProfileCollector, collect_own_job
from ronde.monitor.samples import Profile
from ronde.monitor.stacks import find_obstacle
from ronde.plain_values import to_plain
from ronde.render.profile_exports import write_collapsed, write_speedscope
from ronde.units import format_ranks, grouped

_OPTIONS = """\
  -r, --rate HZ         samples per second of each rank, 1 to 1000 (default: 100)
  -o, --output FILE     where to write the page, FILE.html; or other forms:
                        FILE.speedscope.json, FILE.collapsed for flame graphs,
                        FILE.json for all samples (default: ronde-profile.html)
  --attach [JOB]        sample a running job for a while; JOB is a part of its id
                        or command (default: your only job on this host)
  -d, --duration TIME   time to sample with --attach; Ctrl-C ends it earlier
                        (default: 30s)
"""
_HELP = f"""\
usage: ronde profile [-o FILE] [options of ronde run] [--] program [arguments]
       ronde profile --attach [JOB] [-d TIME] [-o FILE]

Run a program as ronde run does, or attach to a running job, and show where the time of
its ranks goes: a summary as text, and a page for the browser. The program needs no
change.

options:
{_OPTIONS}\
  -h, --help            show this help and exit

py-spy reads the Python stacks of all ranks, on each host, without stopping them: pip
install 'ronde[monitor]'. Only the main thread of each rank is sampled. The exit code is
the program's.

examples:
  ronde profile -n 4 train.py
  ronde profile --attach train.py -d 1m -o train.html
"""
_DEFAULT = "ronde-profile.html"
_FORMATS = {
    ".html": "page",
    ".speedscope.json": "for speedscope.app",
    ".collapsed": "collapsed stacks",
    ".json": "samples",
}
"""The names of the output's forms, by the ends of file names."""
_ATTACHED_S = 30.0
_OWN = ("rate", "output", "attach", "duration")
_EXAMPLE = "Type: ronde profile -n 4 train.py, or ronde profile --attach"


def run(words: Sequence[str], timeouts: Timeouts) -> int:
    parser = make_run_parser(words)
    parser.declare(_OPTIONS)
    options = parser.parse_args(words)
    if options.help:
        print(_HELP, end="")
        return 0
    given = parser.given(options)
    cure = "Type: --rate 100"
    options.rate = read_number(
        "--rate", options.rate or "100", cure, least=1, most=1000
    )
    options.output = options.output or _DEFAULT
    _require_writable(options.output)
    if options.attach is not None:
        return _attach(options, given)
    if options.duration is not None:
        raise UsageError(f"--duration has no effect without --attach. {_EXAMPLE}")
    if not options.program:
        raise UsageError(f"a program is required. {_EXAMPLE}")
    if options.agent:
        raise UsageError("--agent cannot be profiled. Type: ronde run --agent ...")
    require_listen_or_agent(options, given)
    # Other hosts report their obstacles themselves.
    if any(map(is_here, find_run_hosts(options, own_environment(), 0))):
        _require_readable()
    return _run_program(options, timeouts)


def _run_program(options: argparse.Namespace, timeouts: Timeouts) -> int:
    is_over = Event()
    with (
        caught_signals() as signal_fd,
        start_local_agent(has_input=True) as agent,
        ThreadPoolExecutor(1) as pool,
    ):
        collected = pool.submit(collect_own_job, options.rate, is_over)
        try:
            code = run_job(options, agent, signal_fd, timeouts)
        finally:
            is_over.set()
    if options.dry_run:
        return code
    return _report(collected.result(), options.output) or code


def _attach(options: argparse.Namespace, given: Mapping[str, str]) -> int:
    others = [name for option, name in given.items() if option not in _OWN]
    if others or options.program:
        word = (others or options.program)[0]
        raise UsageError(
            f"{word} has no effect with --attach. Type: ronde profile --attach "
            f"{options.attach or 'train.py'}"
        )
    status = choose_job(list_jobs(), options.attach or None)
    if any(row.host == status.job.head for row in status.workers):
        _require_readable()
    collector = ProfileCollector(options.rate)
    with _interrupted() as is_stopped:
        try:
            with JobConnection(status.socket) as job:
                ends_s = time.monotonic() + (options.duration or _ATTACHED_S)
                collector.collect(
                    job, lambda: is_stopped.is_set() or time.monotonic() >= ends_s
                )
        except OSError as error:
            raise LaunchError(f"the job ended or does not answer: {error}.") from None
    return _report(collector.profile(), options.output)


@contextmanager
def _interrupted() -> Generator[Event]:
    """Yield an event that Ctrl-C sets; a second Ctrl-C ends the command."""
    is_stopped = Event()

    def stop(_number: int, _frame: object) -> None:
        is_stopped.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield is_stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _require_readable() -> None:
    if obstacle := find_obstacle():
        raise UsageError(f"py-spy cannot sample ranks on this host: {obstacle}.")


def _require_writable(name: str) -> None:
    path = Path(name)
    if not name.endswith(tuple(_FORMATS)):
        raise UsageError(
            f"--output must end in one of {', '.join(_FORMATS)}, got {name!r}."
        )
    written_to = path if path.exists() else path.parent
    if path.is_dir() or not os.access(written_to, os.W_OK):
        raise UsageError(
            f"cannot write the file of --output: {name}. Name another file."
        )


def _report(profile: Profile | None, output: str) -> int:
    """Print the report and write the file; return the exit code of a failure."""
    windows = profile.windows if profile else ()
    problems = grouped((w.problem, w.worker) for w in windows if w.problem)
    for problem, workers in problems.items():
        text = f"worker{'s' * (len(workers) > 1)} {format_ranks(workers)}: {problem}"
        print(f"ronde: no samples of {text}.", file=sys.stderr)
    if profile is None or not any(window.runs for window in windows):
        if not problems:
            print("ronde: the job was too short to sample.", file=sys.stderr)
        return 0
    # Imported late: with numpy it takes longer than all else.
    from ronde.monitor.profiling import summarize_profile
    from ronde.render.profile import draw_profile

    report = summarize_profile(profile)
    print(draw_profile(report))
    suffix = next(each for each in _FORMATS if output.endswith(each))
    try:
        match suffix:
            case ".html":
                from ronde.render.profile_page import write_page

                write_page(report, Path(output))
            case ".speedscope.json":
                write_speedscope(profile, Path(output))
            case ".collapsed":
                write_collapsed(profile, Path(output))
            case _:
                Path(output).write_text(json.dumps(to_plain(profile), default=str))
    except OSError as error:
        print(f"ronde: cannot write {output}: {error.strerror}.", file=sys.stderr)
        return EXIT_UNWRITTEN
    print(f"{_FORMATS[suffix]}: {output}")
    return 0
