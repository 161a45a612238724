"""``ronde plan validate``: predicted steps beside measured ones."""

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from ronde.arguments import CommandParser, whole_number
from ronde.bench.training.outcome import find_model
from ronde.cli.topo import print_json
from ronde.errors import UsageError
from ronde.parallel.layout import RankLayout
from ronde.plan.facts import require_nodes
from ronde.plan.testbed import Starter, emulated_hosts, launched, run_ranks
from ronde.plan.validation import (
    MeasuredSteps,
    StepComparison,
    StepRequest,
    judge,
    layout_of,
    predict_steps,
)
from ronde.topology.machine import count_cores
from ronde.units import counted, parse_bit_per_s

_HELP = """\
usage: ronde plan validate -n SIZES [options]

Measure training steps of the first sizes, predict the others, then measure them, too.

options:
  -n SIZES        numbers of ranks, ascending, as 1,2,4,8; all up to the first
                  that communicates over the line are measured before the
                  prediction
  --rate RATE     as root: give each host, a network namespace of this machine,
                  a line of this rate, as 100Mbit/s, 1Gbit/s or unlimited;
                  with -H: the rate of the hosts' lines, for the model's size
  --per-node G    ranks of a host; with --rate or -H, 1 if not given
  -H, --hosts HOSTS
                  hosts and their slots, as for ronde run
  --compute {emulated,real}
                  emulated: the model's layers only wait, as ranks may
                  outnumber cores (default: emulated)
  --model NAME    emulated: vgg, with few large gradients, or resnet, with many
                  small ones (default: resnet); real: a model of ronde bench
                  train (default: mlp)
  --seed N        variation of the emulated model (default: 0)
  --steps N       measured steps of each size (default: 8)
  --engine {auto,shared_memory,gloo,scheduled,hierarchical}
                  engine, as for ronde run (default: gloo with --rate, or auto)
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
_UNLIMITED_RATE = 2e9  # for which a model is sized if the line has no limit
_EMULATED, _REAL = ("resnet", "vgg"), "mlp"


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
    try:
        return math.inf if text == "unlimited" else parse_bit_per_s(text)
    except UsageError as error:
        raise UsageError(str(error).replace("rate,", "rate or unlimited,")) from None


_TYPES = {
    "SIZES": _read_sizes,
    "RATE": _read_rate,
    "G": whole_number(1),
    "--seed": whole_number(),
    "--steps": whole_number(1),
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
    if options.compute == "real":
        find_model(options.model or _REAL)
    elif options.model not in (None, *_EMULATED):
        raise UsageError(
            f"--model must be {' or '.join(_EMULATED)}, got {options.model!r}, as no "
            "model of ronde bench train is emulated. Type: --compute real"
        )
    own = 1 if options.rate or options.hosts else options.n[-1]
    return _validate(options, options.per_node or own)


def _count_measured(sizes: Sequence[int], per_node: int) -> int:
    """Return the number of sizes that are measured before the prediction."""
    for size in sizes:
        require_nodes(per_node, size)
    least = per_node if sizes[-1] > per_node else 1
    num_measured = sum(size <= least for size in sizes) + 1
    if num_measured >= len(sizes):
        raise UsageError(
            f"-n must have at least 2 sizes of more than {counted(least, 'rank')}, one "
            f"to measure and one to predict, got {','.join(map(str, sizes))}. Type: -n "
            f"{least},{2 * least},{4 * least}"
        )
    return num_measured


def _validate(options: argparse.Namespace, per_node: int) -> int:
    num_measured = _count_measured(options.n, per_node)
    rate, is_real = options.rate or math.inf, options.compute == "real"
    engine = options.engine or ("gloo" if options.rate else "auto")
    algorithm = _priced(engine, options.n[-1], per_node)
    request = StepRequest(
        options.compute or "emulated",
        options.model or (_REAL if is_real else _EMULATED[0]),
        min(rate, _UNLIMITED_RATE) / 8,
        options.seed or 0,
        options.steps or _NUM_STEPS,
        is_base=True,
    )
    layouts = [layout_of(num_ranks, per_node) for num_ranks in options.n]
    log = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    with ExitStack() as exits:
        env = {"RONDE_ENGINE": engine, "RONDE_ALGORITHM": ""}  # as priced
        where, launch = "this machine", ["--standalone"]
        if options.rate or options.hosts:
            where = f"hosts of {counted(per_node, 'rank')}"
            where += f", lines of {rate / 1e6:g} Mbit/s" * math.isfinite(rate)
        if options.hosts:
            launch = ["-H", options.hosts, "--nproc-per-node", str(per_node)]
        start: Starter = partial(launched, launch, env)
        if options.rate and not options.hosts:
            hosts = emulated_hosts(layouts[-1].num_nodes, per_node, rate, env)
            start = exits.enter_context(hosts)
        program = f"{request.compute} {request.model}, seed {request.seed}"
        log(f"{program}; priced as {algorithm}; {where}")
        runs: list[MeasuredSteps] = []
        for layout in layouts[:num_measured]:
            runs.append(_measure(start, layout, request))
            log(f"{layout.num_ranks:5}  measured   {runs[-1].step_s:.4f} s")
        others, cases = layouts[num_measured:], list[StepComparison]()
        cores = math.inf if options.hosts else count_cores()
        predictions = predict_steps(
            runs, others, algorithm, shared_cores=cores, is_emulated=not is_real
        )
        for layout, (low, middle, high) in zip(others, predictions, strict=True):
            interval = f"80 % within {low:.4f} .. {high:.4f} s"
            log(f"{layout.num_ranks:5}  predicted  {middle:.4f} s, {interval}")
        for layout, predicted in zip(others, predictions, strict=True):
            run = _measure(start, layout, request._replace(is_base=False))
            share = run.latency_share(algorithm)
            cases.append(StepComparison(layout.num_ranks, predicted, run.step_s, share))
            log(cases[-1].shown(8 * request.bytes_per_s))
    code, verdict = judge(cases)
    log(verdict)
    if options.json:
        content = {
            **request._asdict(),
            "rate_bit_per_s": rate if math.isfinite(rate) else None,
            "engine": engine,
            "algorithm": algorithm,
            "ranks_per_node": per_node,
            "measured": [run._asdict() for run in runs],
            "predicted": [case.content() for case in cases],
        }
        print_json("ronde-plan-validate", content)
    return code


def _measure(start: Starter, layout: RankLayout, request: StepRequest) -> MeasuredSteps:
    words = ("plan", "validate", "--rank", json.dumps(request))
    return MeasuredSteps(**run_ranks(start(layout.num_ranks, words)))


def _priced(engine: str, num_ranks: int, per_node: int) -> str:
    """Return the algorithm with the price of an engine."""
    is_one_node = num_ranks <= per_node
    if engine == "shared_memory" or (engine == "auto" and is_one_node):
        return "parameter_server"  # every byte is copied in and out once
    is_split = engine == "hierarchical" or (engine == "auto" and per_node > 1)
    return "two_levels" if is_split else "ring"
