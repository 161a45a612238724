"""``ronde run``: words -> job -> exit code."""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from ronde.cli.exit_codes import exit_code_of
from ronde.cli.horovod_options import HorovodOptions, understand
from ronde.cli.output_options import make_sink, report_error, require_tee
from ronde.cli.run_options import (
    DEFAULT_GRACE,
    make_parser,
    read_num_each,
    read_num_ranks,
    read_placement,
    require_listen_or_agent,
    say,
)
from ronde.cli.ssh_options import require_launcher
from ronde.errors import RondeError, UsageError, WorldError
from ronde.launch.agent_start.starter import AgentStarter, JobHosts
from ronde.launch.controller.controller import Restarts
from ronde.launch.controller.launch import (
    JobOptions,
    JobSpec,
    Preflight,
    dry_run,
    launch,
)
from ronde.launch.controller.plan import JobRequest
from ronde.launch.environments import (
    alias_environment,
    own_environment,
    read_assignments,
    select_forwarded,
    warn_of_horovod,
)
from ronde.launch.event_loop import StartProgress
from ronde.launch.hosts.host import take_each
from ronde.launch.output.files import JobRecords
from ronde.launch.program import absolute_path
from ronde.launch.signals import (
    TIMED_OUT,
    InterruptedStartError,
    interruption_code,
)
from ronde.launch.spawners.base import Spawner
from ronde.launch.timeouts import Timeouts
from ronde.world import Launcher, read_rank_info
from ronde.world.environment import (
    read_algorithm,
    read_engine,
    read_malloc_tuning,
    require_algorithm,
    require_engine,
)
from ronde.world.horovod_config import read_horovod_config


class RunRequest(NamedTuple):
    """A job as it is asked for."""

    options: argparse.Namespace  # as they were parsed
    asked: HorovodOptions  # what Horovod's options and those that name hosts ask for
    spec: JobSpec
    restarts: Restarts  # when it is started again


def read_request(
    options: argparse.Namespace,
    environ: Mapping[str, str],
    more_env: Mapping[str, str],
) -> RunRequest:
    """Return what is asked for."""
    program = _program(options.program)
    asked = understand(options, environ)
    if asked.output_dir and options.log_dir:
        raise UsageError("--output-filename must stand alone, got --log-dir too.")
    require_launcher(options.launcher)
    num_ranks = read_num_ranks(options)
    if asked.min_ranks is not None and (num_ranks or asked.min_ranks) < asked.min_ranks:
        raise UsageError(
            f"--min-np must be at most -np, got {asked.min_ranks} and -np {num_ranks}. "
            "Correct one of them."
        )
    if not options.nested:
        refuse_nesting(num_ranks, environ)
    restarts = _restarts(options)
    env = _rank_env(options, asked, environ)
    spec = JobSpec(
        job=JobRequest(
            argv=("-m", *program) if options.module else tuple(program),
            env={**env, **more_env},
            rank_env={},
            cwd=options.chdir,
            grace_s=(
                15.0
                if options.grace == DEFAULT_GRACE
                else read_duration_s("--grace", options.grace)
            ),
            master_port=_port(options.master_port),
            is_mpi=read_engine({**environ, **env}) == "mpi",
            max_restarts=restarts.limit,
        ),
        hosts=asked.hosts,
        num_ranks=num_ranks,
        min_ranks=asked.min_ranks,
        interfaces=tuple(n for n in str(options.interface).split(",") if n),
        placement=read_placement(options),
        preflight=_preflight(options, env) if options.preflight else None,
    )
    return RunRequest(options, asked, spec, restarts)


def _preflight(options: argparse.Namespace, env: dict[str, str]) -> Preflight:
    # Imported where it is needed: few jobs ask for it.
    from ronde.cli.check import make_preflight

    return make_preflight(str(absolute_path(options.chdir)), env)


def _restarts(options: argparse.Namespace) -> Restarts:
    limit = options.max_restarts
    if not limit.isdecimal() or not limit.isascii():
        raise UsageError(
            f"--max-restarts must be a whole number, got {limit!r}. Type: "
            "--max-restarts 3"
        )
    codes = [code.strip() for code in options.no_restart_codes.split(",")]
    wrong = [code for code in codes if code and not code.isdecimal()]
    if wrong:
        raise UsageError(
            "--no-restart-codes must be exit codes such as 93,64, got "
            f"{wrong[0]!r}. Correct it."
        )
    return Restarts(int(limit), frozenset(int(code) for code in codes if code))


def _rank_env(
    options: argparse.Namespace, asked: HorovodOptions, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables for all ranks, and see that they can be understood."""
    env = select_forwarded(environ) | asked.env
    env |= read_assignments(options.env, environ) | _engine_env(options, asked.engine)
    if options.no_malloc_tuning:
        env["RONDE_MALLOC_TUNING"] = "0"
    known = {**environ, **env}
    env |= alias_environment(known, is_wanted=options.horovod_alias)
    read_engine(known)
    read_algorithm(known)
    read_horovod_config(known)
    read_malloc_tuning(known)
    return env


def _program(words: list[str]) -> list[str]:
    program = words[1:] if words[:1] == ["--"] else words
    if not program or not program[0]:
        raise UsageError(
            "program must be given, got none. Type: ronde run -n 2 python train.py"
        )
    return program


def _port(text: str) -> int:
    if not text.isdecimal() or not text.isascii() or int(text) > 65535:
        raise UsageError(
            f"--master-port must be in 1..65535, got {text!r}. "
            "Leave the option out for a free port."
        )
    return int(text)


def read_duration_s(option: str, text: str) -> float:
    """Read the duration that an option says."""
    from ronde.units import parse_duration_s

    try:
        duration_s = parse_duration_s(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if option == "--timeout" and not duration_s:
        raise UsageError(
            f"--timeout must be longer than 0, got {text!r}. Leave it out for no limit."
        )
    return duration_s


def _engine_env(options: argparse.Namespace, asked: str) -> dict[str, str]:
    """Return what tells the ranks how to exchange tensors."""
    env: dict[str, str] = {}
    engine = options.engine or asked
    if engine:
        env["RONDE_ENGINE"] = require_engine(engine, "--engine")
    if options.algorithm:
        env["RONDE_ALGORITHM"] = require_algorithm(options.algorithm, "--algorithm")
    return env


def refuse_nesting(size: int | None, environ: Mapping[str, str]) -> None:
    """Refuse to start ranks inside a rank of a world that has other ranks.

    Args:
        size: Ranks that are to be started; None for one a slot.
    """
    try:
        claim = read_rank_info(environ)
    except WorldError as error:
        raise UsageError(
            f"{error} Or give --nested to start a world of its own."
        ) from None
    is_alone = claim.size == 1 and claim.launcher is not Launcher.RONDE
    if claim.launcher is Launcher.NONE or is_alone:
        return
    count = "n" if size is None else size
    product = "" if size is None else f" = {claim.size * size}"
    raise UsageError(
        f"size must be the ranks of one launcher, but this is rank {claim.rank} of "
        f"{claim.size} of {claim.launcher}: {claim.size} * {count}{product} "
        f"processes, not {count}, in {claim.size} worlds. Start "
        "ronde run outside of it, or give --nested for a world of its own in each rank."
    )


def help_text() -> str:
    """Return what ``ronde run --help`` says."""
    return make_parser().format_help()


def run(
    words: Sequence[str],
    agent: "subprocess.Popen[bytes]",
    signal_fd: int,
    timeouts: Timeouts,
) -> int:
    """Run a program on every slot; return the exit code."""
    parser = make_parser()
    options = parser.parse_args(words)
    environ = own_environment()
    require_listen_or_agent(options, parser.given(options))
    if options.agent:
        from ronde.cli.run_joining import run_agent

        return run_agent(options, environ, agent, signal_fd)
    try:
        with _limited(options.timeout), _recorded(options) as timeline_env:
            request = read_request(options, environ, timeline_env)
            known = {**environ, **request.spec.job.env}
            _warn(
                require_tee(options),
                warn_of_horovod(known, sys.path[1:]),
                request.asked,
            )
            with _job_hosts(request, environ, agent, signal_fd, timeouts) as job_hosts:
                job_hosts.exit_code = _launch(request, job_hosts, signal_fd)
                return job_hosts.exit_code
    except InterruptedStartError as error:
        return interruption_code(error.number)
    except RondeError as error:
        report_error(options.error_file, error, exit_code_of(error))
        raise


def _launch(request: RunRequest, job_hosts: JobHosts, signal_fd: int) -> int:
    options, output_dir = request.options, request.asked.output_dir
    spec = request.spec._replace(hosts=job_hosts.hosts)
    name = time.strftime("%Y%m%d-%H%M%S")
    if options.dry_run:
        from ronde.render.plan import plan_text

        progress = StartProgress(say, is_verbose=bool(options.verbose))
        resolved = dry_run(
            spec, job_hosts.starter, signal_fd, name=name, progress=progress
        )
        print(plan_text(resolved.plan, resolved.notices), end="")
        return 0
    if options.sync:
        _sync(options.sync, job_hosts, signal_fd)
    sink = make_sink(options, output_dir)
    if output_dir:
        from ronde.cli.horovod_options import LinkedOutputs

        sink = LinkedOutputs(sink, output_dir)
    records = JobRecords(options.record, sink.notice)
    job = JobOptions(name, request.restarts, records, bool(options.verbose))
    return launch(spec, sink, job_hosts.starter, signal_fd, job).exit_code


def _sync(folder: str, job_hosts: JobHosts, signal_fd: int) -> None:
    from ronde.launch.spawners.sync import sync_folder
    from ronde.units import format_size

    job_hosts.starter.look_up(job_hosts.hosts, signal_fd)
    others = [host for host in job_hosts.hosts if not job_hosts.starter.is_here(host)]
    if not others:
        return
    synced = sync_folder(folder, others, job_hosts.starter.spawner, signal_fd)
    print(
        f"ronde: {synced.num_files} files, {format_size(synced.size_bytes)}, copied to "
        f"{synced.num_hosts} hosts in {synced.took_s:.1f} s",
        file=sys.stderr,
    )


@contextmanager
def _job_hosts(
    request: RunRequest,
    environ: Mapping[str, str],
    agent: "subprocess.Popen[bytes]",
    signal_fd: int,
    timeouts: Timeouts,
) -> Generator[JobHosts]:
    """Give the hosts of the job, and how they get agents."""
    options, asked = request.options, request.asked
    num_each = read_num_each(options)
    if options.listen:
        from ronde.cli.run_joining import joined_nodes

        with joined_nodes(options, environ, agent, signal_fd, timeouts) as job_hosts:
            job_hosts.hosts = take_each(job_hosts.hosts, num_each)
            yield job_hosts
        return

    def make() -> Spawner:
        from ronde.cli.ssh_options import make_spawner

        return make_spawner(options, environ, asked.ssh_args)

    starter = AgentStarter(agent, make, options.python, timeouts)
    yield JobHosts(take_each(asked.hosts, num_each), starter)


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


def _warn(tee: str, horovod: str, asked: HorovodOptions) -> None:
    ignored = ", ".join(asked.ignored)
    ignored = ignored and f"these options change nothing here: {ignored}"
    for warning in filter(None, (tee, horovod, ignored)):
        print(f"ronde: {warning}", file=sys.stderr)
