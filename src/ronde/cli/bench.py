"""``ronde bench``: words -> ranks of its own, or this rank's part -> exit code."""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from ronde.bench.catalog import free_host_memory, largest_row, require_room
from ronde.bench.options import HELP, Exit, Options, UnsupportedError, parse
from ronde.bench.variables import read_variables
from ronde.cli.exits import give_up_output, is_unwritten
from ronde.cli.self_launch import run_self
from ronde.errors import CollectiveError, RondeError, UsageError
from ronde.launch.program import absolute_path
from ronde.render.plot import check_path
from ronde.world import Launcher, RankInfo, read_rank_info
from ronde.world.environment import require_algorithm, require_engine

_EXITS = (
    (UnsupportedError, Exit.UNSUPPORTED),
    (UsageError, Exit.USAGE),
    (CollectiveError, Exit.ENGINE),
)


def run(words: Sequence[str]) -> int:
    try:
        return _dispatch(list(words))
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except RondeError as error:
        # One write: the launcher's console shows once what several ranks write alike.
        sys.stderr.write(f"ronde: {error}\n")
        sys.stderr.flush()
        codes = [code for kind, code in _EXITS if isinstance(error, kind)]
        return codes[0] if codes else Exit.INTERNAL
    except Exception as error:  # noqa: BLE001  a process's outermost line
        if isinstance(error, OSError) and is_unwritten(error):
            return give_up_output(error)
        traceback.print_exc()
        # torch has no class of its own for all of CUDA's errors.
        return Exit.CUDA if "CUDA" in str(error) else Exit.INTERNAL


def _dispatch(words: list[str]) -> int:
    match words:
        case ["train", *rest]:
            from ronde.cli.bench_train import run_train

            return run_train(rest)
        case ["read", *rest]:
            from ronde.cli.bench_read import run_read

            return run_read(rest)
        case ["compare", *rest]:
            from ronde.cli.bench_read import run_compare

            return run_compare(rest)
        case _:
            return _bench(words)


def _bench(words: list[str]) -> int:
    if not words or "-h" in words or "--help" in words:
        print(HELP, end="")
        return Exit.OK
    options, variables, info = parse(words), read_variables(), read_rank_info()
    if not options.parent:
        _require_possible(options)
    if info.launcher is Launcher.NONE and options.num_self_launched > 1:
        return _start(words, options)
    if not options.parent and info.launcher is not Launcher.NONE:
        _require_joinable(options, info)
    # Only here: this imports torch.
    from ronde.cli.bench_rank import run_rank

    return run_rank(options, variables, info)


def _require_possible(options: Options) -> None:
    for name in options.engines.names:
        engine, _, algorithm = name.partition("/")
        require_engine(engine, "--compare" if options.is_compared else "--engine")
        require_algorithm(algorithm or options.engines.algorithm, "--algorithm")
    shown = options.shown
    if options.is_compared and shown.json_path:
        raise UsageError(
            "-J must be left out with --compare: its form holds one engine. Give "
            "--json FILE for a record of each."
        )
    if shown.plot_path:
        check_path(Path(shown.plot_path))
    for name, path in (("-J", shown.json_path), ("--json", shown.record_path)):
        if path and not absolute_path(path).parent.is_dir():
            raise UsageError(
                f"{name} must be a file in a directory that exists, got {path}."
            )


def _start(words: Sequence[str], options: Options) -> int:
    size = options.num_self_launched
    if options.engines.device == "cpu":
        memory, is_checked = free_host_memory(), options.loop.checks > 0
        largest = largest_row(memory.free_bytes, size, is_checked=is_checked)
        require_room(options.sweep.min_bytes, largest, memory)
    # To NCCL each rank is a host of its own: on one host it refuses a GPU twice.
    rank_env = {
        rank: {"NCCL_HOSTID": f"ronde-{rank}", "NCCL_P2P_DISABLE": "1"}
        for rank in range(size if options.is_gpu_shared else 0)
    }
    return run_self(
        ["bench", *words, "--parent", "terminal" if sys.stderr.isatty() else "pipe"],
        size,
        env={"NCCL_CTA_POLICY": options.cta_policy} if options.cta_policy else None,
        rank_env=rank_env,
        is_mpi="mpi" in options.engines.names,
    )


def _require_joinable(options: Options, info: RankInfo) -> None:
    if options.num_self_launched > 1 and not options.is_lenient:
        raise UnsupportedError(
            "-t and -g must be 1 inside another launcher, got "
            f"-t {options.num_threads} -g {options.num_gpus} on rank {info.rank} of "
            f"{info.size} of {info.launcher}: it has started the ranks. Leave them "
            "out, or give --lenient to ignore them."
        )
    if options.is_gpu_shared:
        raise UsageError(
            "--share-gpu must be given where ronde bench starts the ranks itself, got "
            f"a rank of {info.launcher}. Set NCCL_HOSTID to another name for each "
            "rank instead, and NCCL_TESTS_DEVICE."
        )
