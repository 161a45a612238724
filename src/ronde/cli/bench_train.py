"""``ronde bench train``: words -> training steps, measured -> a table and a record."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ronde.arguments import Parser
from ronde.bench.options import Exit
from ronde.bench.training.catalogue import MODELS
from ronde.bench.training.outcome import (
    DeviceKind,
    Dtype,
    InputKind,
    OptimizerKind,
    TrainOptions,
    WireFormat,
    find_model,
)
from ronde.cli.own_ranks import run_own_ranks
from ronde.errors import UsageError
from ronde.launch.environments import own_environment
from ronde.launch.placement.place import count_cores, count_slots
from ronde.launch.program import absolute_path
from ronde.world import Launcher, RankInfo, read_rank_info
from ronde.world.environment import ENGINES, require_engine

_BAR = 24

_EPILOG = """\
Three runs take turns, a few steps each, over several rounds: 1 rank, all ranks, and all
ranks without communication, which is the ceiling of what reducing gradients could give.
Data is synthetic. "exposed" is the communication that backward does not hide: what
backward takes longer with communication than without.

Without a launcher the command starts its own ranks on this machine; under ronde run,
torchrun or mpirun it joins theirs.

exit code: 0; 6 for what cannot be measured as asked; 7 when the ranks' weights differ
at the end.

models:
"""


def run(words: Sequence[str]) -> int:
    """Measure the training steps of one model; return the exit code.

    Args:
        words: What stands after ``bench train``.

    Raises:
        UsageError: The words ask for something that cannot be; exit code 6.
        CollectiveError: A rank was lost.
        LaunchError: The launcher itself failed.
    """
    if any(word in ("-h", "--help") for word in words):
        print(_help(), end="")
        return Exit.OK
    given = _parser().parse_args(words)
    options = _options(given)
    _require_writable(given.json)
    claim = read_rank_info()
    if claim.launcher is Launcher.NONE:
        own_words = ["bench", "train", *words]
        if sys.stderr.isatty():
            own_words.append("--progress")
        engine = options.engine or claim.engine
        return run_own_ranks(own_words, _size(given), is_mpi=engine == "mpi")
    _require_size(given.num_proc, claim)
    return _be_rank(options, claim, given)


def _be_rank(options: TrainOptions, claim: RankInfo, given: argparse.Namespace) -> int:
    import ronde.torch as hvd
    from ronde.bench.training.measurement import measure
    from ronde.bench.training.outcome import KIND, record_values
    from ronde.records import Record, append_record
    from ronde.render.bench_train import draw_table

    is_root = claim.rank == 0
    is_shown = is_root and (given.progress or sys.stderr.isatty())
    hvd.init(engine=options.engine)
    try:
        outcome = measure(options, _show_progress if is_shown else _ignore_progress)
    finally:
        hvd.shutdown()
    if is_root:
        print(draw_table(outcome), end="", flush=True)
        if given.json is not None:
            append_record(given.json, Record(KIND, record_values(outcome)))
        if not outcome.is_in_step:
            print(
                "ronde: weights must be equal on all ranks after training, and are "
                f"not. Compare the sums of engine {outcome.setting.engine}: "
                "ronde bench all_reduce",
                file=sys.stderr,
            )
    return Exit.OK if outcome.is_in_step else Exit.FAILED


def _show_progress(num_done: int, num_blocks: int) -> None:
    is_over = num_done == num_blocks
    filled = _BAR * num_done // num_blocks
    bar = "#" * filled + "-" * (_BAR - filled)
    text = f"\r[{bar}] {num_done}/{num_blocks} blocks of steps"
    if is_over and sys.stderr.isatty():
        text = "\r\x1b[K"
    elif is_over:
        text = "\r \r"  # the launcher's console knows no escapes
    sys.stderr.write(text)
    sys.stderr.flush()


def _ignore_progress(_num_done: int, _num_blocks: int) -> None:
    pass


def _help() -> str:
    from ronde.render.bench_train import draw_models

    models = draw_models(list(MODELS.values()))
    indented = "".join(f"  {line}\n" for line in models.splitlines())
    return _parser().format_help() + indented


def _parser() -> Parser:
    parser = Parser(
        "ronde bench train",
        usage="ronde bench train --model NAME [-n N] [options]",
        description="Measure training steps of a well-known model.",
        epilog=_EPILOG,
    )
    _add_subject(parser)
    _add_measurement(parser)
    return parser


def _add_subject(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="NAME", required=True, help="one of the models below")
    add("--batch", type=int, metavar="N", help="samples a step of one rank")
    add(
        "--dtype",
        choices=[str(each) for each in Dtype],
        default=Dtype.FLOAT32,
        help="of the forward",
    )
    add(
        "--optimizer",
        choices=[str(each) for each in OptimizerKind],
        default=OptimizerKind.SGD,
    )
    add(
        "--compression",
        choices=[str(each) for each in WireFormat],
        default=WireFormat.NONE,
        help="what gradients travel as",
    )
    add(
        "--input",
        choices=[str(each) for each in InputKind],
        default=InputKind.PREPARED,
        help="batches made before, or gathered from samples at every step",
    )
    add("--channels-last", action="store_true", help="lay images out that way")
    add("--compile", action="store_true", help="let torch.compile compile the model")


def _add_measurement(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        *("-n", "-np", "--num-proc"),
        dest="num_proc",
        type=int,
        metavar="N",
        help="ranks to start; without it one a GPU, else one a core",
    )
    add("--device", choices=[str(each) for each in DeviceKind], default=DeviceKind.AUTO)
    add("--engine", metavar="NAME", default="", help=f"one of {', '.join(ENGINES)}")
    add("--rounds", type=int, default=5, metavar="N", help="default: 5")
    add(
        "--steps",
        type=int,
        metavar="N",
        help="steps a round; without it as many as last about 0.4 s",
    )
    add("--warmup", type=int, default=3, metavar="N", help="steps before; default: 3")
    add("--json", type=Path, metavar="FILE", help="append a record to this file")
    add("--progress", action="store_true", help=argparse.SUPPRESS)


def _options(given: argparse.Namespace) -> TrainOptions:
    model = find_model(given.model)
    return TrainOptions(
        model=model,
        batch=model.batch if given.batch is None else given.batch,
        rounds=given.rounds,
        steps=given.steps,
        warmup=given.warmup,
        dtype=Dtype(given.dtype),
        device=DeviceKind(given.device),
        optimizer=OptimizerKind(given.optimizer),
        compression=WireFormat(given.compression),
        input=InputKind(given.input),
        engine=require_engine(given.engine, "--engine") if given.engine else "",
        is_channels_last=given.channels_last,
        is_compiled=given.compile,
    )


def _size(given: argparse.Namespace) -> int:
    if given.num_proc is None:
        is_cpu = given.device == DeviceKind.CPU
        return count_cores() if is_cpu else count_slots(own_environment())
    if given.num_proc < 1:
        raise UsageError(f"-n must be at least 1, got {given.num_proc}. Type: -n 2")
    return given.num_proc


def _require_size(size: int | None, claim: RankInfo) -> None:
    if size not in (None, claim.size):
        raise UsageError(
            f"-n must be the ranks that {claim.launcher} has started, {claim.size}, "
            f"got {size}. Leave -n out."
        )


def _require_writable(path: Path | None) -> None:
    if path is not None and (path.is_dir() or not absolute_path(path).parent.is_dir()):
        raise UsageError(
            f"--json must be a file in a directory that is there, got {path}. "
            f"Type: mkdir -p {path.parent}"
        )
