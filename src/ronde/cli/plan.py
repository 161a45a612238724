"""``ronde plan``: speed, memory and traffic of training, predicted."""

import argparse
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from ronde.arguments import CommandParser, refuse_verb, whole_number
from ronde.cli.topo import load_hosts, print_json
from ronde.errors import UsageError
from ronde.parallel.layout import Layout
from ronde.parallel.memory import OptimizerName, Precision, RankMemory, Sharding
from ronde.parallel.traffic import StepSizes, step_traffic
from ronde.units import counted, format_size, parse_count, parse_size_bytes

_MODEL_OPTIONS = """\
  --params COUNT  parameters of the whole model, as 7B, 350M or 7e9
  --blocks N      number of blocks, which are gathered one by one (default: 32)
  --precision {fp32,bf16}
                  precision of the computation (default: fp32)
"""
_ZERO_OPTION = """\
  --zero N        ZeRO stage of dp_shard: 1 shards the optimizer's state, 2 also
                  the gradients, 3 also the weights, 0 nothing (default: 3)
"""
_LAST_OPTIONS = """\
  --json          print one object of JSON
  -h, --help      show this help and exit
"""
_MEMORY_HELP = f"""\
usage: ronde plan memory FILE --mesh AXES [options]
       ronde plan memory --params COUNT --mesh AXES [options]

Show the memory of a rank at the peak of a training step. Nothing is started, and the
model takes no memory.

FILE is a Python program that defines build(), which returns the model, batch(), which
returns the tensors of one rank, and loss_of(model, *batch); if the optimizer is not
AdamW, also make_optimizer(parameters). One step runs on fake tensors, with the model
parallelized as by parallelize() of ronde.torch.parallel. With --params, formulas give
the weights, gradients and optimizer state of a model of equal blocks, without
activations.

options:
  --mesh AXES     sizes of pp, dp_replicate, dp_shard and tp, as
                  dp_shard=8,tp=2; -1 is the rest of -n
  -n RANKS        ranks of the job (default: the product of the sizes)
{_ZERO_OPTION}\
  --device {{cpu,cuda}}
                  with FILE (default: this machine's); cpu also counts the
                  process itself and its allocator's free memory
  --limit SIZE    memory of a rank's device, as 80GiB; exit with 1 if it does
                  not suffice
{_LAST_OPTIONS}
without FILE:
{_MODEL_OPTIONS}\
  --optimizer {{adam,sgd-momentum,sgd}}
                  (default: adam)

exit code: 0; 1 if --limit does not suffice; 64 for a wrong layout or file

example:
  ronde plan memory --params 7B --mesh dp_shard=8 --precision bf16 --limit 80GiB
"""
_TRAFFIC_HELP = f"""\
usage: ronde plan traffic --params COUNT --mesh AXES [SOURCE ...] [options]

Show the bytes that the busiest rank sends in a training step along each axis of a
layout, and the time its slowest link takes if no computation hides it.

options:
  --mesh AXES     sizes of pp, dp_replicate, dp_shard and tp, as
                  dp_shard=8,tp=2; -1 is the rest of one rank for each GPU
  -n RANKS        ranks of a host (default: one for each GPU)
{_MODEL_OPTIONS}\
{_ZERO_OPTION}\
  --hidden N      width of the activations between blocks, for tp and pp
  --tokens N      their rows on a rank in a step: batch times sequence length
  --root DIR      read sys and proc in DIR in place of this machine's
{_LAST_OPTIONS}
SOURCE is the topology of a host in any form that ronde topo reads (default: this
machine). One host stands for as many equal ones as needed.

example:
  ronde plan traffic topo.xml --params 70B --mesh dp_shard=8,tp=8 --precision bf16 \\
      --blocks 80 --hidden 8192 --tokens 8192
"""
_EXIT_TOO_LITTLE = 1
_FORMULA_OPTIONS = ("params", "blocks", "precision", "optimizer")
_OPTIMIZERS = {name.value.lower().replace(" ", "-"): name for name in OptimizerName}
_NEEDED = ("build", "batch", "loss_of")
_PROGRAM = "ronde_planned_program"  # the name of its module; not __main__
_MODULES = {"points": "ronde.cli.plan_points", "validate": "ronde.cli.plan_validate"}


def run(words: Sequence[str]) -> int:
    first = words[0] if words else "--help"
    if module := _MODULES.get(first):
        return import_module(module).run(words[1:])
    if first not in _VERBS:
        is_option = first.startswith("-")
        if not (is_option or Path(first).suffix or Path(first).exists()):
            refuse_verb(first, [*_VERBS, *_MODULES], "ronde plan")
        # Imported here: numpy takes a tenth of a second.
        from ronde.cli.plan_speed import run_speed

        return run_speed(words or [first])
    run_verb, help_text, positionals = _VERBS[words[0]]
    parser = CommandParser(
        f"ronde plan {words[0]}", help_text, types=_TYPES, positionals=positionals
    )
    parser.set_defaults(zero=3)
    options = parser.read(words[1:])
    return 0 if options is None else run_verb(options)


def _plan_memory(options: argparse.Namespace) -> int:
    layout, zero, limit = _require_layout(options), options.zero, options.limit
    if options.n is not None:
        layout = layout.resolve(options.n)
    elif -1 in layout.sizes.values():
        raise UsageError(
            f"-n is required with --mesh {layout}, which has -1. Type: -n 8"
        )
    if options.file is None:
        memory = _by_formula(options, layout, zero)
    else:
        _refuse_formula_options(options)
        memory = _by_a_step(options, layout, zero)
    shortage = "" if limit is None else memory.shortage(limit)
    if options.json:
        content = {
            "mesh": str(layout),
            "zero": zero,
            "terms_bytes": {term.name: term.size_bytes for term in memory.terms},
            "total_bytes": memory.total_bytes,
            "limit_bytes": limit,
            "shortage": shortage,
        }
        print_json("ronde-plan-memory", content)
    else:
        ranks = counted(layout.num_ranks, "rank")
        print(f"{layout}: {ranks}, zero {zero}; a rank at the peak of a step\n")
        print(memory, end="")
        if options.file is None:
            print("\nActivations and the process itself are not counted.")
        if shortage:
            print(f"\nIt does not fit: {shortage}")
        elif limit is not None:
            left = limit - memory.total_bytes
            print(f"\nIt fits: {format_size(left)} of {format_size(limit)} are left.")
    return _EXIT_TOO_LITTLE if shortage else 0


def _read_layout(text: str) -> Layout:
    layout = Layout.parse(text)
    if layout.cp != 1:
        raise UsageError(
            f"must have no cp here, got {layout}: the effect of cp depends on the "
            "attention. Leave cp out."
        )
    return layout


def _require_layout(options: argparse.Namespace) -> Layout:
    if options.mesh is None:
        raise UsageError("--mesh is required. Type: --mesh dp_shard=8")
    return options.mesh


def _by_formula(options: argparse.Namespace, layout: Layout, zero: int) -> RankMemory:
    if options.params is None:
        raise UsageError(
            "a FILE or --params is required. Type: ronde plan memory --help"
        )
    if options.device is not None:
        raise UsageError(
            f"--device {options.device} needs a FILE, as formulas only count tensors. "
            "Leave it out."
        )
    num_blocks = options.blocks or _DEFAULT_BLOCKS
    num_params = options.params // (layout.tp * layout.pp)
    num_own = -(-num_blocks // layout.pp)
    if num_params < num_own:
        raise UsageError(
            "--params must give each rank at least one parameter per block, got "
            f"{options.params} for {num_blocks} blocks. Give the number of parameters "
            "of the whole model."
        )
    optimizer = _OPTIMIZERS[options.optimizer or "adam"]
    sharding = Sharding(layout.dp_shard, zero, _precision(options), optimizer)
    share, rest = divmod(num_params, num_own)
    return sharding.peak([share + (index < rest) for index in range(num_own)])


def _plan_traffic(options: argparse.Namespace) -> int:
    # Imported here: plan memory does not need them.
    from ronde.render.topo_tables import tabulate_traffic
    from ronde.topology.placement.mesh import plan_mesh

    layout, zero = _require_layout(options), options.zero
    if options.params is None:
        raise UsageError("--params is required. Type: --params 7B")
    plan = plan_mesh(load_hosts(options), layout, options.n)
    layout = plan.layout
    sent = step_traffic(layout, _read_sizes(options, layout), zero)
    if options.json:
        axes = [
            {
                "axis": axis.axis,
                "sent_bytes": round(sent[axis.axis]),
                "gb_per_s": axis.gb_per_s,
                "link": axis.link,
            }
            for axis in plan.axes
        ]
        content = {"mesh": str(layout), "zero": zero, "axes": axes}
        print_json("ronde-plan-traffic", content)
        return 0
    hosts = counted(plan.num_hosts, "host")
    ranks = counted(layout.num_ranks, "rank")
    where = f"{layout}: {ranks} on {hosts}, zero {zero}"
    print(f"{where}; bytes that a rank sends in a step\n")
    print(tabulate_traffic(plan, sent), end="")
    return 0


def _read_sizes(options: argparse.Namespace, layout: Layout) -> StepSizes:
    itemsize = 4 if _precision(options) is Precision.FP32 else 2
    num_params = options.params / (layout.tp * layout.pp)
    num_blocks = options.blocks or _DEFAULT_BLOCKS
    num_activations = 0
    if layout.tp * layout.pp > 1:
        for name in ("hidden", "tokens"):
            if getattr(options, name) is None:
                raise UsageError(
                    f"--{name} is required if --mesh has tp or pp. Type: --{name} 4096"
                )
        num_activations = options.hidden * options.tokens
    return StepSizes(
        num_params * itemsize, num_activations * itemsize, -(-num_blocks // layout.pp)
    )


def _precision(options: argparse.Namespace) -> Precision:
    return Precision(options.precision or "fp32")


def _refuse_formula_options(options: argparse.Namespace) -> None:
    for name in _FORMULA_OPTIONS:
        if getattr(options, name) is not None:
            raise UsageError(
                f"--{name} cannot be used with a FILE, as the program {options.file} "
                "defines it. Leave one of them out."
            )


def _by_a_step(options: argparse.Namespace, layout: Layout, zero: int) -> RankMemory:
    path, device = Path(options.file), options.device
    if layout.pp > 1:
        raise UsageError(
            f"--mesh must have no pp with a FILE, got {layout}. Give the layers of one "
            "stage and a mesh without pp, or give --params instead of the FILE."
        )
    if zero < 2:
        raise UsageError(
            f"--zero must be 2 or 3 with a FILE, got {zero}. For 0 and 1 give --params."
        )
    program = _load(path)
    # Imported here: torch takes a second.
    from ronde.torch.parallel import estimate

    make_optimizer: Callable[[Any], Any] | None = program.get("make_optimizer")
    return estimate(
        program["build"],
        layout,
        program["batch"](),
        program["loss_of"],
        make_optimizer=make_optimizer,
        device_type=device,
        zero=zero,
    )


def _load(path: Path) -> Mapping[str, Any]:
    """Run a program as a module, with its folder on ``sys.path`` as in a script."""
    spec = spec_from_file_location(_PROGRAM, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UsageError(f"FILE must be a Python program, got {str(path)!r}.")
    module = module_from_spec(spec)
    sys.modules[_PROGRAM] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    program = vars(module)
    for name in _NEEDED:
        if not inspect.isroutine(program.get(name)):
            raise UsageError(
                f"{path} must define {', '.join(f'{each}()' for each in _NEEDED)}, but "
                f"has no {name}(). See ronde plan --help."
            )
    return program


_DEFAULT_BLOCKS = 32
_TYPES = {
    "-n": whole_number(1),
    "--zero": whole_number(0, 3),
    "N": whole_number(1),
    "AXES": _read_layout,
    "COUNT": parse_count,
    "SIZE": parse_size_bytes,
}
_VERBS: Mapping[str, tuple[Callable[..., int], str, Mapping[str, str]]] = {
    "memory": (_plan_memory, _MEMORY_HELP, {"file": "?"}),
    "traffic": (_plan_traffic, _TRAFFIC_HELP, {"sources": "*"}),
}
