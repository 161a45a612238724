"""Tests that blocks give the same results whole and divided over tp.

The tests use random weights and a tiny input. They find attention with a fixed number
of heads, which gives wrong results when divided, and norms between the projections,
which get only a part of their gradient.
"""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from fnmatch import fnmatch
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils import _pytree as pytree

from ronde.errors import UsageError
from ronde.torch.parallel.equal_weights import gather_objects

_ALLOWED = 2.0**-5  # Relative to the largest value; TF32 has smaller errors.
_LEAST_SCALE = 2.0**-3  # Relative to the largest gradient: some are rounding errors.
_OUTPUT = "output"
_ROTARY = "position_embeddings"  # of transformers: cosines and sines for each head
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_PLAIN = {
    ColwiseParallel: (Replicate(), Shard(-1)),
    RowwiseParallel: (Shard(-1), Replicate()),
}


class _CallForm(NamedTuple):
    is_training: bool
    has_batch: bool  # The input has three dimensions; else two.
    repeats_input: bool  # Other arguments are the input, too; else None.


_CALL_FORMS = [
    _CallForm(*each) for each in product((True, False), (True, False), (False, True))
]


def require_same_results(
    model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]
) -> None:
    """Raise if a plan changes the output or the gradients of a block; collective.

    A block is a module with layers cut by columns and by rows. One block of each kind
    is tested, on a copy, if it accepts a single input tensor.

    Args:
        model: The model, not yet divided.
        mesh: A mesh of tp alone.
        plan: A plan for ``parallelize_module``.

    Raises:
        UsageError: A block gives different results when it is divided.
    """
    if dist.get_backend(mesh.get_group()) == "fake":
        return
    tried: set[object] = set()
    for name, own_plan in _blocks(model, mesh.size(), plan):
        block = model.get_submodule(name)
        kind = _kind(block)
        if kind in tried:
            continue
        tried.add(kind)
        if fault := _fault(block, mesh, own_plan):
            raise UsageError(
                f"{name or type(model).__name__} gives other results when divided over "
                f"tp={mesh.size()}: {fault}. Derive the number of heads from the "
                "projections, as in view(*shape, -1, head_dim), or pass a suitable "
                "plan to parallelize()."
            )


def turn_dropout_off(model: nn.Module) -> None:
    """Set the dropout rates of torch's own modules to zero."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def _blocks(
    model: nn.Module, tp: int, plan: Mapping[str, ParallelStyle]
) -> Iterator[tuple[str, dict[str, ParallelStyle]]]:
    """Yield blocks by name, inner ones first, with the plan of their layers."""
    modules: dict[str, nn.Module] = dict(cast("Any", model).named_modules())
    planned = {
        name: style
        for pattern, style in plan.items()
        for name in ([pattern] if pattern in modules else modules)
        if _matches(name, pattern)
    }
    for name in sorted(modules, key=lambda name: -len(name.split(".")) * bool(name)):
        prefix = f"{name}." if name else ""
        inner = {
            layer.removeprefix(prefix): style
            for layer, style in planned.items()
            if layer.startswith(prefix) and layer != name
        }
        own = {type(style) for layer, style in inner.items() if "." not in layer}
        if own >= _PLAIN.keys() and all(
            _is_plain(modules[prefix + layer], style, tp)
            for layer, style in inner.items()
        ):
            yield name, inner


def _matches(name: str, pattern: str) -> bool:
    words, patterns = name.split("."), pattern.split(".")
    return len(words) == len(patterns) and all(map(fnmatch, words, patterns))


def _is_plain(layer: nn.Module, style: Any, tp: int) -> bool:  # noqa: ANN401  any style
    """Return True for a linear layer that is cut evenly, with the usual layouts."""
    if type(style) not in _PLAIN or not isinstance(layer, nn.Linear):
        return False
    layouts = (*style.input_layouts, *style.output_layouts)
    is_even = layer.in_features % tp == 0 or isinstance(style, ColwiseParallel)
    is_even &= layer.out_features % tp == 0 or isinstance(style, RowwiseParallel)
    return is_even and style.use_local_output and layouts == _PLAIN[type(style)]


def _kind(block: nn.Module) -> object:
    """Return a key that is equal for blocks with the same computation."""
    shapes = [(n, p.shape) for n, p in _parameters(block)]
    settings = [
        (name, value)
        for module in block.modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and "idx" not in name
    ]
    return type(block), tuple(shapes), tuple(settings)


def _parameters(block: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return cast("Any", block).named_parameters()


def _fault(
    block: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]
) -> str:
    """Describe the first difference of the divided block; empty if there is none."""
    group, device = mesh.get_group(), torch.device(mesh.device_type)
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    column = next(n for n, style in plan.items() if isinstance(style, ColwiseParallel))
    width = cast("nn.Linear", block.get_submodule(column)).in_features
    # The length is a multiple of tp, so that a wrong view() does not raise.
    shape = (3, 2 * mesh.size(), width)
    with torch.random.fork_rng(devices), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        copy = _copy(block, device)
        way, wanted = (None, {}) if copy is None else _run_whole(copy, shape)
        if set(gather_objects(way, group)) != {way} or copy is None or way is None:
            return ""  # the same on all ranks
        parallelize_module(copy, mesh, dict(plan), src_data_rank=None)
        try:
            fault = _difference(_run(copy, way, shape), wanted)
        except Exception as error:  # noqa: BLE001  the model's own
            # The input may not fit the other arguments.
            fault = "" if way.repeats_input else f"{type(error).__name__}: {error}"
        faults: list[str] = gather_objects(fault, group)
        return next(filter(None, faults), "")


def _copy(block: nn.Module, device: torch.device) -> nn.Module | None:
    """Return a copy with random weights and no dropout; None if it cannot be made."""
    is_meta = any(parameter.is_meta for parameter in block.parameters())
    if any(buffer.is_meta for buffer in block.buffers()):
        return None  # they have no values
    try:
        copy = deepcopy(block)
        if is_meta:
            copy.to_empty(device=device)
        copy.to(device)
        if any(torch.finfo(p.dtype).bits < 32 for p in copy.parameters()):
            copy.float()
        generator = torch.Generator(device).manual_seed(0)
        for weight in copy.parameters():
            # Weights that start as zeros would hide differences in earlier layers.
            scale = weight.shape[-1] ** -0.5 if weight.ndim > 1 else 1.0
            with torch.no_grad():
                weight.normal_(0.0, scale, generator=generator)
    except Exception:  # noqa: BLE001  the model's own, such as of quantized weights
        return None
    turn_dropout_off(copy)
    return copy


def _run_whole(
    block: nn.Module, shape: tuple[int, ...]
) -> tuple[_CallForm | None, dict[str, Tensor]]:
    """Return the first call form that gives a deterministic result, and that result."""
    for way in _CALL_FORMS:
        try:
            torch.manual_seed(0)
            wanted = _run(block, way, shape)
            torch.manual_seed(1)
            is_random = bool(_difference(_run(block, way, shape), wanted))
            is_finite = all(bool(each.isfinite().all()) for each in wanted.values())
        except Exception:  # noqa: BLE001, S112  the model's own
            continue
        if is_finite and not is_random:
            return way, wanted
    return None, {}


def _run(block: nn.Module, way: _CallForm, shape: tuple[int, ...]) -> dict[str, Tensor]:
    block.train(way.is_training)
    block.zero_grad()
    weight = next(block.parameters())
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(shape, generator=generator, device="cpu")
    inputs = inputs if way.has_batch else inputs.flatten(0, 1)
    inputs = inputs.to(weight.device, weight.dtype).requires_grad_()
    other = inputs if way.repeats_input else None
    accepted = list(inspect.signature(block.forward).parameters.values())
    needed = [p.name for p in accepted if p.default is p.empty and p.kind not in _OPEN]
    others: dict[str, object] = dict.fromkeys(needed[1:], other)
    head_dim = getattr(block, "head_dim", None)
    if isinstance(head_dim, int) and _ROTARY in [each.name for each in accepted]:
        angles = inputs.detach()[..., :head_dim]
        others[_ROTARY] = (angles.cos(), angles.sin())
    leaves = pytree.tree_leaves(block(inputs, **others))
    outputs = next(t for t in leaves if isinstance(t, Tensor) and t.is_floating_point())
    outputs = _whole(outputs)
    found = {_OUTPUT: outputs.detach().clone()}
    if outputs.requires_grad:
        probe = torch.randn(outputs.shape, generator=generator, device="cpu")
        (outputs * probe.to(outputs)).sum().backward()
        gradients = [("its input", inputs), *_parameters(block)]
        found |= {
            f"gradient of {name}": _whole(tensor.grad)
            for name, tensor in gradients
            if tensor.grad is not None
        }
    return found


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """Describe the first wrong result and its error; empty if there is none."""
    if found[_OUTPUT].shape != wanted[_OUTPUT].shape:
        return ""  # only a part of it, meant for another block
    sizes = {name: float(tensor.abs().max()) for name, tensor in wanted.items()}
    largest = max((size for name, size in sizes.items() if name != _OUTPUT), default=0)
    for name, tensor in wanted.items():
        value = found[name] if name in found else torch.zeros_like(tensor)
        error = float((value - tensor).abs().max())
        least = 0.0 if name == _OUTPUT else _LEAST_SCALE * largest
        if not error <= _ALLOWED * max(sizes[name], least):
            size = sizes[name] or 1.0
            return f"{name} is off by {error / size:.2g} of its largest value"
    return ""
