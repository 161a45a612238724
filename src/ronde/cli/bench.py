"""``ronde bench`` and ``ronde bench train``: command line, and start of the ranks."""

import argparse
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from ronde.arguments import CommandParser
from ronde.bench.catalog import largest_row, require_room
from ronde.bench.options import HELP, Exit, Options, UnsupportedError, parse
from ronde.bench.training.catalogue import MODELS
from ronde.bench.training.outcome import TrainOptions, find_model
from ronde.bench.variables import read_variables
from ronde.cli.exits import give_up_output, is_unwritten
from ronde.errors import CollectiveError, FrameworkError, RondeError, UsageError
from ronde.launch.bootstrap import start_local_agent
from ronde.launch.environments import own_environment
from ronde.launch.hosts.node import AgentStarter
from ronde.launch.job.controller import launch
from ronde.launch.job.plan import JobSpec
from ronde.launch.program import absolute_path
from ronde.launch.signals import STOPPING, caught_signals
from ronde.memory import available_memory, import_torch
from ronde.render.console import SelfLaunchConsole
from ronde.topology.machine import count_cores, count_slots
from ronde.world import Launcher, RankInfo, read_rank_info
from ronde.world.environment import require_algorithm, require_engine

_EXITS = (
    (UnsupportedError, Exit.UNSUPPORTED),
    (UsageError, Exit.USAGE),
    (FrameworkError, Exit.USAGE),
    (CollectiveError, Exit.ENGINE),
)


def run(words: Sequence[str]) -> int:
    try:
        return _dispatch(list(words))
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except RondeError as error:
        # One write: the launcher's console merges equal lines of several ranks.
        sys.stderr.write(f"ronde: {error}\n")
        sys.stderr.flush()
        codes = [code for kind, code in _EXITS if isinstance(error, kind)]
        return codes[0] if codes else Exit.INTERNAL
    except Exception as error:  # noqa: BLE001  a process's outermost line
        if isinstance(error, OSError) and is_unwritten(error):
            return give_up_output(error)
        traceback.print_exc()
        # torch has no exception class for all errors of CUDA.
        return Exit.CUDA if "CUDA" in str(error) else Exit.INTERNAL


def _dispatch(words: list[str]) -> int:
    match words:
        case ["train", *rest]:
            return run_train(rest)
        case ["serve", *rest]:
            from ronde.cli.bench_serve import run_serve

            return run_serve(rest)
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
    import_torch()
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
            "-J and --compare cannot be used together, as nccl-tests' JSON holds only "
            "one engine. Give --json FILE for a record of each engine."
        )
    for name, path in (("-J", shown.json_path), ("--json", shown.record_path)):
        if path and not absolute_path(path).parent.is_dir():
            raise UsageError(
                f"{name} must be a file in a directory that exists, got {path}."
            )


def _start(words: Sequence[str], options: Options) -> int:
    size = options.num_self_launched
    if "mpi" in options.engines.names:
        _refuse_mpi()
    if options.engines.device == "cpu":
        memory, is_checked = available_memory(), options.loop.checks > 0
        largest = largest_row(memory.num_bytes, size, is_checked=is_checked)
        require_room(options.sweep.min_bytes, largest, memory)
    # A host name per rank, as NCCL refuses two ranks of one host on one GPU.
    rank_env = {
        rank: {"NCCL_HOSTID": f"ronde-{rank}", "NCCL_P2P_DISABLE": "1"}
        for rank in range(size if options.is_gpu_shared else 0)
    }
    return run_self(
        ["bench", *words, "--parent", "terminal" if sys.stderr.isatty() else "pipe"],
        size,
        env={"NCCL_CTA_POLICY": options.cta_policy} if options.cta_policy else None,
        rank_env=rank_env,
    )


def _refuse_mpi() -> NoReturn:
    raise UsageError(
        "ronde bench cannot start ranks for the mpi engine; only mpirun and srun can. "
        "Type: mpirun -n 2 ronde bench ..."
    )


def _require_joinable(options: Options, info: RankInfo) -> None:
    if options.num_self_launched > 1 and not options.is_lenient:
        raise UnsupportedError(
            f"-t {options.num_threads} -g {options.num_gpus} cannot be used here: "
            f"{info.launcher} has already started {info.size} ranks, and this is rank "
            f"{info.rank}. Leave -t and -g out, or give --lenient to ignore them."
        )
    if options.is_gpu_shared:
        raise UsageError(
            "--share-gpu only works if ronde bench starts the ranks, but "
            f"{info.launcher} has started this one. Instead set NCCL_HOSTID to a "
            "different name for each rank, and set NCCL_TESTS_DEVICE."
        )


_GRACE_S = 10.0


def run_self(
    words: Sequence[str],
    size: int,
    *,
    env: Mapping[str, str] | None = None,
    rank_env: Mapping[int, Mapping[str, str]] | None = None,
) -> int:
    """Run ``python -m ronde WORDS`` once per rank on this machine.

    Ctrl-C and SIGTERM go to all ranks, which have 10 s to exit. Returns the exit code
    of the rank that failed first, else 0; after Ctrl-C, the highest exit code.
    """
    with caught_signals() as signal_fd, start_local_agent() as agent:
        spec = JobSpec(
            argv=(sys.executable, "-m", "ronde", *words),
            env=dict(env or {}),
            rank_env=dict(rank_env or {}),
            grace_s=_GRACE_S,
            num_ranks=size,
        )
        starter = AgentStarter(agent)
        result = launch(spec, starter, signal_fd, lambda: (SelfLaunchConsole(), ()))
    statuses = [end.status for end in result.ended]
    is_stopped = result.interrupted_by in STOPPING and min(statuses, default=-1) >= 0
    return max(statuses) if is_stopped else result.exit_code


_HELP = """\
usage: ronde bench train --model NAME [-n N] [options]

Measure training steps of a model.

options:
  --model NAME          one of the models below
  --framework {torch,tensorflow,keras,jax}
                        whose training is measured (default: torch); Keras runs
                        on the backend that KERAS_BACKEND names
  --reduce {all_reduce,parameter_server}
                        measure a parameter server, too: rank 0 gathers, adds
                        and broadcasts all gradients (default: all_reduce)
  --peer                measure the framework's own strategy, too
  --batch N             samples per step and rank (default: the model's)
  --dtype {float32,bfloat16}
                        type of the forward pass (default: float32)
  --optimizer {sgd,adam}
                        (default: sgd)
  --compression {none,fp16,bf16}
                        type in which gradients are sent (default: none)
  --input {prepared,gathered}
                        batches made beforehand, or gathered from samples at
                        each step (default: prepared)
  --channels-last       use the channels-last memory format for images
  -n, -np, --num-proc N
                        ranks to start (default: one per GPU, else one per core)
  --device {auto,cpu,cuda}
                        (default: auto)
  --engine NAME         engine, as for ronde run
  --rounds N            rounds (default: 5)
  --steps N             steps per round (default: as many as take about 0.4 s)
  --warmup N            untimed steps before the first round (default: 3)
  --json FILE           append a record to FILE
  -h, --help            show this help and exit

Three runs take turns, a few steps each, over several rounds: 1 rank, all ranks, and all
ranks without communication, the ceiling for all ranks. The data is synthetic. "exposed"
is the communication that the backward pass does not hide: its time with communication
minus its time without. Other frameworks than torch compile the step; its parts are
differences between steps that do more and more.

Without a launcher the command starts its own ranks on this machine; under ronde run,
torchrun or mpirun it joins theirs.

exit code: 0; 6 if it cannot be measured as asked; 7 if the ranks' weights differ at the
end.

models:
"""


def run_train(words: Sequence[str]) -> int:
    parser = CommandParser("ronde bench train", _HELP, types={"N": int, "FILE": Path})
    parser.declare("  --progress")
    given = parser.read(words)
    if given is None:
        from ronde.render.bench_tables import draw_models

        for line in draw_models(list(MODELS.values())).splitlines():
            print(f"  {line}")
        return Exit.OK
    if not given.model:
        parser.error("--model is required")
    options, path = _options(given), given.json
    if path is not None and (path.is_dir() or not absolute_path(path).parent.is_dir()):
        raise UsageError(
            f"--json must be a file in a directory that exists, got {path}. "
            f"Type: mkdir -p {path.parent}"
        )
    info = read_rank_info()
    if info.launcher is Launcher.NONE:
        shown = ["--progress"] if sys.stderr.isatty() else []
        own_words = ["bench", "train", *words, *shown]
        engine = options.engine or info.engine
        size = given.num_proc
        if size is None:
            is_cpu = given.device == "cpu"
            size = count_cores() if is_cpu else count_slots(own_environment())
        if size < 1:
            raise UsageError(f"-n must be at least 1, got {size}. Type: -n 2")
        if engine == "mpi":
            _refuse_mpi()
        return run_self(own_words, size, env=_framework_environment(options, size))
    if given.num_proc not in (None, info.size):
        raise UsageError(
            f"-n must be {info.size}, the number of ranks that {info.launcher} has "
            f"started, got {given.num_proc}. Leave -n out."
        )
    return _run_rank(options, info, given)


def _framework_environment(options: TrainOptions, size: int) -> dict[str, str]:
    """Return the variables of the framework's ranks.

    Raises:
        FrameworkError: A module is missing.
    """
    backend = options.framework
    if backend == "torch":
        return {}
    environment = own_environment()
    if backend == "keras":
        backend = environment.get("KERAS_BACKEND", "tensorflow")
        if backend not in ("tensorflow", "jax", "torch"):
            raise UsageError(
                f"KERAS_BACKEND must be tensorflow, jax or torch, got {backend!r}. "
                "Type: export KERAS_BACKEND=tensorflow"
            )
    optimizers = ["optax"] if options.framework == "jax" else []
    for module in (options.framework, backend, "keras", *optimizers):
        if find_spec(module) is None:
            from ronde.session.frameworks import import_framework

            import_framework(module)
    defaults = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "NPROC": str(max(1, count_cores() // size)),  # the threads of jaxlib
    }
    kept = {name: environment.get(name, value) for name, value in defaults.items()}
    return kept | {"KERAS_BACKEND": backend}


def _run_rank(options: TrainOptions, info: RankInfo, given: argparse.Namespace) -> int:
    import ronde.torch as hvd
    from ronde.bench.training.measurement import measure
    from ronde.bench.training.outcome import KIND, record_values
    from ronde.records import Record, append_record
    from ronde.render.bench_tables import draw_training

    is_root = info.rank == 0
    is_shown = is_root and (given.progress or sys.stderr.isatty())
    hvd.init(engine=options.engine)
    try:
        outcome = measure(options, _show_progress if is_shown else None)
    finally:
        hvd.shutdown()
    if is_root:
        print(draw_training(outcome), end="", flush=True)
        if given.json is not None:
            append_record(given.json, Record(KIND, record_values(outcome)))
        if not outcome.is_in_step:
            print(
                "ronde: the ranks' weights differ after training. Check the sums of "
                f"engine {outcome.setting.engine}: ronde bench all_reduce",
                file=sys.stderr,
            )
    return Exit.OK if outcome.is_in_step else Exit.FAILED


def _show_progress(num_done: int, num_blocks: int) -> None:
    from ronde.render.bench import bar

    text = f"\r{bar(num_done, num_blocks)} blocks of steps"
    if num_done == num_blocks:
        # The launcher's console handles no escape sequences.
        text = "\r\x1b[K" if sys.stderr.isatty() else "\r \r"
    print(text, end="", file=sys.stderr, flush=True)


def _options(given: argparse.Namespace) -> TrainOptions:
    model = find_model(given.model)
    named: dict[str, Any] = {"batch": model.batch}
    names = "batch rounds steps warmup dtype device optimizer compression input"
    names += " framework reduce"
    for name in names.split():
        value = getattr(given, name)
        named |= {} if value is None else {name: value}
    return TrainOptions(
        model=model,
        engine=require_engine(given.engine, "--engine") if given.engine else "",
        is_channels_last=given.channels_last,
        is_peered=given.peer,
        **named,
    )
