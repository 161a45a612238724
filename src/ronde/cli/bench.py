"""``ronde bench``: words -> ranks of its own, or this rank's part -> exit code."""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from ronde.bench.capacity import free_host_memory, largest_row, require_room
from ronde.bench.options import Exit, Options, UnsupportedError, help_text, parse
from ronde.bench.variables import read_variables
from ronde.cli.own_ranks import run_own_ranks
from ronde.cli.standard_output import give_up_output, is_unwritten
from ronde.errors import CollectiveError, RondeError, UsageError
from ronde.launch.program import absolute_path
from ronde.render.bench_plot import check_path
from ronde.world import Launcher, RankInfo, read_rank_info
from ronde.world.environment import require_algorithm, require_engine


def run(words: Sequence[str]) -> int:
    """Run one benchmark, or what else stands below ``ronde bench``.

    Args:
        words: What stands after ``bench``.

    Returns:
        The exit code, after nccl-tests.
    """
    try:
        return _dispatch(list(words))
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except RondeError as error:
        # One write: the launcher's console tells by it what several ranks say alike.
        sys.stderr.write(f"ronde: {error}\n")
        sys.stderr.flush()
        return exit_of(error)
    except Exception as error:  # noqa: BLE001  a process's outermost line
        if isinstance(error, OSError) and is_unwritten(error):
            return give_up_output(error)
        traceback.print_exc()
        # torch has no class of its own for all of CUDA's errors.
        return Exit.CUDA if "CUDA" in str(error) else Exit.INTERNAL


def exit_of(error: RondeError) -> Exit:
    """Return the exit code that says what kind of error it was."""
    for kind, code in (
        (UnsupportedError, Exit.UNSUPPORTED),
        (UsageError, Exit.USAGE),
        (CollectiveError, Exit.ENGINE),
    ):
        if isinstance(error, kind):
            return code
    return Exit.INTERNAL


def _dispatch(words: list[str]) -> int:
    match words:
        case ["train", *rest]:
            from ronde.cli.bench_train import run as run_train

            return run_train(rest)
        case ["read" | "compare", *_]:
            from ronde.cli.bench_read import run as run_read

            return run_read(words)
        case _:
            return _bench(words)


def _bench(words: list[str]) -> int:
    if not words or any(word in ("-h", "--help") for word in words):
        print(help_text(), end="")
        return Exit.OK
    options, variables = parse(words), read_variables()
    claim = read_rank_info()
    if not options.parent:
        _require_possible(options)
    if claim.launcher is Launcher.NONE and options.num_own_ranks > 1:
        return _start(words, options)
    if not options.parent:
        options = _join(options, claim)
    # Only here: this imports torch.
    from ronde.cli.bench_rank import run_rank

    return run_rank(options, variables, claim)


def _require_possible(options: Options) -> None:
    """Refuse what can be seen to fail before anything is started."""
    for name in options.engines.names:
        engine, _, algorithm = name.partition("/")
        require_engine(engine, "--compare" if options.is_compared else "--engine")
        require_algorithm(algorithm or options.engines.algorithm, "--algorithm")
    if options.is_compared and options.shown.json_path:
        raise UsageError(
            "-J must be left out with --compare: its form holds one engine. Give "
            "--json FILE for a record of each."
        )
    if options.shown.plot_path:
        check_path(Path(options.shown.plot_path))
    for name, path in (
        ("-J", options.shown.json_path),
        ("--json", options.shown.record_path),
    ):
        if path and not absolute_path(path).parent.is_dir():
            raise UsageError(
                f"{name} must be a file in a directory that exists, got {path}."
            )


def _start(words: Sequence[str], options: Options) -> int:
    """Start the ranks on this machine."""
    size = options.num_own_ranks
    if options.engines.device == "cpu":
        memory = free_host_memory()
        largest = largest_row(
            memory.free_bytes, size, is_checked=options.loop.checks > 0
        )
        require_room(options.sweep.min_bytes, largest, memory)
    parent = "terminal" if sys.stderr.isatty() else "pipe"
    extra_env = {"NCCL_CTA_POLICY": options.cta_policy} if options.cta_policy else {}
    return run_own_ranks(
        ["bench", *words, "--parent", parent],
        size,
        extra_env=extra_env,
        rank_env=_as_a_host if options.is_gpu_shared else None,
        is_mpi="mpi" in options.engines.names,
    )


def _as_a_host(rank: int) -> dict[str, str]:
    """Show a rank to NCCL as a host of its own: on one host it refuses a GPU twice."""
    return {"NCCL_HOSTID": f"ronde-{rank}", "NCCL_P2P_DISABLE": "1"}


def _join(options: Options, claim: RankInfo) -> Options:
    """Take part in the world that is here; refuse what only its launcher could do."""
    if claim.launcher is Launcher.NONE:
        return options
    asked = f"-t {options.num_threads} -g {options.num_gpus}"
    if options.num_own_ranks > 1 and not options.is_lenient:
        raise UnsupportedError(
            f"-t and -g must be 1 inside another launcher, got {asked} on rank "
            f"{claim.rank} of {claim.size} of {claim.launcher}: it has started the "
            "ranks. Leave them out, or give --lenient to ignore them."
        )
    if options.is_gpu_shared:
        raise UsageError(
            "--share-gpu must be given where ronde bench starts the ranks itself, got "
            f"a rank of {claim.launcher}. Set NCCL_HOSTID to another name for each "
            "rank instead, and NCCL_TESTS_DEVICE."
        )
    return options
