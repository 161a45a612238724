"""Gradient accumulation fusion: backward writes weight gradients into buckets.

Fusion is off by default, as it depends on private functions of torch.

Note [Gradient accumulation fusion]
    The gradient of a linear layer's weight is a matrix product. Backward puts it into
    new memory, and then it is copied into the bucket. With fusion a
    ``TorchDispatchMode``, active while the node of the product runs, turns the ``mm``
    that makes the gradient into ``mm(..., out=view)``. Kernel and operands are the
    same, and so is every bit. Autograd assigns the view to ``parameter.grad`` without a
    copy.

    When the first gradient of a backward pass arrives, the nodes are found by a walk
    from the tensors that ``backward()`` was called on. So the layer that comes first in
    backward is never fused.

    A gradient is fused only if the program cannot see the difference. The graph must
    use the weight once, in one product (so the weight is not tied, cast by autocast,
    parametrized, or compiled), and ``parameter.grad`` must be None and the view unused.
    No hook but the reducer's may see the gradient, as it might keep the tensor, which
    the sum over all ranks overwrites. Only a tensor hook on a transposed weight cannot
    be detected: it must clone a gradient that it keeps.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad
from torch.autograd.graph import (
    GradientEdge,
    Node,
    _engine_run_backward,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,  # pyright: ignore[reportPrivateUsage]
    _push_mode,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils.hooks import RemovableHandle

from ronde.data_parallel.buckets import Gradient
from ronde.data_parallel.hooks import caller_frame, current_backward

_MIN_BYTES = 2 << 20  # below that, dispatch in Python costs more than the copy
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_LEAF = "torch::autograd::AccumulateGrad"
_PRODUCTS = ("AddmmBackward0", "MmBackward0")


def is_fusible(parameter: Tensor) -> bool:
    return (
        parameter.is_cpu
        and parameter.ndim == 2
        and parameter.dtype in _DTYPES
        and parameter.is_contiguous()
        and parameter.nbytes >= _MIN_BYTES
        and type(parameter) in (nn.Parameter, Tensor)
    )


def fuse(gradients: Sequence[Gradient]) -> list[RemovableHandle]:
    """Make this backward pass write gradients into buckets; return hook handles."""
    backward = current_backward()
    by_weight = {g.parameter: g for g in gradients if g.is_fusible}
    code = _engine_run_backward.__code__
    frame = caller_frame(code)
    if not by_weight or backward < 0 or frame is None:
        return []
    outputs: Iterable[Tensor | GradientEdge] = frame.f_locals[code.co_varnames[0]]
    roots = [o.grad_fn if isinstance(o, Tensor) else o.node for o in outputs]
    handles: list[RemovableHandle] = []
    for gradient, path in _paths([r for r in roots if r is not None], by_weight):
        before = partial(_before_product, gradient, path, backward)
        handles.append(path[0].register_prehook(before))
    return handles


def _paths(
    roots: Sequence[Node], by_weight: Mapping[Tensor, Gradient]
) -> list[tuple[Gradient, Sequence[Node]]]:
    """Return the nodes from product to weight, for each weight that is used once."""
    num_uses = Counter(roots)
    user: dict[Node, Node] = {}
    leaves: list[Node] = []
    unvisited = list(num_uses)
    while unvisited:
        node = unvisited.pop()
        edges = node.next_functions
        if not edges:
            leaves.append(node)
        for following, _ in edges:
            if following is None:
                continue
            if following not in num_uses:
                unvisited.append(following)
            num_uses[following] += 1
            user[following] = node
    paths: list[tuple[Gradient, Sequence[Node]]] = []
    for leaf in leaves:
        if num_uses[leaf] != 1 or leaf not in user or leaf.name() != _LEAF:
            continue
        path = [user[leaf], leaf]
        if path[0].name() == "TBackward0" and num_uses[path[0]] == 1:
            path.insert(0, user.get(path[0], leaf))
        gradient = by_weight.get(cast("Any", leaf).variable)
        if gradient is not None and path[0].name() in _PRODUCTS:
            paths.append((gradient, path))
    return paths


def _before_product(
    gradient: Gradient, path: Sequence[Node], backward: int, grads: Sequence[Any]
) -> None:
    """Make the next node write its product into the bucket, if that is allowed."""
    grad, view = grads[0], gradient.view
    level = cast("int", forward_ad._current_level)  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
    if (
        grad is not None
        and view is not None
        and gradient.is_open
        and not (gradient.was_used or gradient.is_written)
        and gradient.parameter.grad is None
        and backward == current_backward()
        and level < 0
        and not torch.is_grad_enabled()  # create_graph
        and not torch.is_anomaly_enabled()
        and _get_current_dispatch_mode() is None
        and maybe_current_level() is None  # torch.func
        and not _is_hooked(gradient, path)
    ):
        # The engine removes the mode, as it gives every node a fresh state.
        _push_mode(_IntoView(gradient, view, grad.data_ptr()))


def _is_hooked(gradient: Gradient, path: Sequence[Node]) -> bool:
    """Return True if a hook other than the reducer's sees the gradient."""
    parameter = cast("Any", gradient.parameter)
    tables = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)  # noqa: SLF001
    if sum(len(table) for table in tables if table) > gradient.num_hooks:
        return True
    registers = [path[0].register_hook]
    for node in path[1:]:
        registers += [node.register_prehook, node.register_hook]
    return any(map(_has_hooks, registers))


def _has_hooks(register: Any) -> bool:  # noqa: ANN401 - of two signatures
    # All hooks of a kind share one table, which a handle refers to.
    handle: RemovableHandle = register(_ignore)
    table = cast("Any", handle).hooks_dict_ref()
    handle.remove()
    return bool(table)


def _ignore(*_: object) -> None:
    pass


class _IntoView(TorchDispatchMode):
    """Dispatch mode that makes one ``mm`` write its gradient into the bucket."""

    def __init__(self, gradient: Gradient, view: Tensor, grad_address: int) -> None:
        super().__init__()
        self._gradient = gradient
        self._out: Tensor | None = view.detach()
        self._grad_address = grad_address

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        out = self._out
        if func is torch.ops.aten.mm.default and out is not None:
            left, right = args
            if self._makes_gradient(left, right, out):
                self._out = None
                self._gradient.is_written = True
                return torch.mm(left, right, out=out)
        return func(*args, **(kwargs or {}))

    def _makes_gradient(self, left: Tensor, right: Tensor, out: Tensor) -> bool:
        for factor in (left, right):
            is_plain = type(factor) in (Tensor, nn.Parameter)
            if not is_plain or factor.layout is not torch.strided:
                return False
        addresses = (left.data_ptr(), right.data_ptr())
        # The node's other product, the gradient of its input, has the weight as factor.
        return (
            self._grad_address in addresses
            and self._gradient.parameter.data_ptr() not in addresses
            and (left.shape[0], right.shape[1]) == out.shape
            and left.dtype == right.dtype == out.dtype
        )
