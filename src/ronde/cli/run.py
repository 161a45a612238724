"""``ronde run``: words -> job -> exit code; also the head of joining nodes, and a node.

A recorded job's parts lie beside its timeline while it runs.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from ronde.cli.exits import exit_code_of
from ronde.cli.run_options import (
    RunRequest,
    make_parser,
    make_sink,
    own_slots,
    read_num_each,
    read_request,
    require_listen_or_agent,
    require_tee,
    token_file,
)
from ronde.errors import RondeError, UsageError
from ronde.launch.agent_start.starter import AgentStarter, JobHosts
from ronde.launch.controller import dry_run, launch
from ronde.launch.environments import own_environment, warn_of_horovod
from ronde.launch.hosts.host import Host, take_each
from ronde.launch.limits import Timeouts
from ronde.launch.output.files import write_report
from ronde.launch.program import absolute_path
from ronde.launch.signals import TIMED_OUT, InterruptedStartError, interruption_code
from ronde.launch.spawners.base import Spawner
from ronde.units import parse_duration_s, parse_size_bytes

_Agent = subprocess.Popen[bytes]


def run(words: Sequence[str], agent: _Agent, signal_fd: int, timeouts: Timeouts) -> int:
    parser = make_parser()
    options = parser.parse_args(words)
    if options.help:
        parser.read(["--help"])
        return 0
    environ = own_environment()
    require_listen_or_agent(options, parser.given(options))
    if options.agent:
        return _run_node(options, environ, agent, signal_fd)
    recorded = _recorded(options.timeline or "", options.timeline_limit)
    try:
        with _limited(options.timeout or ""), recorded as timeline_env:
            request = read_request(options, environ, timeline_env)
            _warn(request, environ)
            with _job_hosts(request, environ, agent, signal_fd, timeouts) as job_hosts:
                job_hosts.exit_code = _launch(request, job_hosts, signal_fd)
                return job_hosts.exit_code
    except InterruptedStartError as error:
        return interruption_code(error.number)
    except RondeError as error:
        if options.error_file:
            # The user must see the error itself, not that the file cannot be written.
            with suppress(OSError):
                write_report(options.error_file, exit_code_of(error), str(error))
        raise


def _warn(request: RunRequest, environ: Mapping[str, str]) -> None:
    ignored = ", ".join(request.horovod.ignored)
    known = {**environ, **request.spec.env}
    for warning in (
        require_tee(request.options),
        warn_of_horovod(known, sys.path[1:]),
        ignored and f"these options have no effect here: {ignored}",
    ):
        if warning:
            _report(warning)


def _launch(request: RunRequest, job_hosts: JobHosts, signal_fd: int) -> int:
    options = request.options
    spec = request.spec._replace(hosts=job_hosts.hosts)
    starter = job_hosts.starter
    if options.dry_run:
        from ronde.render.plan import plan_text

        print(plan_text(dry_run(spec, starter, signal_fd, _report)), end="")
        return 0
    if options.sync:
        _sync(options.sync, job_hosts, signal_fd)
    sink, files = make_sink(options, request.horovod.output_dir)
    return launch(spec, starter, signal_fd, sink, files).exit_code


def _sync(folder: str, job_hosts: JobHosts, signal_fd: int) -> None:
    from ronde.launch.spawners.sync import sync_folder
    from ronde.units import format_size

    starter = job_hosts.starter
    starter.look_up(job_hosts.hosts, signal_fd)
    others = [host for host in job_hosts.hosts if not starter.is_here(host)]
    if others:
        done = sync_folder(folder, others, starter.spawner, signal_fd)
        _report(
            f"{done.num_files} files, {format_size(done.size_bytes)}, copied to "
            f"{done.num_hosts} hosts in {done.took_s:.1f} s"
        )


@contextmanager
def _job_hosts(
    request: RunRequest,
    environ: Mapping[str, str],
    agent: _Agent,
    signal_fd: int,
    timeouts: Timeouts,
) -> Generator[JobHosts]:
    options = request.options
    num_each = read_num_each(options)
    if options.listen:
        with _joined_nodes(options, environ, agent, signal_fd, timeouts) as job_hosts:
            job_hosts.hosts = take_each(job_hosts.hosts, num_each)
            yield job_hosts
        return

    def make() -> Spawner:
        from ronde.cli.hosts import make_spawner

        return make_spawner(options, environ, request.horovod.ssh_args)

    starter = AgentStarter(agent, make, options.python, timeouts)
    yield JobHosts(take_each(request.horovod.hosts, num_each), starter)


@contextmanager
def _limited(text: str) -> Generator[None]:
    """Send this process ``signals.TIMED_OUT`` after the time of ``--timeout``."""
    limit_s = parse_duration_s(text, "--timeout") if text else 0.0
    if text and not limit_s:
        raise UsageError(
            f"--timeout must be longer than 0, got {text!r}. Leave it out for no limit."
        )
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    except InterruptedStartError as error:
        if error.number == TIMED_OUT:
            _report(f"--timeout {text} ended the start")
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _report(text: str) -> None:
    print(f"ronde: {text}", file=sys.stderr, flush=True)


@contextmanager
def _joined_nodes(
    options: argparse.Namespace,
    environ: Mapping[str, str],
    agent: _Agent,
    signal_fd: int,
    timeouts: Timeouts,
) -> Generator[JobHosts]:
    """Wait until all nodes have joined; at the end send them the exit code."""
    from ronde.launch.joining.channel import choose_address, parse_endpoint, release
    from ronde.launch.joining.join_server import (
        JoinConfig,
        JoinedAgents,
        wait_for_nodes,
    )
    from ronde.launch.joining.mutual_auth import read_token

    text = options.nodes or ""
    if not (text.isascii() and text.isdecimal() and int(text) >= 2):
        raise UsageError(
            "--nodes must be a whole number of at least 2 with --listen, got "
            f"{text or 'none'}. Type: ronde run --nodes 3 --listen 29400 ..."
        )
    host, port = parse_endpoint(options.listen, "--listen")
    config = JoinConfig(
        address=choose_address(host),
        port=port,
        token=read_token(token_file(options, environ)),
        head=os.uname().nodename,
        num_nodes=int(text) - 1,
        timeout_s=parse_duration_s(options.join_timeout, "--join-timeout"),
    )
    head = Host(config.head, own_slots(options))
    nodes = wait_for_nodes(config, signal_fd, _report)
    hosts = (head, *(host for host, _ in nodes))
    joined = JobHosts(hosts, JoinedAgents(agent, nodes, timeouts))
    try:
        yield joined
    except InterruptedStartError as error:
        joined.exit_code = interruption_code(error.number)
        raise
    except RondeError as error:
        joined.exit_code = exit_code_of(error)
        raise
    finally:
        release([transport for _, transport in nodes], joined.exit_code)


def _run_node(
    options: argparse.Namespace,
    environ: Mapping[str, str],
    agent: _Agent,
    signal_fd: int,
) -> int:
    from ronde.launch.joining.channel import parse_endpoint, with_port
    from ronde.launch.joining.join_client import JoinRequest, follow_head, join_head
    from ronde.launch.joining.mutual_auth import NodeInfo, host_name, read_token

    if options.program:
        raise UsageError(
            f"program must be given to the head alone, got {options.program[0]!r} with "
            "--agent. Drop it."
        )
    host, port = parse_endpoint(options.agent, "--agent")
    if not host or not port:
        raise UsageError(
            f"--agent must be the HEAD:PORT to join, got {options.agent!r}. "
            "Type: ronde run --agent node1:29400"
        )
    request = JoinRequest(
        host=host,
        port=port,
        token=read_token(token_file(options, environ)),
        node_info=NodeInfo(host_name(os.uname().nodename), own_slots(options)),
        timeout_s=parse_duration_s(options.join_timeout, "--join-timeout"),
    )
    try:
        channel = join_head(request, signal_fd, _report)
        where = with_port(host, port)
        _report(f"{request.node_info.host} has joined {where}, and ends when that does")
        lost = f"the head at {where} is gone; all its ranks here were ended"
        return follow_head(channel, agent, signal_fd, partial(_report, lost))
    except InterruptedStartError as error:
        return 128 + error.number


@contextmanager
def _recorded(file: str, limit: str | None) -> Generator[dict[str, str]]:
    """Yield the variables that make ranks record; then write the trace of all.

    However the job ends: what each rank had recorded by then is in the trace.
    """
    if not file:
        if limit:
            raise UsageError(
                "--timeline-limit must come with --timeline, got it alone. Type: ronde "
                "run --timeline trace.json.gz --timeline-limit 32MiB ..."
            )
        yield {}
        return
    from ronde.timeline.recording import DEFAULT_LIMIT_BYTES

    path = absolute_path(file)
    limit_bytes = parse_size_bytes(limit) if limit else DEFAULT_LIMIT_BYTES
    parts = path.with_name(f"{path.name}.parts")
    if not path.parent.is_dir() or path.is_dir():
        raise UsageError(
            f"--timeline must be a file in a directory that exists, got {str(path)!r}. "
            "Create the directory or name another."
        )
    if limit_bytes < 1 << 16:
        raise UsageError(
            f"--timeline-limit must be at least 64KiB, got {limit_bytes} bytes. "
            "Leave it out for 32MiB."
        )
    if parts.exists():
        raise UsageError(
            f"--timeline must be a name without parts of an earlier job, got {path}: "
            f"they are in {parts}. Type: ronde trace merge {path} {parts}, then "
            "remove that directory."
        )
    has_run = False
    try:
        yield {"RONDE_TIMELINE": str(parts), "RONDE_TIMELINE_LIMIT": str(limit_bytes)}
        has_run = True
    finally:
        if has_run or parts.exists():
            _merge(path, parts, limit_bytes)


def _merge(path: Path, parts: Path, limit_bytes: int) -> None:
    """Write the trace; a failure here must not hide how the job ended."""
    from ronde.timeline.part import SUFFIX
    from ronde.timeline.recording import write_merged

    files = sorted(parts.glob(f"*{SUFFIX}"))
    if not files:
        _report("the timeline is empty: no rank called init(), so there is no file")
        return
    try:
        write_merged(path, [file.read_bytes() for file in files], limit_bytes)
        for file in files:
            file.unlink()
        parts.rmdir()
    except (UsageError, OSError) as error:
        _report(f"{error} The ranks' records are in {parts}.")
