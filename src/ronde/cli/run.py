"""``ronde run``: words -> job -> exit code."""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

from ronde.cli.horovod_options import (
    Asked,
    add_horovod_options,
    understand,
)
from ronde.errors import UsageError, WorldError
from ronde.launch.arranging import Wish
from ronde.launch.controller import Restarts
from ronde.launch.environments import alias_environment
from ronde.launch.forwarded import read_assignments, select_forwarded
from ronde.launch.hiring import Hiring
from ronde.launch.inherited import own_environment
from ronde.launch.launching import launch
from ronde.launch.plan import JobRequest
from ronde.launch.spawners.base import Spawner
from ronde.render.console import Console
from ronde.world import Launcher, read_claim
from ronde.world.engines import (
    ALGORITHMS,
    ENGINES,
    require_algorithm,
    require_engine,
)
from ronde.world.environment import read_algorithm, read_engine
from ronde.world.knobs import read_knobs

_DEFAULT_GRACE = "15s"
_NO_RESTART_CODES = "93"

_EPILOG = """\
A rank finds its place in RANK, WORLD_SIZE, LOCAL_RANK and so on (torchrun's names).
The first rank to fail ends the job: the others get SIGTERM, and after the grace all
that is left of the job is killed, whatever session it is in.

exit code: 0 when all ranks ended with 0, else the code of the rank that failed first
(128 plus the number of a signal); 130 after Ctrl-C, 143 after SIGTERM; 64 when the
job could not start as asked; 70 when the launcher itself failed.

horovodrun's options are understood too; a script that imports horovod finds ronde,
unless Horovod itself is installed: see docs/how-to/horovod-scripts.md.

examples:
  ronde run train.py --epochs 3
  ronde run -n 4 --log-dir logs -- python -m mypackage.train
"""


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print its usage and exit with 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. Type: ronde run --help")


def help_text() -> str:
    """Return what ``ronde run --help`` says."""
    return _parser().format_help()


def run(words: Sequence[str], agent: "subprocess.Popen[bytes]", signal_fd: int) -> int:
    """Run a program on every slot; return the exit code.

    Args:
        words: What stands after ``run``.
        agent: Already started, for it takes as long to start as this module.
        signal_fd: From ``launch.signals.caught_signals``.

    Raises:
        UsageError: The words ask for something that cannot be; nothing was started.
        LaunchError: The launcher itself failed.
    """
    options = _parser().parse_args(words)
    environ = own_environment()
    program = _program(options.program)
    asked = understand(options, environ)
    if asked.output_dir and options.log_dir:
        raise UsageError("--output-filename must stand alone, got --log-dir too.")
    num_ranks = _num_ranks(options.num_proc)
    restarts = _restarts(options)
    env = _env(options, asked, environ)
    if not options.nested:
        refuse_nesting(num_ranks, environ)
    with _recorded(options) as timeline_env:
        wish = Wish(
            job=JobRequest(
                argv=tuple(program),
                env=env | timeline_env,
                rank_env={},
                cwd=options.chdir,
                grace_s=_grace_s(options.grace),
                master_port=_port(options.master_port),
                is_mpi=read_engine(environ | env) == "mpi",
                max_restarts=restarts.limit,
            ),
            hosts=asked.hosts,
            num_ranks=num_ranks,
        )
        _tell_ignored(asked)
        console = Console(1, 2)
        hiring = Hiring(
            agent,
            make_spawner=lambda: _spawner(options, asked),
            python=sys.executable,
        )
        name = time.strftime("%Y%m%d-%H%M%S")
        return launch(
            wish,
            console,
            hiring,
            signal_fd,
            name=name,
            restarts=restarts,
        ).exit_code


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


def _env(
    options: argparse.Namespace, asked: Asked, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables for all ranks, and see that they can be understood."""
    env = select_forwarded(environ) | asked.env
    env |= read_assignments(options.env, environ) | _engine_env(options, asked.engine)
    env |= alias_environment(environ | env, is_wanted=not options.no_horovod_alias)
    read_engine(environ | env)
    read_algorithm(environ | env)
    read_knobs(environ | env)
    return env


def _spawner(options: argparse.Namespace, asked: Asked) -> Spawner:
    from ronde.launch.spawners.ssh import SshSpawner

    return SshSpawner((*shlex.split(options.ssh_args), *asked.ssh_args))


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


def _tell_ignored(asked: Asked) -> None:
    if asked.ignored:
        names = ", ".join(asked.ignored)
        print(f"ronde: these options change nothing here: {names}", file=sys.stderr)


def _parser() -> _Parser:
    parser = _Parser(
        prog="ronde run",
        usage="ronde run [-n N] [options] [--] program [arguments]",
        description="Start a program once for every slot of this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_options(parser)
    _add_engine_options(parser)
    _add_timeline_options(parser)
    add_horovod_options(parser)
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        *("-n", "-np", "--num-proc", "--nproc-per-node"),
        dest="num_proc",
        metavar="N",
        default="auto",
        help="ranks to start; auto (the default) is one a GPU, else one a core",
    )
    add(
        "-x",
        dest="env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable for all ranks, or pass it on whatever its name is",
    )
    add("--ssh-args", default="", metavar="ARGS", help="arguments for ssh")
    add("--chdir", default="", metavar="DIR", help="directory the ranks start in")
    add(
        "--log-dir",
        default="",
        metavar="DIR",
        help="also write each rank's output, byte for byte, to files below DIR",
    )
    add(
        "--grace",
        default=_DEFAULT_GRACE,
        metavar="TIME",
        help="between SIGTERM and SIGKILL, as 500ms, 5s or 2m (default: 15s)",
    )
    add(
        "--max-restarts",
        default="0",
        metavar="R",
        help="start all ranks again, up to R times, when one fails or a host is lost",
    )
    add(
        "--no-restart-codes",
        default=_NO_RESTART_CODES,
        metavar="CODES",
        help="exit codes after which they are not, as 93,64 (default: 93)",
    )
    add("--no-prefix", action="store_true", help="do not put [rank] before each line")
    add(
        "--master-port",
        default="0",
        metavar="PORT",
        help="port the ranks meet at (default: a free one)",
    )
    add(
        "--nested",
        action="store_true",
        help="start a world of its own inside a rank of another",
    )
    add(
        "--no-horovod-alias",
        action="store_true",
        help="do not let ronde stand in for Horovod where that is not installed",
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--engine",
        default="",
        metavar="NAME",
        help=f"what moves the tensors: {', '.join(ENGINES)} (default: auto)",
    )
    add(
        "--algorithm",
        default="",
        metavar="NAME",
        help=f"schedule of --engine scheduled: {', '.join(ALGORITHMS)}",
    )


def _add_timeline_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--timeline",
        default="",
        metavar="FILE",
        help="write what all ranks did and who waited for whom to FILE, a trace for "
        "Perfetto and ronde trace; packed where it ends in .gz",
    )
    add(
        "--timeline-limit",
        default="",
        metavar="SIZE",
        help="of that file; what is oldest is left out (default: 32MiB)",
    )


def _program(words: list[str]) -> list[str]:
    program = words[1:] if words[:1] == ["--"] else words
    if not program or not program[0]:
        raise UsageError(
            "program must be given, got none. Type: ronde run -n 2 python train.py"
        )
    return program


def _num_ranks(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or not text.isascii() or int(text) < 1:
        raise UsageError(
            f"-n must be auto or a whole number of at least 1, got {text!r}. "
            "Type: ronde run -n 2 ..."
        )
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not text.isascii() or int(text) > 65535:
        raise UsageError(
            f"--master-port must be in 1..65535, got {text!r}. "
            "Leave the option out for a free port."
        )
    return int(text)


def _grace_s(text: str) -> float:
    if text == _DEFAULT_GRACE:
        return 15.0
    from ronde.units import parse_duration_s

    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise UsageError(f"--grace: {error}") from None


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
        environ: This process's environment.

    Raises:
        UsageError: This process is such a rank, or its environment is half a rank's.
    """
    try:
        claim = read_claim(environ)
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
