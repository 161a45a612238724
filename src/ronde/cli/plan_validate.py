"""``ronde plan validate``: predicted steps beside measured ones."""

import argparse
import json
import math
import re
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial

from ronde.arguments import CommandParser, one_of, require_alone, whole_number
from ronde.cli.topo import print_json
from ronde.errors import UsageError
from ronde.plan.testbed import Starter, emulated_hosts, launched, run_ranks
from ronde.plan.validation import (
    PRICED,
    SIZES_BYTES,
    UNLIMITED_BYTES_PER_S,
    Case,
    MeasuredSteps,
    Measurement,
    StepRequest,
    judge,
    latency_share,
    layout_of,
    predict_steps,
    slower_rate,
    summarize,
)
from ronde.topology.machine import count_cores
from ronde.units import counted
from ronde.world import ALGORITHMS

_HELP = """\
usage: ronde plan validate -n SIZES [options]

Measure training steps of the first sizes, predict the others, then measure them, too.

options:
  -n SIZES        numbers of ranks, ascending, as 1,2,4,8; all up to the first
                  that communicates over the line are measured before the
                  prediction
  --rate RATE     as root: give each host, a network namespace of this machine,
                  a line of this rate, as 100Mbit/s, 1Gbit/s or unlimited
  --per-node G    ranks of a host; with --rate, 1 if not given
  -H, --hosts HOSTS
                  hosts and their slots, as for ronde run
  --compute NAME  emulated: the model's layers only wait, as ranks may
                  outnumber cores; or real (default: emulated)
  --model NAME    emulated: vgg, with few large gradients, or resnet, with many
                  small ones (default: resnet); real: a model of ronde bench
                  train (default: mlp)
  --seed N        variation of the emulated model (default: 0)
  --engine NAME   engine, as for ronde run (default: gloo with --rate, or auto)
  --algorithm NAME
                  of the engine scheduled
  --json          print one object of JSON; predictions go to standard error
  -h, --help      show this help and exit

Without --rate and -H, all ranks run on this machine, whose line has no limit. A size
for which the machine has too few cores is reported, but not counted.

exit code: 0; 1 if more than half of the measured steps are outside of their interval of
80 %; 2 if no size counts; 64 for a wrong command line

example:
  ronde plan validate -n 1,2,4,8 --rate 100Mbit/s --model vgg
"""
_NUM_STEPS = 8
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_ENGINES = ("auto", "shared_memory", "gloo", "scheduled", "hierarchical")
_EMULATED = ("resnet", "vgg")


def _read_sizes(text: str) -> list[int]:
    words = text.split(",")
    sizes = [int(word) for word in words if re.fullmatch("[0-9]{1,5}", word)]
    if len(sizes) < max(2, len(words)) or sizes[0] < 1 or sizes != sorted(set(sizes)):
        raise UsageError(
            f"must be at least 2 ascending numbers of ranks, got {text!r}. Type: -n "
            "1,2,4,8"
        )
    return sizes


def _read_rate(text: str) -> float:
    match = re.fullmatch(r"([0-9]+\.?[0-9]*)\s*([kmgt]?)bit/s", text.lower())
    rate = math.inf if text == "unlimited" else 0.0
    if match:
        rate = float(match[1]) * _FACTORS[match[2]]
    if not rate:
        raise UsageError(
            f"must be a rate in bit/s or unlimited, got {text!r}. Type: --rate 1Gbit/s"
        )
    return rate


_TYPES = {
    "SIZES": _read_sizes,
    "RATE": _read_rate,
    "G": whole_number(1),
    "N": whole_number(),
    "--compute": one_of("emulated", "real"),
    "--engine": one_of(*_ENGINES),
    "--algorithm": one_of(*ALGORITHMS),
}


def run(words: Sequence[str]) -> int:
    if words[:1] == ["--rank"]:
        # Imported here: torch takes a second.
        from ronde.cli.plan_rank import run_rank

        run_rank(words[1])
        return 0
    parser = CommandParser("ronde plan validate", _HELP, types=_TYPES)
    options = parser.read(words)
    if options is None:
        return 0
    if options.n is None:
        raise UsageError("-n is required. Type: -n 1,2,4,8")
    if options.compute != "real" and options.model not in (None, *_EMULATED):
        raise UsageError(
            f"--model must be {' or '.join(_EMULATED)}, got {options.model!r}. Or type: "
            "--compute real"
        )
    require_alone(options, "--rate", "--hosts")
    own = 1 if options.rate or options.hosts else options.n[-1]
    per_node = options.per_node or own
    num_measured = _count_measured(options.n, per_node)
    with _open_testbed(options, per_node) as start:
        return _validate(options, per_node, num_measured, start)


def _count_measured(sizes: Sequence[int], per_node: int) -> int:
    """Return how many sizes are measured before the prediction of the others."""
    for size in sizes:
        if size > per_node and size % per_node:
            raise UsageError(
                f"--per-node must divide the sizes of -n above it, got {per_node} for "
                f"{size}. Type: -n {per_node},{2 * per_node}"
            )
    least = per_node if sizes[-1] > per_node else 1
    num_measured = sum(size <= least for size in sizes) + 1
    if num_measured >= len(sizes):
        raise UsageError(
            f"-n must have at least 2 sizes of more than {counted(least, 'rank')}, one "
            f"to measure and one to predict, got {','.join(map(str, sizes))}. Type: -n "
            f"{least},{2 * least},{4 * least}"
        )
    return num_measured


def _choose_engine(
    options: argparse.Namespace, per_node: int
) -> tuple[str, dict[str, str]]:
    """Return the algorithm to price, and the variables of the engine."""
    is_one_node = options.n[-1] <= per_node
    engine = options.engine or ("gloo" if options.rate else "auto")
    used = engine
    if engine == "auto":
        several = "hierarchical" if per_node > 1 else "gloo"
        used = "shared_memory" if is_one_node else several
    if options.algorithm and used != "scheduled":
        raise UsageError(
            f"--algorithm needs --engine scheduled, got {used}. Leave it out."
        )
    if used == "shared_memory" and not is_one_node:
        raise UsageError(
            "--engine must reach other hosts, got shared_memory. Type: --engine gloo"
        )
    env = {"RONDE_ENGINE": engine, "RONDE_ALGORITHM": options.algorithm or ""}
    return options.algorithm or PRICED[used], env


@contextmanager
def _open_testbed(options: argparse.Namespace, per_node: int) -> Generator[Starter]:
    if options.rate:
        num_hosts = -(-options.n[-1] // per_node)
        with emulated_hosts(num_hosts, per_node, options.rate) as start:
            yield start
    elif options.hosts:
        words = ("-H", options.hosts, "--nproc-per-node", str(per_node))
        yield partial(launched, words)
    else:
        yield partial(launched, ("--standalone",))


def _validate(
    options: argparse.Namespace, per_node: int, num_measured: int, start: Starter
) -> int:
    algorithm, env = _choose_engine(options, per_node)
    sizes, is_real = options.n, options.compute == "real"
    is_limited = math.isfinite(options.rate or math.inf)
    request = StepRequest(
        options.compute or "emulated",
        options.model or ("mlp" if is_real else "resnet"),
        options.rate / 8 if is_limited else UNLIMITED_BYTES_PER_S,
        options.seed or 0,
        _NUM_STEPS,
        SIZES_BYTES,
    )

    def log(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    def measure(num_ranks: int, request: StepRequest) -> MeasuredSteps:
        words = ("plan", "validate", "--rank", json.dumps(request))
        return MeasuredSteps(**run_ranks(start(num_ranks, words, env)))

    log(_title(request, options, per_node))
    runs: list[MeasuredSteps] = []
    for num_ranks in sizes[:num_measured]:
        runs.append(measure(num_ranks, request))
        log(f"{num_ranks:5}  measured   {runs[-1].step_s:.4f} s")
    cores = 0 if options.hosts else count_cores()
    measurement = Measurement(runs, algorithm, cores, is_limited, not is_real)
    layouts = [layout_of(num_ranks, per_node) for num_ranks in sizes[num_measured:]]
    predictions = predict_steps(measurement, layouts)
    for layout, predicted in zip(layouts, predictions, strict=True):
        low, middle, high = predicted
        log(
            f"{layout.num_ranks:5}  predicted  {middle:.4f} s, 80 % within {low:.4f} .. "
            f"{high:.4f} s"
        )
    cases: list[Case] = []
    for layout, predicted in zip(layouts, predictions, strict=True):
        run = measure(layout.num_ranks, request._replace(sizes=SIZES_BYTES[:1]))
        share = latency_share(algorithm, run)
        case = Case(layout.num_ranks, *predicted, run.step_s, share)
        cases.append(case)
        log(_show(case, request.bytes_per_s))
    log(summarize(cases))
    if options.json:
        content = {
            "request": request._asdict() | {"rate_bit_per_s": options.rate},
            "algorithm": algorithm,
            "env": env,
            "ranks_per_node": per_node,
            "measured": [run._asdict() for run in runs],
            "cases": [case.content() for case in cases],
        }
        print_json("ronde-plan-validate", content)
    return judge(cases)


def _title(request: StepRequest, options: argparse.Namespace, per_node: int) -> str:
    where = "all ranks on this machine, whose line has no limit"
    if options.hosts or options.rate:
        where = f"{counted(per_node, 'rank')} a host"
    if options.rate:
        rate = f"{options.rate / 1e6:g} Mbit/s"
        where += f", {'unlimited lines' if math.isinf(options.rate) else rate}"
    return f"{request.compute} {request.model}, seed {request.seed}; {where}"


def _show(case: Case, bytes_per_s: float) -> str:
    text = f"error {100 * case.error:+.1f} %, {'in' if case.is_inside else 'OUT'}side"
    if not case.is_valid:
        rate = slower_rate(bytes_per_s, case.latency_share) * 8 / 1e6
        text = f"machine too small for this rate; try --rate {rate:g}Mbit/s"
    return f"{case.num_ranks:5}  measured   {case.measured_s:.4f} s, {text}"
