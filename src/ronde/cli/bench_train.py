"""``ronde bench train``: words -> training steps, measured -> a table and a record."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ronde.arguments import CommandParser
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
from ronde.cli.self_launch import run_self
from ronde.errors import UsageError
from ronde.launch.environments import own_environment
from ronde.launch.hosts.host import count_cores, count_slots
from ronde.launch.program import absolute_path
from ronde.world import Launcher, RankInfo, read_rank_info
from ronde.world.environment import require_engine

_HELP = """\
usage: ronde bench train --model NAME [-n N] [options]

Measure training steps of a well-known model.

options:
  --model NAME          one of the models below
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
  --compile             compile the model with torch.compile
  -n, -np, --num-proc N
                        ranks to start (default: one per GPU, else one per core)
  --device {auto,cpu,cuda}
                        (default: auto)
  --engine NAME         what moves the tensors, as for ronde run
  --rounds N            rounds (default: 5)
  --steps N             steps per round (default: as many as take about 0.4 s)
  --warmup N            untimed steps before the first round (default: 3)
  --json FILE           append a record to FILE
  -h, --help            show this help and exit

Three runs take turns, a few steps each, over several rounds: 1 rank, all ranks, and all
ranks without communication, which is the most that reducing gradients could reach. The
data is synthetic. "exposed" is the communication that the backward pass does not hide:
its time with communication minus its time without.

Without a launcher the command starts its own ranks on this machine; under ronde run,
torchrun or mpirun it joins theirs.

exit code: 0; 6 if it cannot be measured as asked; 7 if the ranks' weights differ at the
end.

models:
"""


def run_train(words: Sequence[str]) -> int:
    parser = CommandParser("ronde bench train", _HELP, types={"N": int, "FILE": Path})
    parser.declare("  --progress")
    parser.set_defaults(
        dtype=Dtype.FLOAT32,
        optimizer=OptimizerKind.SGD,
        compression=WireFormat.NONE,
        input=InputKind.PREPARED,
        device=DeviceKind.AUTO,
        rounds=5,
        warmup=3,
    )
    given = parser.read(words)
    if given is None:
        from ronde.render.bench_tables import draw_models

        for line in draw_models(list(MODELS.values())).splitlines():
            print(f"  {line}")
        return Exit.OK
    if not given.model:
        parser.error("--model must be given, got none")
    options, path = _options(given), given.json
    if path is not None and (path.is_dir() or not absolute_path(path).parent.is_dir()):
        raise UsageError(
            f"--json must be a file in a directory that is there, got {path}. "
            f"Type: mkdir -p {path.parent}"
        )
    info = read_rank_info()
    if info.launcher is Launcher.NONE:
        shown = ["--progress"] if sys.stderr.isatty() else []
        own_words = ["bench", "train", *words, *shown]
        engine = options.engine or info.engine
        size = given.num_proc
        if size is None:
            is_cpu = given.device == DeviceKind.CPU
            size = count_cores() if is_cpu else count_slots(own_environment())
        if size < 1:
            raise UsageError(f"-n must be at least 1, got {size}. Type: -n 2")
        return run_self(own_words, size, is_mpi=engine == "mpi")
    if given.num_proc not in (None, info.size):
        raise UsageError(
            f"-n must be the ranks that {info.launcher} has started, {info.size}, "
            f"got {given.num_proc}. Leave -n out."
        )
    return _run_rank(options, info, given)


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
                "ronde: weights must be equal on all ranks after training, and are "
                f"not. Compare the sums of engine {outcome.setting.engine}: "
                "ronde bench all_reduce",
                file=sys.stderr,
            )
    return Exit.OK if outcome.is_in_step else Exit.FAILED


def _show_progress(num_done: int, num_blocks: int) -> None:
    from ronde.render.bench import bar

    text = f"\r{bar(num_done, num_blocks)} blocks of steps"
    if num_done == num_blocks:
        # The launcher's console knows no escapes.
        text = "\r\x1b[K" if sys.stderr.isatty() else "\r \r"
    print(text, end="", file=sys.stderr, flush=True)


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
