"""``ronde plan``: predicted training speed, from records or published speeds."""

import argparse
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ronde.arguments import CommandParser, one_of, whole_number
from ronde.cli.topo import print_json
from ronde.errors import UsageError
from ronde.parallel.memory import Precision, Sharding
from ronde.parallel.traffic import step_traffic
from ronde.plan import cost, facts, what_if
from ronde.plan.answer import answer, contradiction_of, warnings_of
from ronde.plan.measurements import Inputs, read_measured, unite
from ronde.plan.posterior import infer
from ronde.plan.priors import load_priors
from ronde.plan.setup import Point, Setup, Size
from ronde.records import Record, append_record
from ronde.render.plan import PlanReport, draw_plan, plan_as_json
from ronde.render.plan_chart import draw_chart
from ronde.units import counted, format_size, parse_count, parse_size_bytes

_KEYS = textwrap.fill(", ".join(what_if.KEYS), 80)
HELP = f"""\
usage: ronde plan [RECORD ...] [options]  training speed on more ranks
       ronde plan memory                  memory of a rank in a training step
       ronde plan traffic                 bytes that it sends, and the time
       ronde plan points SHEET            empty speeds of a table, predicted
       ronde plan validate                predicted steps beside measured ones

Predict training speed, with intervals that hold in four of five cases, and show the
part of a step that limits it. Nothing is started. RECORD is a file of ronde bench
train --json or ronde bench --json. Two published speeds (--points) are enough; every
further fact narrows the intervals. Measured facts count more than stated ones.

sizes:
  -n NUMBERS            ranks, as 16,64,512 (default: up to 8 times the largest)
  --nodes NUMBERS       nodes, as 2,4,8 or 2..1024 for all doublings
  --global-batch COUNT  batch of all ranks at all of these (strong scaling)
  --max-global-batch COUNT
                        leave out sizes with a larger batch of all ranks
program:
  --points POINTS       speeds of all ranks by their number, as 1=253,8=1282
  --unit UNIT           images, samples, sequences, or tokens:N with N in a sample
  --batch X             samples of a rank, or model copy, in an optimizer step
  --parameters COUNT    parameters of the model, as 25.6M
  --dtype NAME          of exchanged gradients: float32, bfloat16 or float16
  --overlap NAME        gradients sent during backward: none, bucket or tensor
  --exchange NAME       all_reduce, parameter_server, shard_gradients or shard_all
  --algorithm NAME      algorithm of all_reduce, as ring or two_levels
layout:
  --mesh AXES           layout of the given speeds, as dp_shard=-1,tp=8
  --blocks N            blocks of the model, for tp and pp
  --hidden N            width of the activations between them
  --sequence N          tokens of a sample (default: N of --unit tokens:N)
  --microbatches N      of a pipeline, in the batch of a model copy
  --chunks N            stages of each of its ranks (default: 1)
  --period X            steps between exchanges, as in local SGD (default: 1)
cluster:
  --per-node N          ranks of a node
  --link RATE           all adapters of a node, as 400Gbit/s or 8x400Gbit/s
  --gpu-link RATE       from one GPU to others of its node, as 230GB/s
  --transport NAME      tcp or rdma
  --alpha-us X          time of a small message between nodes
  --oversubscription X  rate below a leaf switch by that above it
  --leaf-nodes N        nodes below a leaf switch
  --cluster FILE        all these in TOML, as link = "400Gbit/s", and [cost]
questions:
  --what-if KEY=VALUE[,KEY=VALUE] ...
                        the same with changes; KEY=A/B/C tries several values
  --advise              show all changes that gain over 3 %
  --samples COUNT       samples of the whole training, for its hours and its cost
  --epochs X            or its epochs, with
  --dataset-samples COUNT
                        samples of an epoch
  --cost KEY=VALUE[,KEY=VALUE]
                        usd_per_rank_hour, usd_per_node_hour, usd_per_kwh,
                        watts_per_rank and pue
  --limit SIZE          memory of a rank's device, as 80GiB
output:
  --svg FILE            draw the speed and the parts of a step
  --record FILE         append a record of kind plan
  --json                print one object of JSON
  -h, --help            show this help and exit

keys of --what-if: those of the options, without dashes, and
{_KEYS}
(sharding is exchange, alpha is alpha_us, compute the device's speed as a factor, input
the units a second that a store delivers, jitter the deviation of log step times between
ranks, bucket a size as 25MiB)

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
_POSITIONALS = {"records": "*"}
_Case = tuple[Setup, Sequence[Size]]


def run_speed(words: Sequence[str]) -> int:
    parser = CommandParser("ronde plan", HELP, types=_TYPES, positionals=_POSITIONALS)
    parser.alias("--exchange", "--method")
    options = parser.read(words)
    if options is None:
        return 0
    inputs, prices = _read_inputs(options)
    setup, sizes = inputs.setup, _read_sizes(options, inputs.setup)
    _require_network(inputs, sizes)
    changes = [c for text in options.what_if for c in what_if.read_changes(text, setup)]
    asked, samples = sizes[-_MOST_COLUMNS:], _read_samples(options)
    is_cut = bool(changes) and len(asked) < len(sizes)
    shown = [f"--what-if is shown for the last {_MOST_COLUMNS} sizes."] * is_cut
    if options.limit is not None and setup.program.num_parameters is None:
        raise UsageError("--limit needs --parameters. Give both.")
    every = [*(point.size for point in setup.points), *sizes]
    cases = [(setup, every), *((c.setup, [*map(c.size, asked)]) for c in changes)]
    doubts = dict.fromkeys(line for case in cases for line in facts.layout_notes(*case))
    posterior = infer(setup, load_priors())
    if doubt := contradiction_of(posterior):
        raise UsageError(doubt)
    rows = answer(posterior, sizes)
    advised = what_if.advised_changes(setup, sizes[-1].batch)
    advice = what_if.try_changes(posterior, sizes[-1:], advised)
    units = setup.program.units_a_sample or 1.0
    report = PlanReport(
        inputs,
        rows,
        posterior.parameters(),
        [*_fit_lines(options, cases), *doubts, *warnings_of(setup, rows), *shown],
        what_if.try_changes(posterior, asked, changes),
        advice,
        cost.costs_of(rows, prices, samples, units) if samples else [],
        posterior.effective_draws,
    )
    _write(options, report)
    if options.json:
        print_json("ronde-plan", plan_as_json(report))
    else:
        print(draw_plan(report, is_advice_shown=options.advise), end="")
    return 0


def _write(options: argparse.Namespace, report: PlanReport) -> None:
    try:
        if options.svg:
            Path(options.svg).write_text(draw_chart(report), encoding="utf-8")
        if options.record:
            append_record(Path(options.record), Record("plan", plan_as_json(report)))
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise UsageError(
            f"--svg and --record must be files that can be written, got "
            f"{error.filename!r}: {error.strerror}."
        ) from None


def _read_inputs(options: argparse.Namespace) -> tuple[Inputs, dict[str, float]]:
    path, stated, prices = options.cluster, dict[str, Any](), dict[str, str]()
    if path:
        stated, prices = facts.read_cluster_file(Path(path))
    prices |= options.cost or {}
    given = {key: getattr(options, key, None) for key in facts.FACTS}
    stated |= {key: value for key, value in given.items() if value is not None}
    is_mixed = any(re.search(r"\bbatch=", text) for text in options.what_if)
    paths = [Path(name) for name in options.records]
    inputs = read_measured(paths, stated.get("per_node"), are_batches_mixed=is_mixed)
    setup, left_out = inputs.setup, [*inputs.left_out]
    for key, value in stated.items():
        is_of_copy = key == "mesh" and inputs.setup.points and value.tp * value.pp > 1
        if key not in inputs.measured and not is_of_copy:
            setup = facts.with_fact(setup, key, value)
        elif value != facts.fact_of(setup, key):
            left_out.append(f"the stated {key}, as the record has another")
    inputs = inputs._replace(setup=setup, stated=list(stated), left_out=left_out)
    where = f"[cost] of {path} or --cost" if path else "--cost"
    return _with_points(options, inputs), cost.read_prices(prices, where)


def _with_points(options: argparse.Namespace, inputs: Inputs) -> Inputs:
    """Add the published points, and the assumptions that they need."""
    setup, known = inputs.setup, {*inputs.measured, *inputs.stated}
    given: list[tuple[int, float]] = options.points or []
    assumed = [] if "dtype" in known else ["float32"]
    if "per_node" not in known:
        numbers = [*(n for n, _ in given), *(options.n or ())]
        g = setup.cluster.ranks_per_node
        if given:
            usual = [
                k for k in _USUAL_NODES if all(n < k or n % k == 0 for n in numbers)
            ]
            g = next((k for k in usual if k <= max(numbers)), 1)
        setup = facts.with_fact(setup, "per_node", g)
        assumed.append(f"{counted(g, 'rank')} a node")
    batch, left_out = options.batch, [*inputs.left_out]
    if setup.points:  # of records
        left_out += ["the stated batch: see --what-if"] * (batch is not None)
        batch = setup.points[-1].size.batch
    elif options.unit:
        unit, units_a_sample = options.unit
        program = replace(setup.program, unit=unit, units_a_sample=units_a_sample)
        if unit == "tokens" and program.sequence is None:
            program = replace(program, sequence=units_a_sample)
        setup = replace(setup, program=program)
    sizes = _sizes([n for n, _ in given], setup, batch)
    points = [Point(size, speed) for size, (_, speed) in zip(sizes, given, strict=True)]
    setup = replace(setup, points=unite([*setup.points, *points]))
    if not setup.points:
        raise UsageError(
            "a record of ronde bench train or --points is required. Type: ronde plan "
            "--points 1=253,8=1282 --per-node 4 -n 16"
        )
    cluster = setup.cluster
    is_known = setup.program.num_parameters or cluster.node_gbit_per_s
    if len(setup.points) == 1 and not (is_known or cluster.inside or cluster.between):
        raise UsageError(
            "one size alone needs --parameters and --link, got neither. A speed on two "
            "nodes would help most."
        )
    if not setup.is_sized and (cluster.inside or cluster.between):
        left_out.append("the links: they need --parameters and --batch")
        setup = replace(setup, cluster=replace(cluster, inside=None, between=None))
    unknown = [key for key in _WANTED if facts.fact_of(setup, key) in (None, "")]
    unknown += ["batch"] * (setup.points[0].size.batch is None)
    unknown += ["units of a sample"] * (setup.program.units_a_sample is None)
    return inputs._replace(
        setup=setup, assumed=assumed, unknown=unknown, left_out=left_out
    )


def _require_network(inputs: Inputs, sizes: Sequence[Size]) -> None:
    """Refuse several nodes if a record of CPUs is all that is known."""
    setup, most = inputs.setup, max(size.num_nodes for size in sizes)
    cluster, known = setup.cluster, setup.points[-1].size.num_nodes > 1
    is_linked = cluster.node_gbit_per_s is not None or cluster.between is not None
    if inputs.is_from_cpu and most > 1 and not known and not is_linked:
        raise UsageError(
            f"{most} nodes need --link, as a record of CPUs of one node does not show "
            "the network. Type: --link 10Gbit/s"
        )


def _sizes(numbers: Iterable[int], setup: Setup, batch: float | None) -> list[Size]:
    g, sizes = setup.cluster.ranks_per_node, list[Size]()
    for n in numbers:
        facts.require_nodes(g, n)
        sizes.append(Size(n, math.ceil(n / g), batch))
    return sizes


def _read_sizes(options: argparse.Namespace, setup: Setup) -> list[Size]:
    g, last = setup.cluster.ranks_per_node, setup.points[-1].size
    numbers = {*(options.n or ()), *(n * g for n in options.nodes or ())}
    if not numbers:
        numbers = {max(last.num_ranks, g) * 2**k for k in range(4)}
    sizes, most = _sizes(sorted(numbers), setup, last.batch), options.max_global_batch
    ranks = setup.program.model_ranks
    if whole := options.global_batch:
        sizes = [s._replace(batch=whole * ranks / s.num_ranks) for s in sizes]
        for size in sizes:
            facts.require_near(setup, size.batch or 0.0, "--global-batch")
    if most is None:
        return sizes
    kept = [s for s in sizes if s.num_ranks / ranks * (s.batch or most) <= most]
    if last.batch is None or not kept:
        raise UsageError(
            f"--max-global-batch must allow {sizes[0].num_ranks} ranks of a known "
            f"--batch, got {most} and {last.batch or 'none'}. Give another."
        )
    return kept


def _read_numbers(text: str) -> list[int]:
    """Read ``16,64,512``, or ``2..1024`` for all doublings."""
    first, dots, last = text.partition("..")
    words = [first, last] if dots else text.split(",")
    numbers: list[int] = []
    if all(re.fullmatch("[1-9][0-9]{0,6}", word) for word in words):
        numbers = [int(word) for word in words]
        if dots:
            doubled = (numbers[0] << k for k in range(24))
            numbers = [n for n in doubled if n <= numbers[1]]
    if not 0 < len(numbers) <= _MOST_SIZES:
        raise UsageError(
            f"must be up to {_MOST_SIZES} numbers of at least 1, got {text!r}. Write "
            "them as 16,64,512 or 2..1024."
        )
    return numbers


def _read_points(text: str) -> list[tuple[int, float]]:
    pairs = (word.partition("=")[::2] for word in text.split(","))
    try:
        return [(whole_number(1)(n), facts.number_from()(speed)) for n, speed in pairs]
    except UsageError as error:
        raise UsageError(
            "must be speeds by number of ranks, as 1=253,8=1282, but one "
            f"{str(error).rstrip('.')}."
        ) from None


def _read_unit(text: str) -> tuple[str, float | None]:
    unit, colon, count = text.partition(":")
    one_of(*_UNITS)(unit)
    usual = None if unit == "tokens" else 1.0
    return unit, facts.number_from(1)(count) if colon else usual


def _read_samples(options: argparse.Namespace) -> float | None:
    samples, dataset = options.samples, options.dataset_samples
    if samples is not None and (options.epochs or dataset) is not None:
        raise UsageError(
            "--samples cannot be combined with --epochs and --dataset-samples. Drop "
            "one of them."
        )
    if options.epochs is not None and dataset is not None:
        samples = options.epochs * dataset
    if samples is None and (options.cost or options.epochs is not None):
        raise UsageError(
            "a cost needs --samples, or --epochs and --dataset-samples. Type: "
            "--samples 115M"
        )
    return samples


def _fit_lines(options: argparse.Namespace, cases: Iterable[_Case]) -> Iterable[str]:
    """Yield the bytes that a rank of each mesh sends and holds, by formulas."""
    meshes = set[object]()
    for setup, sizes in cases:
        program, size = setup.program, sizes[-1]
        if program.num_parameters is None or program.mesh in meshes:
            continue
        meshes.add(program.mesh)
        zero, layout = program.exchange.zero, program.layout(size.num_ranks)
        sent = sum(step_traffic(layout, setup.step_sizes(size), zero).values())
        precision = Precision.BF16 if program.itemsize < 4 else Precision.FP32
        share = math.ceil(program.num_parameters / program.model_ranks)
        held = Sharding(layout.dp_shard, zero, precision).peak([share])
        yield (
            f"A rank of {layout} sends {format_size(round(sent))} a step and holds "
            f"{format_size(held.total_bytes)} for Adam, besides activations."
        )
        if options.limit is not None:
            shortage = held.shortage(options.limit)
            yield (
                f"It does not fit: {shortage}"
                if shortage
                else "It fits without activations."
            )


_TYPES: Mapping[str, Callable[[str], Any]] = {
    **{f"--{key.replace('_', '-')}": fact.read for key, fact in facts.FACTS.items()},
    "NUMBERS": _read_numbers,
    "--points": _read_points,
    "--unit": _read_unit,
    "--cost": facts.read_pairs,
    "SIZE": parse_size_bytes,
    "COUNT": parse_count,
    "X": facts.number_from(),
}
