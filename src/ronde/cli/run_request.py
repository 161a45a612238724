"""What the words after ``ronde run`` ask for, as values."""

import argparse
from collections.abc import Mapping
from typing import NamedTuple

from ronde.cli.binding_options import read_placement
from ronde.cli.horovod_options import Asked, understand
from ronde.cli.rank_options import read_num_ranks
from ronde.cli.run_options import DEFAULT_GRACE
from ronde.cli.ssh_options import require_launcher
from ronde.errors import UsageError, WorldError
from ronde.launch.arranging import Preflight, Wish
from ronde.launch.controller import Restarts
from ronde.launch.directory import absolute_path
from ronde.launch.forwarded import read_assignments, select_forwarded
from ronde.launch.horovod_alias import alias_environment
from ronde.launch.plan import JobRequest
from ronde.world import Launcher, read_claim
from ronde.world.engines import require_algorithm, require_engine
from ronde.world.environment import (
    read_algorithm,
    read_engine,
    read_malloc_tuning,
)
from ronde.world.knobs import read_knobs


class RunRequest(NamedTuple):
    """A job as it is asked for.

    Attributes:
        options: As they were parsed.
        asked: What Horovod's options and those that name hosts ask for.
        wish: What is to run where.
        restarts: When it is started again.
    """

    options: argparse.Namespace
    asked: Asked
    wish: Wish
    restarts: Restarts


def read_request(
    options: argparse.Namespace,
    environ: Mapping[str, str],
    more_env: Mapping[str, str],
) -> RunRequest:
    """Return what is asked for.

    Args:
        options: From ``run_options.make_parser``.
        environ: This process's environment.
        more_env: Further variables for all ranks.

    Raises:
        UsageError: It cannot be.
    """
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
    env = _env(options, asked, environ)
    wish = Wish(
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
    return RunRequest(options, asked, wish, restarts)


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


def _env(
    options: argparse.Namespace, asked: Asked, environ: Mapping[str, str]
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
    read_knobs(known)
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
    """Read the duration that an option says.

    Raises:
        UsageError: It is none, or ``--timeout`` is 0.
    """
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
