"""``ronde plan``: what a training would need, before anything of it is started."""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from ronde.arguments import CommandParser, read_number, read_one_of, refuse_verb
from ronde.errors import UsageError
from ronde.parallel.layout import Layout
from ronde.parallel.memory import OptimizerName, Precision, RankMemory, Sharding
from ronde.plain_values import to_plain
from ronde.units import counted, format_size, parse_size_bytes

_HELP = """\
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
  --zero N        what dp_shard divides: 1 the optimizer's state, 2 gradients,
                  too, 3 all; 0 nothing (default: 3)
  --limit SIZE    memory of a rank's device, as 80GiB; exit with 1 if it is
                  less than needed
  --json          print one object of JSON
  -h, --help      show this help and exit

with --params:
  --params COUNT  parameters of the whole model, as 7B, 350M or 7e9
  --blocks N      blocks that are gathered one by one (default: 32)
  --precision NAME
                  what is computed in: fp32 or bf16 (default: fp32)
  --optimizer NAME
                  adam, sgd-momentum or sgd (default: adam)

exit code: 0, 1 --limit is less than needed, 64 a layout or a file that cannot be used

example:
  ronde plan memory --params 7B --mesh dp_shard=8 --precision bf16 --limit 80GiB
"""
_VERBS = ("memory",)
_EXIT_SHORT = 1
_VERSION = 1  # of the JSON form: changes when a field changes its meaning or goes
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
        refuse_verb(words[0], _VERBS, "ronde plan")
    parser = CommandParser("ronde plan memory", _HELP, positionals={"file": "?"})
    options = parser.read(words[1:])
    return 0 if options is None else _plan_memory(options)


def _plan_memory(options: argparse.Namespace) -> int:
    if options.mesh is None:
        raise UsageError("--mesh must be given, got none. Type: --mesh dp_shard=8")
    layout = _read_layout(options)
    zero = read_number("--zero", options.zero or "3", "Type: --zero 3", most=3)
    limit = None
    if options.limit is not None:
        limit = parse_size_bytes(options.limit, "--limit")
    if options.file is None:
        memory = _by_formula(options, layout, zero)
    else:
        _refuse_formula_options(options)
        memory = _by_a_step(Path(options.file), layout, zero)
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
        form = {"form": "ronde-plan-memory", "version": _VERSION}
        print(json.dumps(to_plain({**form, **content}), indent=1))
    else:
        ranks = counted(layout.num_ranks, "rank")
        print(f"{layout}: {ranks}, zero {zero}; a rank at the peak of a step\n")
        print(memory, end="")
        if options.file is None:
            print("\nActivations are not counted.")
        if shortage:
            print(f"\nIt does not fit: {shortage}")
        elif limit is not None:
            left = limit - memory.total_bytes
            print(f"\nIt fits: {format_size(left)} of {format_size(limit)} are left.")
    return _EXIT_SHORT if shortage else 0


def _read_layout(options: argparse.Namespace) -> Layout:
    layout = Layout.parse(options.mesh)
    if options.n is not None:
        layout = layout.resolve(read_number("-n", options.n, "Type: -n 8", least=1))
    elif -1 in layout.sizes.values():
        raise UsageError(
            f"-n must be given where --mesh has -1, got {layout}. Type: -n 8"
        )
    if layout.cp > 1:
        raise UsageError(
            f"--mesh must have no cp here, got {layout}: what it saves depends on the "
            "attention. Leave it out."
        )
    return layout


def _by_formula(options: argparse.Namespace, layout: Layout, zero: int) -> RankMemory:
    if options.params is None:
        raise UsageError(
            "FILE or --params must be given, got neither. Type: ronde plan memory "
            "--help"
        )
    precision = read_one_of("--precision", options.precision or "fp32", list(Precision))
    optimizer = read_one_of("--optimizer", options.optimizer or "adam", [*_OPTIMIZERS])
    cure = "Type: --blocks 32"
    num_blocks = read_number("--blocks", options.blocks or "32", cure, least=1)
    num_params = _read_count(options.params) // (layout.tp * layout.pp)
    num_own = -(-num_blocks // layout.pp)
    if num_params < num_own:
        raise UsageError(
            f"--params must give each block of each rank one at least, got "
            f"{options.params} for {num_blocks} blocks. Give the whole model's."
        )
    sharding = Sharding(
        layout.dp_shard, zero, Precision(precision), _OPTIMIZERS[optimizer]
    )
    share, rest = divmod(num_params, num_own)
    return sharding.peak([share + (place < rest) for place in range(num_own)])


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


def _by_a_step(path: Path, layout: Layout, zero: int) -> RankMemory:
    if layout.pp > 1:
        raise UsageError(
            f"--mesh must have no pp with a FILE, got {layout}. Give the layers of one "
            "stage without pp, or --params."
        )
    if zero < 2:
        raise UsageError(
            f"--zero must be 2 or 3 with a FILE, got {zero}. --params has 0 and 1, too."
        )
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
