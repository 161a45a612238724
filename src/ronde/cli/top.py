"""``ronde top``: the ranks, hosts and time of a running job, once a second."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ronde.arguments import CommandParser, read_number
from ronde.errors import LaunchError, UsageError
from ronde.launch.status import list_jobs, watch
from ronde.monitor.asking import choose_job, inspect_workers
from ronde.monitor.verdict import explain_hang
from ronde.monitor.view import WatchedJob, view_to_plain, watch_job
from ronde.render.text import WIDTH
from ronde.render.top import draw_brief, draw_top
from ronde.render.why import draw_hang
from ronde.status.table import JobStatus

_HELP = """\
usage: ronde top [JOB] [--once | --json]
       ronde top [JOB] [--web] [--port N] [--prometheus WHERE]

Show a running job live: where the time of its steps goes, its ranks, those first that
others wait for, and its hosts and GPUs. Without JOB, a part of the job's id or command,
it is your only job on this host.

options:
  --once              print the view once, as text
  --json              print it once, as one JSON object
  --web               serve a page for browsers on this host, and print its URL
  --port N            the port of the page (default: a free one)
  --prometheus WHERE  serve metrics at [HOST:]PORT, on this host alone without
                      HOST; or write them to FILE.prom, for node_exporter
  -h, --help          show this help and exit

Type the command on the host of ronde run. If standard output is no terminal, it prints
the view once. ronde run --top shows a short view below the output of a job.
"""
_MOST_VIEWS = 6  # until rates are known


def run(words: Sequence[str]) -> int:
    parser = CommandParser("ronde top", _HELP, positionals={"job": "?"})
    options = parser.read(words)
    if options is None:
        return 0
    port = read_number("--port", options.port or "0", "Type: --port 8080", most=65535)
    if options.port and not options.web:
        raise UsageError("--port has no effect without --web. Type: ronde top --web")
    status = choose_job(list_jobs(), options.job)
    if options.web or options.prometheus:
        _serve(status, port if options.web else None, options.prometheus)
    elif options.json:
        print(json.dumps(view_to_plain(_await_view(status))))
    elif options.once or not sys.stdout.isatty():
        print(draw_top(_await_view(status)), end="")
    else:
        _show(status)
    return 0


def main() -> None:
    """Print short views as JSON lists of lines, for ``ronde run --top``.

    The first argument of its own is the socket of the job's table.
    """
    path = Path(sys.argv[3])
    while path.exists():
        try:
            for view in watch_job(next(watch(path))):
                print(json.dumps(_draw_lines(view)), flush=True)
        except (TimeoutError, LaunchError):  # ronde run is stopped
            continue
        except (OSError, StopIteration):  # it or the job is over
            return


def _draw_lines(view: WatchedJob) -> list[str]:
    try:
        columns = os.get_terminal_size(2).columns or WIDTH
    except OSError:  # standard error is redirected
        columns = WIDTH
    return draw_brief(view, max(20, columns - 1)).splitlines()


def _serve(status: JobStatus, port: int | None, metrics: str | None) -> None:
    """Serve the views of a job until it ends, as a page, as metrics or both."""
    # Imported late: the other forms need no server.
    from ronde.monitor.metrics import open_metrics
    from ronde.monitor.web import WebPage, publish

    sinks = [] if port is None else [WebPage(port)]
    sinks += [open_metrics(metrics)] if metrics else []
    for sink in sinks:
        print(sink.where, flush=True)

    def stop(number: int, _frame: object) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)  # FILE.prom is removed
    publish(watch_job(status), sinks)


def _await_view(status: JobStatus) -> WatchedJob:
    """Return the first view with all rates; after about 5 s one without."""
    view = None
    for number, view in enumerate(watch_job(status), 1):
        has_tokens = any("tokens" in rank.progress for rank in view.ranks)
        rates = [host.cpu for host in view.hosts]
        rates += [view.tokens_per_s] if has_tokens else []
        if number == _MOST_VIEWS or (None not in rates and number > 1):
            break
    if view is None:
        raise LaunchError("the job ended meanwhile.")
    return view


def _show(status: JobStatus) -> None:
    try:
        # Imported late: it takes long, and may be missing.
        from ronde.cli.top_screen import JobScreen
    except ImportError:
        raise UsageError(
            "the live view needs textual. Type: pip install 'ronde[monitor]', or "
            "ronde top --once"
        ) from None

    def explain() -> str:
        inspected = inspect_workers(status)
        verdict = explain_hang(inspected.status, inspected.inspections)
        return draw_hang(inspected, verdict)

    screen = JobScreen(watch_job(status), explain)
    screen.run(mouse=False)
    if screen.view is not None:
        print(draw_top(screen.view), end="")
    if screen.over:
        print(screen.over)
