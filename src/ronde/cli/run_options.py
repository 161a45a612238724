"""The options of ``ronde run``: words -> the job that they ask for.

Every run loads this; what listens, connects or places ranks is loaded by those that do.
"""

import argparse
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ronde.arguments import CommandParser, read_number, read_one_of, require_alone
from ronde.cli.help import RUN_HELP
from ronde.cli.horovodrun import (
    HorovodOptions,
    add_horovod_options,
    read_horovod_options,
)
from ronde.cli.hosts import HOST_DEFAULTS, read_slots, require_launcher
from ronde.errors import UsageError, WorldError
from ronde.launch.controller import JobSpec
from ronde.launch.environments import (
    alias_environment,
    read_assignments,
    select_forwarded,
)
from ronde.launch.hosts.host import SLOTS_CORES, SLOTS_GPUS, Host, take_each
from ronde.launch.output.files import JobFile, OutputSink
from ronde.launch.program import absolute_path
from ronde.render.console import Console
from ronde.render.lines import Tag, TagPlace, parse_tag
from ronde.render.ranks import RankChoice, parse_ranks
from ronde.units import parse_duration_s
from ronde.world import Launcher, read_rank_info
from ronde.world.environment import (
    read_engine,
    read_malloc_tuning,
    require_algorithm,
    require_engine,
)
from ronde.world.horovod_config import read_horovod_config

if TYPE_CHECKING:
    from ronde.launch.placement import PlacementRequest

_UNITS = {"gpu": SLOTS_GPUS, "cpu": SLOTS_CORES}
_TOKEN_VARIABLE = "RONDE_TOKEN_FILE"  # noqa: S105 - a name, and of a file at that
_HIDDEN = """\
  --local-ranks-filter RANKS
  -t, --tee WHAT
"""
_DEFAULTS = {
    **HOST_DEFAULTS,
    "num_proc": "auto",
    "nproc_per_node": "auto",
    "master_port": "0",
    "grace": "15s",
    "max_restarts": "0",
    "no_restart_codes": "93,64",
    "bind": "none",
    "bind_policy": "best-effort",
    "gpu_view": "all",
    "join_timeout": "5m",
}
# What other launchers call an option that means the same here.
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
_JOINED = "the nodes are those that join"
_NOT_REACHED = "the nodes join by themselves, and nothing is started there from here"
# What names or reaches other hosts, and why it has no effect where nodes join.
_OF_OTHER_HOSTS = {
    "hosts": _JOINED,
    "hostfile": _JOINED,
    "host_discovery_script": _JOINED,
    "standalone": "nodes that join make several hosts",
    "launcher": _NOT_REACHED,
    "ssh_args": _NOT_REACHED,
    "ssh-port": _NOT_REACHED,
    "ssh-identity-file": _NOT_REACHED,
    "python": "each node runs the Python that its own ronde run is started with",
    "sync": "a node that joins must have the directory already",
}


class RunParser(CommandParser):
    """Reads the words after ``ronde run``, also as other launchers spell them."""

    def _refuse_foreign(self, word: str) -> None:
        # Imported where it is needed: most words are right.
        from ronde.cli.other_launchers import advise

        if advice := advise(word):
            raise UsageError(advice)


def make_parser() -> RunParser:
    parser = RunParser("ronde run", RUN_HELP)
    parser.declare(_HIDDEN)
    add_horovod_options(parser)
    parser.set_defaults(**_DEFAULTS)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    for option, names in _OTHER_NAMES.items():
        parser.alias(option, *names)
    parser.add_underscore_twins()
    return parser


class RunRequest(NamedTuple):
    """A job as it is asked for."""

    options: argparse.Namespace
    horovod: HorovodOptions
    spec: JobSpec


def read_request(
    options: argparse.Namespace, environ: Mapping[str, str], more_env: Mapping[str, str]
) -> RunRequest:
    program = options.program[options.program[:1] == ["--"] :]
    if not program or not program[0]:
        raise UsageError(
            "program must be given, got none. Type: ronde run -n 2 python train.py"
        )
    horovod = read_horovod_options(options, environ)
    if horovod.output_dir and options.log_dir:
        raise UsageError("--output-filename must stand alone, got --log-dir too.")
    require_launcher(options.launcher)
    num_ranks, min_ranks = _num_ranks(options), horovod.min_ranks
    if min_ranks is not None and (num_ranks or min_ranks) < min_ranks:
        raise UsageError(
            f"--min-np must be at most -np, got {min_ranks} and -np {num_ranks}. "
            "Correct one of them."
        )
    if not options.nested:
        refuse_nesting(num_ranks, environ)
    env = _rank_env(options, horovod, environ)
    preflight = None
    if options.preflight:
        # Imported where it is needed: few jobs ask for it.
        from ronde.cli.check import make_preflight

        preflight = make_preflight(str(absolute_path(options.chdir or "")), env)
    port_cure = "Leave the option out for a free port."
    spec = JobSpec(
        argv=("-m", *program) if options.module else tuple(program),
        env={**env, **more_env},
        cwd=options.chdir or "",
        grace_s=15.0
        if options.grace == _DEFAULTS["grace"]
        else parse_duration_s(options.grace, "--grace"),
        master_port=read_number(
            "--master-port", options.master_port, port_cure, most=65535
        ),
        is_mpi=read_engine({**environ, **env}) == "mpi",
        hosts=horovod.hosts,
        num_ranks=num_ranks,
        min_ranks=min_ranks,
        interfaces=tuple(n for n in (options.interface or "").split(",") if n),
        placement=_placement(options),
        preflight=preflight,
        max_restarts=read_number(
            "--max-restarts", options.max_restarts, "Type: --max-restarts 3"
        ),
        no_restart_codes=_no_restart_codes(options.no_restart_codes),
        is_verbose=bool(options.verbose),
    )
    return RunRequest(options, horovod, spec)


def refuse_nesting(size: int | None, environ: Mapping[str, str]) -> None:
    """Refuse to start ranks inside a rank of a world that has other ranks."""
    try:
        info = read_rank_info(environ)
    except WorldError as error:
        raise UsageError(
            f"{error} Or give --nested to start a world of its own."
        ) from None
    is_alone = info.size == 1 and info.launcher is not Launcher.RONDE
    if info.launcher is Launcher.NONE or is_alone:
        return
    count = "n" if size is None else size
    product = "" if size is None else f" = {info.size * size}"
    raise UsageError(
        f"size must be the ranks of one launcher, but this is rank {info.rank} of "
        f"{info.size} of {info.launcher}: {info.size} * {count}{product} "
        f"processes, not {count}, in {info.size} worlds. Start "
        "ronde run outside of it, or give --nested for a world of its own in each rank."
    )


def _num_ranks(options: argparse.Namespace) -> int | None:
    text = options.num_proc
    if text == "auto":
        return None
    cure = "Type: ronde run -n 2 ..., or leave it out for one rank a slot"
    return read_number("-n", text, cure, least=1)


def read_num_each(options: argparse.Namespace) -> int | None:
    text = options.nproc_per_node
    if text == "auto":
        return None
    if text in _UNITS:
        return _UNITS[text]
    option = "--nproc-per-node"
    if not text.isdecimal() or not text.isascii():
        raise UsageError(
            f"{option} must be auto, gpu, cpu or a whole number of at least 1, got "
            f"{text!r}. Type: ronde run --nproc-per-node 2 ..."
        )
    from ronde.launch.hosts.sources import MAX_SLOTS, parse_number

    return parse_number(text, "ranks", option, lowest=1, highest=MAX_SLOTS)


def _no_restart_codes(text: str) -> frozenset[int]:
    codes = [code for word in text.split(",") if (code := word.strip())]
    wrong = [code for code in codes if not code.isdecimal()]
    if wrong:
        raise UsageError(
            "--no-restart-codes must be exit codes such as 93,64, got "
            f"{wrong[0]!r}. Correct it."
        )
    return frozenset(map(int, codes))


def _rank_env(
    options: argparse.Namespace, horovod: HorovodOptions, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables for all ranks; refuse meaningless ones."""
    env = select_forwarded(environ) | horovod.env
    env |= read_assignments(options.env, environ)
    if engine := options.engine or horovod.engine:
        env["RONDE_ENGINE"] = require_engine(engine, "--engine")
    if options.algorithm:
        env["RONDE_ALGORITHM"] = require_algorithm(options.algorithm, "--algorithm")
    if options.no_malloc_tuning:
        env["RONDE_MALLOC_TUNING"] = "0"
    known = {**environ, **env}
    env |= alias_environment(known, is_wanted=options.horovod_alias)
    read_engine(known)
    require_algorithm(known.get("RONDE_ALGORITHM", ""), "RONDE_ALGORITHM")
    read_horovod_config(known)
    read_malloc_tuning(known)
    return env


def _placement(options: argparse.Namespace) -> "PlacementRequest | None":
    relaxed = _DEFAULTS["bind_policy"]
    asked = (options.bind, options.gpu_view, options.bind_policy, options.dry_run)
    if asked == ("none", "all", relaxed, False):
        return None
    # Imported where they are needed: a job that is not bound must start at once.
    from ronde.launch.placement import BindMode, GpuView, PlacementRequest
    from ronde.topology.placement.policies import Policy

    policies = [policy for policy in Policy if policy is not Policy.NONE]
    policy = read_one_of("--bind-policy", options.bind_policy, policies)
    if options.bind == "none" and policy != relaxed:
        raise UsageError(
            f"--bind-policy {policy} must come with --bind core, numa or auto, got "
            f"--bind none. Type: --bind numa --bind-policy {policy}"
        )
    mode = read_one_of("--bind", options.bind, list(BindMode))
    view = read_one_of("--gpu-view", options.gpu_view, list(GpuView))
    return PlacementRequest(BindMode(mode), GpuView(view), Policy(policy))


def require_listen_or_agent(
    options: argparse.Namespace, given: Mapping[str, str]
) -> None:
    """Refuse options that have no effect where nodes join, or where none do."""
    how = "--listen" if options.listen else "--agent" if options.agent else ""
    if options.listen and options.agent:
        raise UsageError("--agent must stand without --listen, got both. Drop one.")
    for option, name in given.items():
        if not how and option in _OF_JOINING:
            raise UsageError(
                f"{name} must come with --listen or --agent, got neither. Type: ronde "
                "run --nodes 3 --listen 29400 ..."
            )
        if how and option in _OF_OTHER_HOSTS:
            raise UsageError(
                f"{name} must stand without {how}, got both: "
                f"{_OF_OTHER_HOSTS[option]}. Drop one."
            )
        if options.agent and option not in _OF_A_NODE:
            raise UsageError(
                f"{name} must be given to the head alone, got it with --agent. Drop it "
                "here, and give it to ronde run --listen."
            )


def own_slots(options: argparse.Namespace) -> int:
    node = Host("this node", read_slots(options), named_at="--slots")
    return take_each([node], read_num_each(options))[0].slots


def token_file(options: argparse.Namespace, environ: Mapping[str, str]) -> str:
    path = options.token_file or environ.get(_TOKEN_VARIABLE, "")
    if not path:
        raise UsageError(
            "--token-file must name a file with the secret that all nodes share, got "
            "none. Make one: (umask 077; openssl rand -hex 32 > token)"
        )
    return path


def make_sink(
    options: argparse.Namespace, output_dir: str = ""
) -> tuple[OutputSink, list[JobFile]]:
    """Return what shows the job, and what writes files of it."""
    from ronde.launch.output.files import ErrorFile, JobRecords, RankLogs

    log_dir = output_dir or options.log_dir or ""
    log_dir = str(absolute_path(log_dir)) if log_dir else ""
    sink = Console(1, 2, tag=_tag(options), only=_only(options), log_dir=log_dir)
    files: list[JobFile] = []
    if options.record:
        files.append(JobRecords(sink, options.record))
    if log_dir:
        files.append(RankLogs(sink, log_dir))
    if options.error_file:
        files.append(ErrorFile(sink, options.error_file))
    if output_dir:
        from ronde.cli.horovodrun import LinkedOutputs

        files.append(LinkedOutputs(sink, output_dir))
    return sink, files


def require_tee(options: argparse.Namespace) -> str:
    """Return a warning about torchrun's ``--tee``, which is ``--log-dir`` here."""
    if options.tee is None:
        return ""
    if not re.fullmatch(r"[0-3]|[0-9]+:[0-3](,[0-9]+:[0-3])*", options.tee):
        raise UsageError(
            "--tee must be 0, 1, 2, 3 or such per local rank, as 0:3,1:1, got "
            f"{options.tee!r}. Type --log-dir DIR in its place; a limit on time is "
            "--timeout TIME."
        )
    return "" if options.log_dir else "--tee writes no files without --log-dir DIR."


def _tag(options: argparse.Namespace) -> Tag:
    require_alone(options, "--no-prefix", "--tag")
    if options.no_prefix:
        return Tag(TagPlace.NONE)
    return Tag() if options.tag is None else parse_tag(options.tag)


def _only(options: argparse.Namespace) -> RankChoice | None:
    require_alone(options, "--only", "--local-ranks-filter")
    if (local := options.local_ranks_filter) is not None:
        return parse_ranks(local, "--local-ranks-filter", is_local=True)
    return None if options.only is None else parse_ranks(options.only, "--only")
