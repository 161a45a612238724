"""``ronde run``: read the command line, run the job, return its exit code.

It also handles ``--listen`` and ``--agent``, for nodes that join. Every run loads this
module, so modules that few jobs need are imported in functions.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Container, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import takewhile
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ronde.arguments import (
    CommandParser,
    attribute_of,
    one_of,
    read_nodes,
    require_alone,
    whole_number,
)
from ronde.cli.exits import exit_code_of
from ronde.cli.help import RUN_HELP
from ronde.cli.hosts import (
    DISCOVERIES,
    ELASTIC_OPTIONS,
    HOST_DEFAULTS,
    HOST_TYPES,
    HorovodOptions,
    find_run_hosts,
    make_spawner,
    read_slots,
)
from ronde.cli.pods import apply_pod
from ronde.errors import RondeError, UsageError, WorldError
from ronde.launch import environments
from ronde.launch.host import (
    MAX_SLOTS,
    SLOTS_CORES,
    SLOTS_GPUS,
    Host,
    limit_slots,
)
from ronde.launch.hosts.node import AgentStarter
from ronde.launch.job import controller
from ronde.launch.job.job_files import ErrorFile, RankLogs, write_report
from ronde.launch.job.output import JobFile, OutputSink
from ronde.launch.job.plan import JobSpec
from ronde.launch.limits import ELASTIC, EXIT_INTERNAL, USUAL, Timeouts
from ronde.launch.program import absolute_path, resolve_program
from ronde.launch.signals import TIMED_OUT, InterruptedStartError, interruption_code
from ronde.units import format_duration, parse_duration_s, parse_positive_s
from ronde.world.launcher_env import RANK_VARIABLES

if TYPE_CHECKING:
    from ronde.launch.hosts.join_server import JoinServer
    from ronde.topology.placement.binding import PlacementRequest

_Agent = subprocess.Popen[bytes]
_UNITS = {"gpu": SLOTS_GPUS, "cpu": SLOTS_CORES}
_LEAST_HANG_S = 5.0  # reports of ranks are up to two seconds old
_TOKEN_VARIABLE = "RONDE_TOKEN_FILE"  # noqa: S105 - a name, and of a file at that
_TOKEN_OF_PODS = "/etc/ronde/token"  # noqa: S105 - the name of a file
_CURE_OF_PODS = "Look for the other pods with kubectl get pods."
_HIDDEN = """\
  --local-ranks-filter RANKS
  -t, --tee WHAT
"""
_DEFAULTS = {
    **HOST_DEFAULTS,
    "grace": 15.0,
    "master_port": 0,
    "max_restarts": 0,
    "no_restart_codes": frozenset({93, 64}),
    "bind": "none",
    "bind_policy": "best-effort",
    "gpu_view": "all",
    "join_timeout": 300.0,
    "pod": None,  # of a pod
    "awaits_hosts": False,  # hosts may not be up yet
}
# Names of the same options in other launchers.
_OTHER_NAMES = {
    "-n": ["--ntasks", "--num-processes"],
    "--nproc-per-node": ["-ppn", "-perhost", "--npernode", "--ntasks-per-node"],
    "--nodes": ["--num-nodes", "--num-machines"],
    "--hosts": ["--host", "-host", "-hosts"],
    "--hostfile": ["--machinefile", "-machinefile", "-f"],
    "--chdir": ["--wdir", "-wdir", "--wd", "-wd", "-D"],
    "--interface": ["-iface"],
}
# Options by their attributes.
_OF_JOINING = ("token_file", "join_timeout")
_OF_A_NODE = ("agent", "token_file", "join_timeout", "slots", "nproc_per_node")
_JOINED = "the job uses the nodes that join"
_NOT_REACHED = "each node that joins starts its own agent"
# Options that have no effect where nodes join, and the reason.
_OF_OTHER_HOSTS = {
    "hosts": _JOINED,
    "hostfile": _JOINED,
    "host_discovery": _JOINED,
    "host_discovery_script": _JOINED,
    "standalone": "the nodes that join are further hosts",
    "launcher": _NOT_REACHED,
    "ssh_args": _NOT_REACHED,
    "ssh-port": _NOT_REACHED,
    "ssh-identity-file": _NOT_REACHED,
    "python": "each node uses the Python that started its own ronde run",
}


def _report(text: str) -> None:
    print(f"ronde: {text}", file=sys.stderr, flush=True)


def _ranks(text: str) -> int | None:
    return None if text == "auto" else whole_number(1)(text)


def _ranks_of_host(text: str) -> int | None:
    if text == "auto" or text in _UNITS:
        return _UNITS.get(text)
    if not text.isdecimal():
        raise UsageError(f"must be auto, gpu, cpu or a whole number, got {text!r}")
    return whole_number(1, MAX_SLOTS)(text)


def _exit_codes(text: str) -> frozenset[int]:
    read = whole_number()
    return frozenset(read(code) for word in text.split(",") if (code := word.strip()))


_TYPES = {
    **HOST_TYPES,
    "--launcher": one_of("auto", "ssh", "slurm", "ray"),
    "TIME": parse_positive_s,
    "--grace": parse_duration_s,
    "--join-timeout": parse_duration_s,
    "--elastic-timeout": str,  # horovodrun's, as --reset-limit: see cli.elastic
    "-n": _ranks,
    "--nproc-per-node": _ranks_of_host,
    "--master-port": whole_number(0, 65535),
    "--max-restarts": whole_number(),
    "--no-restart-codes": _exit_codes,
    "--min-ranks": whole_number(1),
    "--max-ranks": whole_number(1),
    "--spares": whole_number(),
}


class RunParser(CommandParser):
    """The parser of ``ronde run``, which also takes options of other launchers."""

    def _refuse_foreign(self, word: str) -> None:
        from ronde.cli.other_launchers import advise

        if advice := advise(word):
            raise UsageError(advice)


def make_run_parser(words: Sequence[str] | None = None) -> RunParser:
    """Return a parser of all options, or only of those that ``words`` may need."""
    parser = RunParser("ronde run", RUN_HELP, types=_TYPES)
    parser.declare(_HIDDEN)
    for option, names in _OTHER_NAMES.items():
        parser.alias(option, *names)
    if words is None or not _are_own(words, parser.options):
        from ronde.cli.horovodrun import add_horovod_options

        add_horovod_options(parser)
    parser.set_defaults(**_DEFAULTS)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    parser.add_underscore_twins()
    return parser


def _are_own(words: Sequence[str], names: Container[str]) -> bool:
    """Return True if all options are ronde's own, so none can be horovodrun's."""
    # The program's options count as well: its beginning is not known yet.
    before = (w.replace("_", "-") for w in takewhile("--".__ne__, words))
    options = [w.partition("=")[0] for w in before if w.startswith("-")]
    return all(w in names or (w[1:2] != "-" and w[:2] in names) for w in options)


class _Start(NamedTuple):
    options: argparse.Namespace
    environ: Mapping[str, str]
    agent: _Agent
    signal_fd: int
    timeouts: Timeouts


class RunRequest(NamedTuple):
    """The job that a command line describes."""

    options: argparse.Namespace
    horovod: HorovodOptions
    spec: JobSpec
    preflight: controller.Preflight | None


def read_run_request(words: Sequence[str], environ: Mapping[str, str]) -> RunRequest:
    """Read and check the words after ``ronde run``; ``--agent`` is not allowed."""
    parser = make_run_parser(words)
    options = parser.parse_args(words)
    require_listen_or_agent(options, parser.given(options))
    return read_request(options, environ, {})


def read_request(
    options: argparse.Namespace, environ: Mapping[str, str], more_env: Mapping[str, str]
) -> RunRequest:
    program = options.program[options.program[:1] == ["--"] :]
    if not program or not program[0]:
        raise UsageError("a program is required. Type: ronde run -n 2 python train.py")
    horovod = _read_horovod(options, environ)
    hosts = find_run_hosts(options, environ, horovod.ssh_port)
    if horovod.output_dir and options.log_dir:
        raise UsageError(
            "--output-filename cannot be combined with --log-dir. Drop one."
        )
    num_ranks, num_each = options.num_proc, options.nproc_per_node
    elastic = None
    makes_elastic = ("--min-ranks", "--max-ranks", "--nodes", *DISCOVERIES)
    names = map(attribute_of, (*makes_elastic, *ELASTIC_OPTIONS))
    if horovod.elastic or any(getattr(options, n) is not None for n in names):
        from ronde.cli.elastic import read_elastic

        elastic = read_elastic(options, horovod, environ, num_ranks, num_each)
    is_known = options.nested or options.pod  # whose RANK may be that of a pod
    if not is_known and environ.keys() & RANK_VARIABLES:
        refuse_nesting(num_ranks, environ)
    env = _rank_env(options, horovod, environ)
    if elastic is None:
        unused = (f"--{n}" for n in horovod.elastic if n != "reset-limit")
        horovod = horovod._replace(ignored=(*horovod.ignored, *unused))
    else:
        env = {"HOROVOD_ELASTIC": "1", **env}
        if num_ranks is None and elastic.num_processes is not None:
            num_ranks = elastic.max_ranks
    preflight = None
    if options.preflight:
        from ronde.cli.check import make_preflight

        preflight = make_preflight(str(absolute_path(options.chdir or "")), env)
    spec = JobSpec(
        argv=("-m", *program) if options.module else tuple(program),
        env={**env, **more_env},
        cwd=options.chdir or "",
        grace_s=options.grace,
        master_port=options.master_port,
        hosts=hosts,
        patience_s=options.join_timeout if options.awaits_hosts else 0.0,
        num_ranks=num_ranks,
        min_ranks=elastic.min_ranks if elastic else None,
        interfaces=tuple(n for n in (options.interface or "").split(",") if n),
        placement=_placement(options),
        max_restarts=options.max_restarts,
        no_restart_codes=options.no_restart_codes,
        is_verbose=bool(options.verbose),
        elastic=elastic,
        hang_timeout_s=_hang_timeout(options),
        has_live_view=options.top and sys.stdout is not None and sys.stdout.isatty(),
    )
    return RunRequest(options, horovod, spec, preflight)


def _hang_timeout(options: argparse.Namespace) -> float:
    limit_s = options.hang_timeout or inf
    if limit_s < _LEAST_HANG_S:
        raise UsageError(
            f"--hang-timeout must be at least {_LEAST_HANG_S:g}s, got "
            f"{format_duration(limit_s)}."
        )
    return limit_s


def _read_horovod(
    options: argparse.Namespace, environ: Mapping[str, str]
) -> HorovodOptions:
    has_options = hasattr(options, "config-file") or not (
        options.elastic_timeout is None and options.reset_limit is None
    )
    if not has_options and not any(name.startswith("HOROVOD_") for name in environ):
        return HorovodOptions()
    from ronde.cli.horovodrun import read_horovod_options

    return read_horovod_options(options, environ)


def refuse_nesting(size: int | None, environ: Mapping[str, str]) -> None:
    """Refuse to start inside a rank, except the only rank of another launcher."""
    from ronde.world import Launcher, read_rank_info

    try:
        info = read_rank_info(environ)
    except WorldError as error:
        raise UsageError(
            f"{error} Or give --nested to start a separate world."
        ) from None
    is_alone = info.size == 1 and info.launcher is not Launcher.RONDE
    if info.launcher is Launcher.NONE or is_alone:
        return
    count = "n" if size is None else size
    product = "" if size is None else f" = {info.size * size}"
    raise UsageError(
        f"ronde run was started by rank {info.rank} of {info.size} of {info.launcher}, "
        f"so {info.size} * {count}{product} processes would start in {info.size} "
        f"worlds, not {count} in one. Start ronde run outside of {info.launcher}, or "
        "give --nested to start a separate world in each rank."
    )


def _rank_env(
    options: argparse.Namespace,
    horovod: HorovodOptions,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables that all ranks get; refuse invalid ones."""
    env = environments.select_forwarded(environ) | dict(horovod.env)
    env |= environments.read_assignments(options.env, environ)
    if options.engine:
        env["RONDE_ENGINE"] = options.engine
    if options.algorithm:
        env["RONDE_ALGORITHM"] = options.algorithm
    if options.replace_gloo:
        env["RONDE_REPLACE_GLOO"] = "1"
    if options.no_malloc_tuning:
        env["RONDE_MALLOC_TUNING"] = "0"
    known = {**environ, **env}
    env |= environments.alias_environment(known, is_wanted=options.horovod_alias)
    if any(name.startswith(("RONDE_", "HOROVOD_")) for name in known):
        _require_valid(options, known)
    return env


def _require_valid(options: argparse.Namespace, known: Mapping[str, str]) -> None:
    """Refuse invalid variables here, before every rank refuses them."""
    from ronde.world import environment
    from ronde.world.horovod_config import read_horovod_config

    if options.engine:
        environment.require_engine(options.engine, "--engine")
    if options.algorithm:
        environment.require_algorithm(options.algorithm, "--algorithm")
    if environment.read_engine(known) == "mpi":
        raise UsageError(
            "ronde run cannot start ranks for the mpi engine; only mpirun and srun "
            "can. Type: RONDE_ENGINE=mpi mpirun -n 4 python train.py, or --engine auto"
        )
    environment.read_algorithm(known)
    read_horovod_config(known)
    environment.read_malloc_tuning(known)


def _placement(options: argparse.Namespace) -> "PlacementRequest | None":
    relaxed = _DEFAULTS["bind_policy"]
    mode, view, policy = options.bind, options.gpu_view, options.bind_policy
    if (mode, view, policy, options.dry_run) == ("none", "all", relaxed, False):
        return None
    if mode == "none" and policy != relaxed:
        raise UsageError(
            f"--bind-policy {policy} has no effect without --bind core, numa or auto. "
            f"Type: --bind numa --bind-policy {policy}"
        )
    from ronde.topology.placement.binding import BindMode, GpuView, PlacementRequest
    from ronde.topology.placement.placing import Policy

    return PlacementRequest(BindMode(mode), GpuView(view), Policy(policy))


def require_listen_or_agent(
    options: argparse.Namespace, given: Mapping[str, str]
) -> None:
    """Refuse options that conflict with ``--listen`` or ``--agent``, or need either."""
    by_ray = "--launcher ray" if options.launcher == "ray" else ""
    how = "--listen" if options.listen else "--agent" if options.agent else by_ray
    if options.listen and options.agent:
        raise UsageError("--agent and --listen cannot be used together. Drop one.")
    for option, name in given.items():
        if how and how == by_ray and option in ("launcher", "join_timeout"):
            continue
        is_unused = how in ("", by_ray) and not options.awaits_hosts
        if is_unused and option in _OF_JOINING:
            raise UsageError(
                f"{name} has no effect without --listen or --agent. Type: ronde run "
                "--nodes 3 --listen 29400 ..."
            )
        if how and option in _OF_OTHER_HOSTS:
            raise UsageError(
                f"{name} cannot be combined with {how}: "
                f"{_OF_OTHER_HOSTS[option]}. Drop one."
            )
        if options.agent and option not in _OF_A_NODE:
            raise UsageError(
                f"{name} cannot be combined with --agent. Give it to ronde run "
                "--listen on the head node."
            )


def own_slots(options: argparse.Namespace) -> int:
    node = Host("this node", read_slots(options), named_at="--slots")
    return limit_slots([node], options.nproc_per_node)[0].slots


def token_file(options: argparse.Namespace, environ: Mapping[str, str]) -> str:
    path = options.token_file or environ.get(_TOKEN_VARIABLE, "")
    if path or Path(_TOKEN_OF_PODS).is_file():
        return path or _TOKEN_OF_PODS
    cure = "Make one: (umask 077; openssl rand -hex 32 > token)"
    if options.pod:
        cure += (
            f"; kubectl create secret generic NAME --from-file=token; mount it at "
            f"{Path(_TOKEN_OF_PODS).parent}, with defaultMode 0440"
        )
    raise UsageError(
        "--token-file is required. It names a file with a secret that all nodes "
        f"share. {cure}"
    )


def make_sinks(
    options: argparse.Namespace, output_dir: str = ""
) -> tuple[OutputSink, list[JobFile]]:
    """Return the sink of the ranks' output, and the files of the job."""
    # Imported by the process that shows the output, before the ranks start.
    from ronde.render.console import Console, Tag, TagStyle, parse_tag
    from ronde.render.text import parse_ranks

    log_dir = output_dir or options.log_dir or ""
    log_dir = str(absolute_path(log_dir)) if log_dir else ""
    require_alone(options, "--no-prefix", "--tag")
    tag = Tag(TagStyle.NONE if options.no_prefix else TagStyle.AUTO)
    if options.tag is not None:
        tag = parse_tag(options.tag)
    require_alone(options, "--only", "--local-ranks-filter")
    only = None
    if (local := options.local_ranks_filter) is not None:
        only = parse_ranks(local, "--local-ranks-filter", is_local=True)
    elif options.only is not None:
        only = parse_ranks(options.only, "--only")
    sink = Console(1, 2, tag=tag, only=only, log_dir=log_dir)
    files: list[JobFile] = [RankLogs(sink, log_dir)] if log_dir else []
    if options.error_file:
        files.append(ErrorFile(sink, options.error_file))
    if output_dir:
        from ronde.cli.horovodrun import LinkedOutputs

        files.append(LinkedOutputs(sink, output_dir))
    return sink, files


def require_tee(options: argparse.Namespace) -> str:
    """Return a warning if ``--tee`` is given without ``--log-dir``, which it needs."""
    if options.tee is None:
        return ""
    if not re.fullmatch(r"[0-3]|[0-9]+:[0-3](,[0-9]+:[0-3])*", options.tee):
        raise UsageError(
            "--tee must be 0, 1, 2 or 3, or one of these for each local rank as in "
            f"0:3,1:1, got {options.tee!r}. Use --log-dir DIR instead. To limit the "
            "time, use --timeout TIME."
        )
    return "" if options.log_dir else "--tee writes no files without --log-dir DIR."


def run(words: Sequence[str], agent: _Agent, signal_fd: int, timeouts: Timeouts) -> int:
    parser = make_run_parser(words)
    options = parser.parse_args(words)
    if options.help:
        parser.read(["--help"])
        return 0
    environ = environments.own_environment()
    options, where = apply_pod(parser, options, parser.given(options), environ)
    require_listen_or_agent(options, parser.given(options))
    if where:
        _report(where)
    return run_job(options, agent, signal_fd, timeouts)


def run_job(
    options: argparse.Namespace, agent: _Agent, signal_fd: int, timeouts: Timeouts
) -> int:
    """Run the job that the options of ``ronde run`` describe."""
    start = _Start(options, environments.own_environment(), agent, signal_fd, timeouts)
    if options.agent:
        return _run_node(start)
    recorded = _recorded(options)
    try:
        with _limited(options.timeout), recorded as timeline_env:
            request = read_request(options, start.environ, timeline_env)
            _warn(request, start.environ)
            elastic = request.spec.elastic
            if elastic and timeouts == USUAL:
                timeouts = ELASTIC
            start = start._replace(timeouts=timeouts)
            if options.listen:
                return _launch_with_nodes(request, start)
            if options.launcher == "ray":
                return _launch_on_ray(request, start)
            make = partial(
                make_spawner, options, start.environ, request.horovod.ssh_args
            )
            # Users of Horovod try it out with several names of one machine.
            has_aliases = elastic and elastic.failure_domain == "host"
            starter = AgentStarter(
                agent, make, options.python, timeouts, has_aliases=bool(has_aliases)
            )
            return _launch(request, request.spec.hosts, starter, signal_fd)
    except InterruptedStartError as error:
        return interruption_code(error.number)
    except RondeError as error:
        if options.error_file:
            # The error itself matters more than a file that cannot be written.
            with suppress(OSError):
                write_report(options.error_file, exit_code_of(error), str(error))
        raise


def _recorded(options: argparse.Namespace) -> AbstractContextManager[dict[str, str]]:
    """Yield variables that make ranks record traces; merge the traces at the end."""
    if options.timeline:
        from ronde.timeline.recording import recorded_job

        path = absolute_path(options.timeline)
        return recorded_job(path, options.timeline_limit, _report)
    if options.timeline_limit:
        raise UsageError(
            "--timeline-limit has no effect without --timeline. Type: ronde run "
            "--timeline trace.json.gz --timeline-limit 32MiB ..."
        )
    return nullcontext({})


def _warn(request: RunRequest, environ: Mapping[str, str]) -> None:
    known = {**environ, **request.spec.env}
    ignored = ", ".join(request.horovod.ignored)
    note = f"these options have no effect here: {ignored}" if ignored else ""
    horovod = environments.warn_of_horovod(known, sys.path[1:])
    no_view = ""
    if request.options.top and not request.spec.has_live_view:
        no_view = "--top has no effect: standard output is not a terminal"
    warnings = require_tee(request.options), horovod, note, no_view
    for warning in filter(None, warnings):
        _report(warning)


def _launch(
    request: RunRequest,
    hosts: Sequence[Host],
    starter: AgentStarter,
    signal_fd: int,
    join_server: "JoinServer | None" = None,
) -> int:
    options = request.options
    hosts = limit_slots(hosts, options.nproc_per_node)
    spec = request.spec._replace(hosts=hosts)
    if options.dry_run:
        from ronde.render.job import plan_text

        plan = controller.dry_run(spec, starter, signal_fd, _report, request.preflight)
        print(plan_text(plan), end="")
        return 0
    make = partial(make_sinks, options, request.horovod.output_dir)
    return controller.launch(
        spec, starter, signal_fd, make, request.preflight, join_server
    ).exit_code


@contextmanager
def _limited(timeout_s: float | None) -> Generator[None]:
    """Send this process ``signals.TIMED_OUT`` after the time of ``--timeout``."""
    if timeout_s is None:
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    except InterruptedStartError as error:
        if error.number == TIMED_OUT:
            _report(f"--timeout {format_duration(timeout_s)} expired during the start")
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _launch_with_nodes(request: RunRequest, start: _Start) -> int:
    """Wait for all nodes, run the job, and send them its exit code."""
    from ronde.launch.hosts import join_server
    from ronde.launch.wire import tls

    options = start.options
    cure = "With --listen, type: ronde run --nodes 3 --listen 29400 ..."
    least, most = read_nodes(options.nodes or "none", "--nodes", cure)
    if most == 1:
        raise UsageError(f"--nodes must be at least 2, got {options.nodes!r}. {cure}")
    if not options.chdir:
        # Before anybody waits: this node runs ranks, too.
        path = {**start.environ, **request.spec.env}.get("PATH", "")
        resolve_program(request.spec.argv, path)
    host, port = tls.parse_endpoint(options.listen, "--listen")
    config = join_server.JoinConfig(
        address=tls.choose_address(host),
        port=port,
        token=tls.read_token(token_file(options, start.environ)),
        head=os.uname().nodename,
        num_nodes=least - 1,
        timeout_s=options.join_timeout,
        most=most - 1,
        cure=_CURE_OF_PODS if options.pod else "",
        num_each=options.nproc_per_node or 0,
        stays_open=bool(request.spec.max_restarts or request.spec.elastic),
    )
    head = Host(config.head, own_slots(options))
    server = join_server.wait_for_nodes(config, start.signal_fd, _report)
    return _launch_joined(request, start, [head, *server.choose(most - 1)], server)


def _launch_on_ray(request: RunRequest, start: _Start) -> int:
    from ronde.launch.hosts import ray_nodes

    options, spec = start.options, request.spec
    each = options.nproc_per_node
    plan = partial(
        ray_nodes.plan_bundles,
        num_ranks=None if spec.elastic else spec.num_ranks,
        each=options.slots if each is None else each,
        num_nodes=read_nodes(options.nodes) if options.nodes else None,
    )
    with ray_nodes.joined_ray_nodes(
        plan, options.join_timeout, start.signal_fd, _report
    ) as server:
        return _launch_joined(request, start, server.hosts, server)


def _launch_joined(
    request: RunRequest, start: _Start, hosts: Sequence[Host], server: "JoinServer"
) -> int:
    from ronde.launch.hosts import join_server
    from ronde.launch.wire import tls

    agents = join_server.JoinedAgents(start.agent, server, start.timeouts)
    code = EXIT_INTERNAL
    try:
        code = _launch(request, hosts, agents, start.signal_fd, server)
    except InterruptedStartError as error:
        code = interruption_code(error.number)
        raise
    except RondeError as error:
        code = exit_code_of(error)
        raise
    finally:
        server.close()
        tls.release(server.channels, code)
    return code


def _run_node(start: _Start) -> int:
    from ronde.launch.hosts import join_client
    from ronde.launch.wire import tls

    options = start.options
    if options.program:
        raise UsageError(
            f"--agent cannot be combined with a program, got {options.program[0]!r}. "
            "Give the program to ronde run --listen on the head node."
        )
    host, port = tls.parse_endpoint(options.agent, "--agent")
    if not host or not port:
        raise UsageError(
            f"--agent must be HEAD:PORT, got {options.agent!r}. "
            "Type: ronde run --agent node1:29400"
        )
    request = join_client.JoinRequest(
        host=host,
        port=port,
        token=tls.read_token(token_file(options, start.environ)),
        node_info=tls.NodeInfo(
            tls.host_name(os.uname().nodename),
            own_slots(options),
            options.pod.number if options.pod else -1,
        ),
        timeout_s=options.join_timeout,
    )
    try:
        joined = join_client.join_head(request, start.signal_fd, _report)
        where = tls.with_port(host, port)
        _report(f"{request.node_info.host} has joined {where}, and ends with it")
        lost = f"lost the head node at {where}; all ranks on this node were ended"
        ended = partial(_report, lost)
        return join_client.follow_head(joined, start.agent, start.signal_fd, ended)
    except InterruptedStartError as error:
        return 128 + error.number
