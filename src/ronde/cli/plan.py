"""``ronde plan``: what a training would need, before anything of it is started."""

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from ronde.arguments import CommandParser, read_number, read_one_of, refuse_verb
from ronde.cli.topo import load_hosts, print_json
from ronde.errors import UsageError
from ronde.parallel.layout import Layout
from ronde.parallel.memory import OptimizerName, Precision, RankMemory, Sharding
from ronde.parallel.traffic import StepSizes, step_traffic
from ronde.units import counted, format_size, parse_size_bytes

_HELP = """\
usage: ronde plan memory FILE --mesh AXES         what a rank would hold in a step
       ronde plan memory --params COUNT --mesh AXES
       ronde plan traffic --params COUNT --mesh AXES [SOURCE ...]
                                                  what it would send, and how long

Nothing is started. ronde plan VERB --help shows more about a verb.
"""
_MODEL_OPTIONS = """\
  --params COUNT  parameters of the whole model, as 7B, 350M or 7e9
  --blocks N      blocks that are gathered one by one (default: 32)
  --precision NAME
                  what is computed in: fp32 or bf16 (default: fp32)
"""
_ZERO_OPTION = """\
  --zero N        what dp_shard divides: 1 the optimizer's state, 2 gradients,
                  too, 3 all; 0 nothing (default: 3)
"""
_LAST_OPTIONS = """\
  --json          print one object of JSON
  -h, --help      show this help and exit
"""
_MEMORY_HELP = f"""\
usage: ronde plan memory FILE --mesh AXES [options]
       ronde plan memory --params COUNT --mesh AXES [options]

Show what a rank would hold at the peak of a training step. Nothing is started, and no
memory taken for the model.

FILE is a Python program that defines build(), which returns the model, batch(), the
tensors of one rank, and loss_of(model, *batch); make_optimizer(parameters), too, if it
is not AdamW. One step is run without data, as parallelize() of ronde.torch.parallel
would have it. With --params formulas give weights, gradients and optimizer state of a
model of equal blocks; activations are not in them.

options:
  --mesh AXES     sizes such as dp_shard=8,tp=2, of pp, dp_replicate, dp_shard
                  and tp; -1 is what is left of -n
  -n RANKS        ranks of the job (default: the product of the sizes)
{_ZERO_OPTION}\
  --device NAME   cpu or cuda, with FILE (default: what is here); on cpu the
                  process itself and what its allocator keeps are counted
  --limit SIZE    memory of a rank's device, as 80GiB; exit with 1 if it is
                  less than needed
{_LAST_OPTIONS}
in place of FILE:
{_MODEL_OPTIONS}\
  --optimizer NAME
                  adam, sgd-momentum or sgd (default: adam)

exit code: 0, 1 --limit is less than needed, 64 a layout or a file that cannot be used

example:
  ronde plan memory --params 7B --mesh dp_shard=8 --precision bf16 --limit 80GiB
"""
_TRAFFIC_HELP = f"""\
usage: ronde plan traffic --params COUNT --mesh AXES [SOURCE ...] [options]

Show what the busiest rank sends in a training step along each axis of a layout, and how
long its slowest link takes for that, if no computation hides it.

options:
  --mesh AXES     sizes such as dp_shard=8,tp=2, of pp, dp_replicate, dp_shard
                  and tp; -1 is what is left of one rank for each GPU
  -n RANKS        ranks of a host (default: its GPUs)
{_MODEL_OPTIONS}\
{_ZERO_OPTION}\
  --hidden N      width of the activations between blocks; for tp and pp
  --tokens N      rows of them that a rank has in a step: batch times sequence
  --root DIR      read a saved tree that holds sys and proc, in place of this
                  machine
{_LAST_OPTIONS}
SOURCE is a topology of a host in any form that ronde topo reads. One host stands for as
many like it as are needed. Without one it is this machine.

example:
  ronde plan traffic topo.xml --params 70B --mesh dp_shard=8,tp=8 --precision bf16 \\
      --blocks 80 --hidden 8192 --tokens 8192
"""
_EXIT_SHORT = 1
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_FORMULA_OPTIONS = ("params", "blocks", "precision", "optimizer")
_OPTIMIZERS = {name.value.lower().replace(" ", "-"): name for name in OptimizerName}
_NEEDED = ("build", "batch", "loss_of")
_PROGRAM = "ronde_planned_program"  # The name of its module; not __main__.


def run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if words[0] not in _VERBS:
        refuse_verb(words[0], [*_VERBS], "ronde plan")
    run_verb, help_text, positionals = _VERBS[words[0]]
    command = f"ronde plan {words[0]}"
    options = CommandParser(command, help_text, positionals=positionals).read(words[1:])
    return 0 if options is None else run_verb(options)


def _plan_memory(options: argparse.Namespace) -> int:
    layout, zero = _read_layout(options), _read_zero(options)
    if options.n is not None:
        layout = layout.resolve(_read_ranks(options))
    elif -1 in layout.sizes.values():
        raise UsageError(
            f"-n must be given where --mesh has -1, got {layout}. Type: -n 8"
        )
    limit = None
    if options.limit is not None:
        limit = parse_size_bytes(options.limit, "--limit")
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
    return _EXIT_SHORT if shortage else 0


def _read_layout(options: argparse.Namespace) -> Layout:
    if options.mesh is None:
        raise UsageError("--mesh must be given, got none. Type: --mesh dp_shard=8")
    layout = Layout.parse(options.mesh)
    if layout.cp != 1:
        raise UsageError(
            f"--mesh must have no cp here, got {layout}: what it brings depends on the "
            "attention. Leave it out."
        )
    return layout


def _read_ranks(options: argparse.Namespace) -> int:
    return read_number("-n", options.n, "Type: -n 8", least=1)


def _read_zero(options: argparse.Namespace) -> int:
    return read_number("--zero", options.zero or "3", "Type: --zero 3", most=3)


def _by_formula(options: argparse.Namespace, layout: Layout, zero: int) -> RankMemory:
    if options.params is None:
        raise UsageError(
            "FILE or --params must be given, got neither. Type: ronde plan memory "
            "--help"
        )
    if options.device is not None:
        raise UsageError(
            f"--device must be with a FILE, got {options.device}. Leave it out: "
            "formulas count tensors alone."
        )
    optimizer = read_one_of("--optimizer", options.optimizer or "adam", [*_OPTIMIZERS])
    num_blocks = _read_blocks(options)
    num_params = _read_count(options.params) // (layout.tp * layout.pp)
    num_own = -(-num_blocks // layout.pp)
    if num_params < num_own:
        raise UsageError(
            f"--params must give each block of each rank one at least, got "
            f"{options.params} for {num_blocks} blocks. Give the whole model's."
        )
    sharding = Sharding(
        layout.dp_shard, zero, _read_precision(options), _OPTIMIZERS[optimizer]
    )
    share, rest = divmod(num_params, num_own)
    return sharding.peak([share + (place < rest) for place in range(num_own)])


def _plan_traffic(options: argparse.Namespace) -> int:
    # Who plans memory alone needs none of these.
    from ronde.render.topo_tables import tabulate_traffic
    from ronde.topology.placement.mesh import plan_mesh

    layout, zero = _read_layout(options), _read_zero(options)
    if options.params is None:
        raise UsageError("--params must be given, got none. Type: --params 7B")
    per_host = None if options.n is None else _read_ranks(options)
    plan = plan_mesh(load_hosts(options), layout, per_host)
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
    print(f"{where}; what a rank sends in a step\n")
    print(tabulate_traffic(plan, sent), end="")
    return 0


def _read_sizes(options: argparse.Namespace, layout: Layout) -> StepSizes:
    itemsize = 4 if _read_precision(options) is Precision.FP32 else 2
    num_params = _read_count(options.params) / (layout.tp * layout.pp)
    num_blocks, rows = _read_blocks(options), [0, 0]
    if layout.tp * layout.pp > 1:
        for place, name in enumerate(("hidden", "tokens")):
            given = getattr(options, name)
            if given is None:
                raise UsageError(
                    f"--{name} must be given where --mesh has tp or pp, got none. "
                    f"Type: --{name} 4096"
                )
            cure = f"Type: --{name} 4096"
            rows[place] = read_number(f"--{name}", given, cure, least=1)
    width, height = rows
    return StepSizes(
        num_params * itemsize, width * height * itemsize, -(-num_blocks // layout.pp)
    )


def _read_blocks(options: argparse.Namespace) -> int:
    return read_number("--blocks", options.blocks or "32", "Type: --blocks 32", least=1)


def _read_precision(options: argparse.Namespace) -> Precision:
    known = list(Precision)
    return Precision(read_one_of("--precision", options.precision or "fp32", known))


def _read_count(text: str) -> int:
    match = re.fullmatch(
        r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)([kmbt]?)", text.lower()
    )
    count = int(float(match[1]) * _COUNT_UNITS[match[2]]) if match else 0
    if not 0 < count < 10**18:
        raise UsageError(
            f"--params must be a number of parameters, got {text!r}. Write it as 7B, "
            "350M or 7e9."
        )
    return count


def _refuse_formula_options(options: argparse.Namespace) -> None:
    for name in _FORMULA_OPTIONS:
        if getattr(options, name) is not None:
            raise UsageError(
                f"--{name} must be without a FILE, which says it by itself, got "
                f"{options.file}. Leave one out."
            )


def _by_a_step(options: argparse.Namespace, layout: Layout, zero: int) -> RankMemory:
    path, device = Path(options.file), options.device
    if layout.pp > 1:
        raise UsageError(
            f"--mesh must have no pp with a FILE, got {layout}. Give the layers of one "
            "stage without pp, or --params."
        )
    if zero < 2:
        raise UsageError(
            f"--zero must be 2 or 3 with a FILE, got {zero}. --params has 0 and 1, too."
        )
    if device is not None:
        read_one_of("--device", device, ["cpu", "cuda"])
    program = _load(path)
    # It takes torch a second to be imported.
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
    """Run a program as a module, with its folder on the path as Python has it."""
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
                f"{path} must define {', '.join(f'{each}()' for each in _NEEDED)}, got "
                f"no {name}(). See ronde plan --help."
            )
    return program


_VERBS: Mapping[str, tuple[Callable[..., int], str, Mapping[str, str]]] = {
    "memory": (_plan_memory, _MEMORY_HELP, {"file": "?"}),
    "traffic": (_plan_traffic, _TRAFFIC_HELP, {"sources": "*"}),
}
