"""Tensor-parallel plans for blocks with the usual names of layers."""

from collections.abc import Iterable
from typing import NamedTuple, cast

from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
)

from ronde.errors import UsageError


class _Pair(NamedTuple):
    """Names of the layers that are cut by columns, and of the one cut by rows."""

    columns: tuple[str, ...]
    row: str
    optional: tuple[str, ...] = ()  # further columns, of gated blocks


_PAIRS = (
    _Pair(("q_proj", "k_proj", "v_proj"), "o_proj"),
    _Pair(("q_proj", "k_proj", "v_proj"), "out_proj"),
    _Pair(("wq", "wk", "wv"), "wo"),
    _Pair(("up_proj",), "down_proj", ("gate_proj",)),
    _Pair(("w1",), "w2", ("w3",)),
    _Pair(("fc1",), "fc2"),
    _Pair(("linear1",), "linear2"),
    _Pair(("c_fc",), "c_proj"),
    _Pair(("up",), "down", ("gate",)),
)


def tensor_parallel_plan(model: nn.Module, tp: int) -> dict[str, ParallelStyle]:
    """Return a plan for ``parallelize_module``, with an entry for each layer.

    Within one module the first layers (``q_proj``, ``up_proj``, ``w1``, ``fc1`` ...)
    are cut by columns and the last (``o_proj``, ``down_proj``, ``w2``, ``fc2`` ...) by
    rows, as in Megatron (arXiv:1909.08053). Attention must derive its number of heads
    from its projections, ``view(*shape, -1, head_dim)``; ``parallelize`` tests it.

    Raises:
        UsageError: No module has such layers, or ``tp`` does not divide one.
    """
    plan: dict[str, ParallelStyle] = {}
    for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        children = cast("Iterable[tuple[str, nn.Module]]", module.named_children())
        linears = {n: child for n, child in children if isinstance(child, nn.Linear)}
        for columns, row, optional in _PAIRS:
            if row not in linears or not all(each in linears for each in columns):
                continue
            prefix = f"{name}." if name else ""
            for column in (*columns, *(each for each in optional if each in linears)):
                _require_divisible(
                    prefix + column, "out_features", linears[column].out_features, tp
                )
                plan[prefix + column] = ColwiseParallel()
            _require_divisible(
                prefix + row, "in_features", linears[row].in_features, tp
            )
            plan[prefix + row] = RowwiseParallel()
    if not plan:
        pairs = ", ".join(f"{pair.columns[0]}/{pair.row}" for pair in _PAIRS)
        raise UsageError(
            f"{type(model).__name__} has no linear layers with known names for "
            f"tp={tp}, such as {pairs}. Pass a plan to parallelize(): "
            "plan={'blocks.*.in': ColwiseParallel(), 'blocks.*.out': RowwiseParallel()}"
        )
    return plan


def _require_divisible(layer: str, size: str, features: int, tp: int) -> None:
    if features % tp:
        raise UsageError(
            f"{size} of {layer} must be a multiple of tp={tp}, got {features}. Choose "
            "another tp, or another size of the layer."
        )
