"""``ronde plan``: predicted training speed, from records or published speeds."""

import argparse
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ronde.arguments import CommandParser, one_of, whole_number
from ronde.cli.topo import print_json
from ronde.errors import UsageError
from ronde.parallel.layout import Layout
from ronde.parallel.memory import Precision, Sharding
from ronde.parallel.traffic import StepSizes, step_traffic
from ronde.plan.answer import Answer, Inputs, answer
from ronde.plan.cost import Cost, Prices, costs_of
from ronde.plan.facts import (
    FACTS,
    fact_of,
    number_from,
    read_cluster_file,
    read_count,
    with_fact,
)
from ronde.plan.measurements import read_measured, unite
from ronde.plan.posterior import infer
from ronde.plan.priors import Priors
from ronde.plan.setup import Exchange, Point, Setup, Size
from ronde.plan.what_if import (
    advised_changes,
    best_first,
    read_changes,
    try_changes,
)
from ronde.records import Record, append_record
from ronde.render.plan import PlanReport, draw_plan, plan_as_json
from ronde.render.plan_chart import draw_chart
from ronde.units import format_size, parse_size_bytes

_KEYS = textwrap.fill(", ".join([*FACTS, "batch", "accumulation"]), 80)
HELP = f"""\
usage: ronde plan [RECORD ...] [options]   training speed on more ranks
       ronde plan memory                   memory of a rank in a training step
       ronde plan traffic                  bytes that it sends, and the time

Predict the training speed on more ranks, with an interval that holds in four of five
cases, and the part of a step that limits it. Nothing is started.

RECORD is a file of ronde bench train --json or of ronde bench --json. Two published
speeds (--points) are enough; every further fact narrows the interval. Measured facts
count more than stated ones.

sizes:
  -n RANKS        numbers of ranks, as 16,64,512 (default: up to 8 times the largest)
  --nodes NODES   numbers of nodes, as 2,4,8 or 2..1024 for all doublings
program:
  --points POINTS
                  speeds of all ranks together by their number, as 1=253,8=1282
  --unit UNIT     images, samples, sequences or tokens:N with N in a sample
  --parameters COUNT
                  parameters of the model, as 25.6M
  --batch X       samples of a rank in an optimizer step
  --dtype NAME    type of the exchanged gradients: float32, bfloat16 or float16
  --overlap NAME  gradients that are sent during backward: none, bucket or tensor
  --exchange NAME
                  all_reduce, parameter_server, shard_gradients or shard_all
  --algorithm NAME
                  algorithm of all_reduce, as ring or two_levels
cluster:
  --per-node N    ranks of a node
  --link RATE     all network adapters of a node, as 400Gbit/s or 8x400Gbit/s
  --gpu-link RATE
                  link of a GPU to others of its node, as 230GB/s
  --transport NAME
                  tcp or rdma
  --alpha-us X    time of a small message between nodes
  --oversubscription X
                  rate below a leaf switch by that above it
  --leaf-nodes N  nodes below a leaf switch
  --cluster FILE  all these in TOML, as link = "400Gbit/s", and prices below [cost]
questions:
  --what-if KEY=VALUE[,KEY=VALUE] ...
                  the same with changes; KEY=A/B/C tries several values
  --advise        try a list of changes, and show those that gain over 3 %
  --cost KEY=VALUE[,KEY=VALUE]
                  usd_per_rank_hour, usd_per_node_hour, watts_per_rank, pue and
                  usd_per_kwh
  --samples COUNT
                  samples of the whole training, for its hours and its cost
  --epochs X      or its epochs, with
  --dataset-samples COUNT
                  samples of an epoch
  --max-global-batch COUNT
                  leave out sizes with a larger batch of all ranks
  --mesh AXES     layout, as dp_shard=8,tp=2, for the memory of a rank
  --limit SIZE    memory of a rank's device, as 80GiB
output:
  --svg FILE      draw the speed and the parts of a step
  --record FILE   append a record of kind plan
  --json          print one object of JSON
  -h, --help      show this help and exit

keys of --what-if:
{_KEYS}

exit code: 0; 64 for a wrong command line, record or file

examples:
  ronde plan run.jsonl -n 16,64,512
  ronde plan --points 1=253,4=925,8=1282 --per-node 4 --link 10Gbit/s -n 16,32
"""
_MOST_SIZES = 64
_MOST_COLUMNS = 3  # of --what-if
_UNITS = ("samples", "images", "sequences", "tokens")
_WANTED = ("parameters", "link", "transport", "gpu_link", "overlap")
_USUAL_NODES = (8, 4, 2)


def run_speed(words: Sequence[str]) -> int:
    """Predict speeds as asked, and print them."""
    parser = CommandParser("ronde plan", HELP, types=_TYPES, positionals=_POSITIONALS)
    parser.alias("--exchange", "--method")
    options = parser.read(words)
    if options is None:
        return 0
    inputs, prices = _read_inputs(options)
    sizes = _read_sizes(options, inputs.setup)
    changes = read_changes(options.what_if, inputs.setup)
    posterior = infer(inputs.setup, Priors())
    found = answer(posterior, sizes)
    advised = advised_changes(inputs.setup)
    report = PlanReport(
        inputs,
        found,
        tuple(try_changes(posterior, sizes[-_MOST_COLUMNS:], changes)),
        tuple(best_first(try_changes(posterior, sizes[-1:], advised))),
        options.advise,
        tuple(_costs(options, found, prices)),
        tuple(_fit_lines(options, inputs.setup, sizes[-1])),
    )
    if options.svg:
        Path(options.svg).write_text(draw_chart(report), encoding="utf-8")
    if options.record:
        append_record(Path(options.record), Record("plan", plan_as_json(report)))
    if options.json:
        print_json("ronde-plan", plan_as_json(report))
    else:
        print(draw_plan(report), end="")
    return 0


def _read_inputs(options: argparse.Namespace) -> tuple[Inputs, Prices]:
    stated, texts = {}, dict(pair.partition("=")[::2] for pair in options.cost or ())
    where = "--cost"
    if options.cluster:
        stated, from_file = read_cluster_file(Path(options.cluster))
        where, texts = f"[cost] in {options.cluster}", from_file | texts
    prices = Prices.read(texts, where)
    stated |= {k: v for k in FACTS if (v := getattr(options, k, None)) is not None}
    is_mixed = any(re.search(r"\bbatch=", text) for text in options.what_if)
    paths = [Path(name) for name in options.records]
    measured = read_measured(paths, stated.get("per_node"), are_batches_mixed=is_mixed)
    setup, left_out = measured.setup, list(measured.notes)
    for key, value in stated.items():
        if key in measured.known and value != fact_of(setup, key):
            left_out.append(f"{key} as stated: the record has another. Try --what-if")
        elif key not in measured.known:
            setup = with_fact(setup, key, value)
    inputs = Inputs(setup, measured.known, list(stated), [], [], left_out)
    return _with_points(options, inputs), prices


def _with_points(options: argparse.Namespace, inputs: Inputs) -> Inputs:
    """Add the published points, and the assumptions that they need."""
    setup, known, given = (
        inputs.setup,
        (*inputs.measured, *inputs.stated),
        options.points or (),
    )
    assumed = [] if "dtype" in known else ["float32"]
    if "per_node" not in known:
        g = setup.cluster.ranks_per_node
        if given:
            sizes = [n for n, _ in given] + list(options.n or ())
            g = next((g for g in _USUAL_NODES if _is_whole(sizes, g)), 1)
        setup = with_fact(setup, "per_node", g)
        assumed.append(f"{g} ranks a node")
    if given:
        unit, units_a_sample = options.unit or ("samples", 1.0)
        program = replace(setup.program, unit=unit, units_a_sample=units_a_sample)
        setup = replace(setup, program=program)
    sizes = _sizes([n for n, _ in given], setup, options.batch)
    points = [Point(size, speed) for size, (_, speed) in zip(sizes, given, strict=True)]
    setup = replace(setup, points=unite([*setup.points, *points]))
    if not setup.points:
        raise UsageError(
            "a record of ronde bench train or --points is required. Type: ronde plan "
            "--points 1=253,8=1282 --per-node 4 -n 16"
        )
    is_known = setup.program.num_parameters or setup.cluster.node_gbit_per_s
    if len(setup.points) == 1 and not is_known:
        raise UsageError(
            "one size alone needs --parameters and --link, got neither. A speed on two "
            "nodes would help most."
        )
    unknown = [key for key in _WANTED if fact_of(setup, key) in (None, "")]
    if setup.points[0].size.batch is None:
        unknown.append("batch")
    return inputs._replace(setup=setup, assumed=assumed, unknown=unknown)


def _is_whole(sizes: Sequence[int], per_node: int) -> bool:
    return max(sizes) >= per_node and all(
        n < per_node or n % per_node == 0 for n in sizes
    )


def _sizes(numbers: Sequence[int], setup: Setup, batch: float | None) -> list[Size]:
    g = setup.cluster.ranks_per_node
    for n in numbers:
        if n > g and n % g:
            raise UsageError(
                f"ranks must be a multiple of {g} a node, got {n}. Give {n // g * g} or "
                f"{-(-n // g) * g}, or another --per-node."
            )
    return [Size(n, math.ceil(n / g), batch) for n in numbers]


def _read_sizes(options: argparse.Namespace, setup: Setup) -> list[Size]:
    g, last = setup.cluster.ranks_per_node, setup.points[-1].size
    numbers = [*(options.n or ()), *(n * g for n in options.nodes or ())]
    if not numbers:
        least = max(last.num_ranks, g)
        numbers = [least * 2**k for k in range(4)]
    sizes = _sizes(sorted(set(numbers)), setup, last.batch)
    limit = options.max_global_batch
    if limit is not None:
        if last.batch is None:
            raise UsageError("--max-global-batch needs --batch. Give both.")
        sizes = [size for size in sizes if size.num_ranks * (size.batch or 0) <= limit]
        if not sizes:
            raise UsageError(
                f"--max-global-batch must allow {numbers[0]} ranks of {last.batch:g}, "
                f"got {limit}. Give a larger one, or fewer ranks."
            )
    return sizes


def _read_numbers(text: str) -> list[int]:
    """Read ``16,64,512``, or ``2..1024`` for all doublings."""
    first, dots, last = text.partition("..")
    words = [first, last] if dots else text.split(",")
    if not all(re.fullmatch("[1-9][0-9]{0,6}", word) for word in words):
        raise UsageError(
            f"must be numbers of at least 1, got {text!r}. Write them as 16,64,512 or "
            "2..1024."
        )
    numbers = [int(word) for word in words]
    if dots:
        start, end = numbers
        numbers = [start << k for k in range(24) if start << k <= end]
    if not 0 < len(numbers) <= _MOST_SIZES:
        raise UsageError(f"must be 1 to {_MOST_SIZES} sizes, got {text!r}.")
    return numbers


def _read_points(text: str) -> list[tuple[int, float]]:
    pairs: list[tuple[int, float]] = []
    for word in text.split(","):
        n, _, speed = word.partition("=")
        if not re.fullmatch("[1-9][0-9]{0,6}", n):
            raise UsageError(
                f"must be speeds by number of ranks, got {word!r}. Write them as "
                "1=253,8=1282."
            )
        try:
            pairs.append((int(n), number_from(0)(speed)))
        except UsageError as error:
            raise UsageError(f"must be speeds: that of {n} ranks {error}") from None
    return pairs


def _read_unit(text: str) -> tuple[str, float]:
    unit, colon, count = text.partition(":")
    one_of(*_UNITS)(unit)
    return unit, number_from(1)(count) if colon else 1.0


def _costs(options: argparse.Namespace, found: Answer, prices: Prices) -> list[Cost]:
    samples = options.samples
    if options.epochs is not None:
        if options.dataset_samples is None:
            raise UsageError("--epochs needs --dataset-samples. Give both.")
        samples = options.epochs * options.dataset_samples
    if samples is None:
        if options.cost:
            raise UsageError(
                "--cost needs --samples or --epochs. Type: --samples 1.28M"
            )
        return []
    return costs_of(found.rows, prices, samples, found.setup.program.units_a_sample)


def _fit_lines(options: argparse.Namespace, setup: Setup, size: Size) -> Iterable[str]:
    """Yield the bytes that a rank holds and sends, by formulas."""
    count = setup.program.num_parameters
    if count is None:
        return
    n, exchange, is_half = (
        size.num_ranks,
        setup.program.exchange,
        setup.program.itemsize < 4,
    )
    zero = {Exchange.SHARD_GRADIENTS: 2, Exchange.SHARD_ALL: 3}.get(exchange, 0)
    layout = Layout(dp_shard=n) if zero else Layout(dp_replicate=n)
    if options.mesh:
        layout, zero = options.mesh.resolve(n), 3
    share = count / layout.tp / layout.pp
    sent = step_traffic(layout, StepSizes(share * setup.program.itemsize, 0, 1), zero)
    precision = Precision.BF16 if is_half else Precision.FP32
    held = Sharding(layout.dp_shard, zero, precision).peak([math.ceil(share)])
    yield (
        f"A rank of {layout} sends {format_size(round(sum(sent.values())))} a step, and "
        f"holds {format_size(held.total_bytes)} besides activations, with Adam."
    )
    if options.limit is not None:
        yield (
            f"It does not fit: {s}"
            if (s := held.shortage(options.limit))
            else "It fits."
        )


_POSITIONALS = {"records": "*"}
_TYPES = {
    **{f"--{key.replace('_', '-')}": fact.read for key, fact in FACTS.items()},
    "-n": _read_numbers,
    "--nodes": _read_numbers,
    "--points": _read_points,
    "--unit": _read_unit,
    "--cost": lambda text: text.split(","),
    "--mesh": Layout.parse,
    "--limit": parse_size_bytes,
    "COUNT": read_count,
    "N": whole_number(1),
    "X": number_from(0),
}
