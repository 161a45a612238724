"""``ronde run``: words -> job -> exit code."""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from ronde.cli.exit_codes import exit_code_of
from ronde.cli.horovod_options import Asked
from ronde.cli.join_options import require_listen_or_agent, say
from ronde.cli.output_options import make_sink, report_error, require_tee
from ronde.cli.rank_options import read_num_each
from ronde.cli.run_options import make_parser
from ronde.cli.run_request import RunRequest, read_duration_s, read_request
from ronde.errors import RondeError, UsageError
from ronde.launch.chronicle import Chronicle
from ronde.launch.hiring import Hired, Hiring
from ronde.launch.horovod_alias import warn_of_horovod
from ronde.launch.hosts.allocation import take_each
from ronde.launch.inherited import own_environment
from ronde.launch.launching import Undertaking, launch, rehearse
from ronde.launch.signals import (
    TIMED_OUT,
    InterruptedStartError,
    interruption_code,
)
from ronde.launch.spawners.base import Spawner
from ronde.launch.start_progress import StartProgress
from ronde.launch.timeouts import Timeouts


def help_text() -> str:
    """Return what ``ronde run --help`` says."""
    return make_parser().format_help()


def run(
    words: Sequence[str],
    agent: "subprocess.Popen[bytes]",
    signal_fd: int,
    timeouts: Timeouts,
) -> int:
    """Run a program on every slot; return the exit code.

    Args:
        words: What stands after ``run``.
        agent: Already started, for it takes as long to start as this module.
        signal_fd: From ``launch.signals.caught_signals``.
        timeouts: How long hosts are waited for.

    Raises:
        UsageError: The words ask for something that cannot be; nothing was started.
        LaunchError: The launcher itself failed.
    """
    parser = make_parser()
    options = parser.parse_args(words)
    environ = own_environment()
    require_listen_or_agent(options, parser.given(options))
    if options.agent:
        from ronde.cli.run_agent import run_agent

        return run_agent(options, environ, agent, signal_fd)
    try:
        with _limited(options.timeout), _recorded(options) as timeline_env:
            request = read_request(options, environ, timeline_env)
            known = {**environ, **request.wish.job.env}
            _warn(
                require_tee(options),
                warn_of_horovod(known, sys.path[1:]),
                request.asked,
            )
            with _hired(request, environ, agent, signal_fd, timeouts) as hired:
                hired.exit_code = _launch(request, hired, signal_fd)
                return hired.exit_code
    except InterruptedStartError as error:
        return interruption_code(error.number)
    except RondeError as error:
        report_error(options.error_file, error, exit_code_of(error))
        raise


def _launch(request: RunRequest, hired: Hired, signal_fd: int) -> int:
    options, output_dir = request.options, request.asked.output_dir
    wish = request.wish._replace(hosts=hired.hosts)
    name = time.strftime("%Y%m%d-%H%M%S")
    if options.dry_run:
        from ronde.render.plan import plan_text

        progress = StartProgress(say, is_verbose=bool(options.verbose))
        arrangement = rehearse(
            wish, hired.hiring, signal_fd, name=name, progress=progress
        )
        print(plan_text(arrangement.plan, arrangement.notices), end="")
        return 0
    if options.sync:
        _sync(options.sync, hired, signal_fd)
    sink = make_sink(options, output_dir)
    if output_dir:
        from ronde.cli.horovod_files import LinkedOutputs

        sink = LinkedOutputs(sink, output_dir)
    chronicle = Chronicle(options.record, sink.notice)
    job = Undertaking(name, request.restarts, chronicle, bool(options.verbose))
    return launch(wish, sink, hired.hiring, signal_fd, job).exit_code


def _sync(folder: str, hired: Hired, signal_fd: int) -> None:
    from ronde.launch.syncing import sync_folder
    from ronde.units import format_size

    hired.hiring.look_up(hired.hosts, signal_fd)
    others = [host for host in hired.hosts if not hired.hiring.is_here(host)]
    if not others:
        return
    synced = sync_folder(folder, others, hired.hiring.spawner, signal_fd)
    print(
        f"ronde: {synced.num_files} files, {format_size(synced.size_bytes)}, copied to "
        f"{synced.num_hosts} hosts in {synced.took_s:.1f} s",
        file=sys.stderr,
    )


@contextmanager
def _hired(
    request: RunRequest,
    environ: Mapping[str, str],
    agent: "subprocess.Popen[bytes]",
    signal_fd: int,
    timeouts: Timeouts,
) -> Generator[Hired]:
    """Give the hosts of the job, and how they get agents."""
    options, asked = request.options, request.asked
    num_each = read_num_each(options)
    if options.listen:
        from ronde.cli.run_head import joined_nodes

        with joined_nodes(options, environ, agent, signal_fd, timeouts) as hired:
            hired.hosts = take_each(hired.hosts, num_each)
            yield hired
        return

    def make() -> Spawner:
        from ronde.cli.ssh_options import make_spawner

        return make_spawner(options, environ, asked.ssh_args)

    hiring = Hiring(agent, make, options.python, timeouts)
    yield Hired(take_each(asked.hosts, num_each), hiring)


def _recorded(
    options: argparse.Namespace,
) -> AbstractContextManager[dict[str, str]]:
    """Have the ranks record where that is asked for; give them its variables."""
    if options.timeline:
        from ronde.cli.timeline import recorded

        return recorded(options.timeline, options.timeline_limit)
    if options.timeline_limit:
        raise UsageError(
            "--timeline-limit must come with --timeline, got it alone. Type: ronde "
            "run --timeline trace.json.gz --timeline-limit 32MiB ..."
        )
    return nullcontext({})


@contextmanager
def _limited(text: str) -> Generator[None]:
    """Have ``signals.TIMED_OUT`` come when the time of ``--timeout`` is over."""
    limit_s = read_duration_s("--timeout", text) if text else 0.0
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    except InterruptedStartError as error:
        if error.number == TIMED_OUT:
            print(f"ronde: --timeout {text} ended the start", file=sys.stderr)
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _warn(tee: str, horovod: str, asked: Asked) -> None:
    ignored = ", ".join(asked.ignored)
    ignored = ignored and f"these options change nothing here: {ignored}"
    for warning in filter(None, (tee, horovod, ignored)):
        print(f"ronde: {warning}", file=sys.stderr)
