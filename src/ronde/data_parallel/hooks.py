"""How backward announces gradients and its own end, and where it writes them.

Note [Gradient accumulation fusion]
    The gradient of a linear layer's weight is a matrix product. Backward puts it into
    memory of its own, from where it is copied into the bucket. Megatron's layers write
    it to its final place instead. Here that happens below any layers: while the node of
    the product runs, a ``TorchDispatchMode`` turns the ``mm`` that makes the gradient
    into ``mm(..., out=view)``. Kernel, operands and so the bits are the same; autograd
    makes the view ``parameter.grad`` without a copy.

    The nodes are found when the first gradient of a backward pass arrives, by a walk
    from the tensors that ``backward()`` was called on: so the layer that comes first in
    backward is never fused.

    A gradient is fused only where nobody can see the difference. The graph must use the
    weight once, in one product (so not if it is tied, cast by autocast, parametrized,
    or compiled), ``parameter.grad`` must be None and its place in the bucket unused.
    Nobody else may have a hook where the gradient passes: it might keep the tensor,
    which the sum over all ranks overwrites. The one hook that cannot be seen is a
    tensor hook on a transposed weight: what ``weight.t().register_hook()`` keeps, it
    must clone.
"""

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import maybe_current_level
from torch.autograd import Variable, forward_ad
from torch.autograd.function import BackwardCFunction
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

from ronde.collectives.torch_modes import outside_compiler
from ronde.data_parallel.buckets import Gradient

MIN_FUSED_BYTES = 2 << 20
"""Below that a fusion costs more than it saves: 50 us for the dispatch in Python."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_LEAF = "torch::autograd::AccumulateGrad"
_PRODUCTS = ("AddmmBackward0", "MmBackward0")
_MM = torch.ops.aten.mm.default


def add_hook(
    gradient: Gradient, index: int, method: Callable[[int], None], *, is_before: bool
) -> RemovableHandle:
    """Call a bound method each time backward has added to a gradient, or before it.

    Its object is held weakly. A frozen parameter is hooked too.
    """
    target = weakref.WeakMethod(method)

    @outside_compiler
    def call(_: Tensor) -> None:
        alive = target()
        if alive is not None:
            alive(index)

    # Torch hooks only what requires a gradient, but keeps the hook when it is frozen.
    parameter = gradient.parameter
    was_trained = parameter.requires_grad
    parameter.requires_grad_()
    leaf = cast("Any", parameter)
    register = (
        leaf.register_hook if is_before else leaf.register_post_accumulate_grad_hook
    )
    handle: RemovableHandle = register(call)
    parameter.requires_grad_(was_trained)
    gradient.num_hooks += 1
    if not is_before:
        gradient.hook_id = handle.id
    return handle


def is_last_hook(gradient: Gradient) -> bool:
    """Return whether ours is the last hook on a gradient; see that it is from now on.

    The hooks after ours are to find the gradient, which ours takes away.
    """
    hooks = cast("Any", gradient.parameter)._post_accumulate_grad_hooks  # noqa: SLF001
    if len(hooks) == 1 or next(reversed(hooks)) == gradient.hook_id:
        return True
    if gradient.hook_id in hooks:
        hooks[gradient.hook_id] = hooks.pop(gradient.hook_id)
    return False


def call_at_end_of_backward(
    method: Callable[[], None], keep_failure: Callable[[BaseException], None]
) -> None:
    """Call ``method`` after this backward pass; where that cannot raise, keep it."""
    callback = method
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(module, "in_compiled_autograd_region", False):
        # It queues callbacks and never calls them. It releases them when its backward
        # pass is over, also when that raised.
        @outside_compiler
        def call_at_release() -> None:
            try:
                method()
            except BaseException as error:  # noqa: BLE001  a finalizer cannot raise
                keep_failure(error)

        callback = partial(_nothing)
        weakref.finalize(callback, call_at_release).atexit = False
    engine = Variable._execution_engine  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
    engine.queue_callback(callback)


def current_backward() -> int:
    return torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001


def is_nested_backward() -> bool:
    """Return whether this backward runs inside another one's node: checkpointing."""
    # A node written in Python is always called through this function.
    return _caller(BackwardCFunction.apply.__code__) is not None


def _caller(code: CodeType) -> FrameType | None:
    """Return the innermost frame of this thread that runs ``code``."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def is_fusible(parameter: Tensor) -> bool:
    """Return whether its gradient may be fused in some pass; equal on all ranks."""
    return (
        parameter.is_cpu
        and parameter.ndim == 2
        and parameter.dtype in _DTYPES
        and parameter.is_contiguous()
        and parameter.nbytes >= MIN_FUSED_BYTES
        and type(parameter) in (nn.Parameter, Tensor)
    )


def fuse(gradients: Sequence[Gradient]) -> list[RemovableHandle]:
    """Have this backward pass write gradients to their places; return the hooks."""
    backward = current_backward()
    by_weight = {g.parameter: g for g in gradients if g.is_fusible}
    if not by_weight or backward < 0:
        return []
    code = _engine_run_backward.__code__
    frame = _caller(code)
    outputs: Iterable[Tensor | GradientEdge] = ()
    if frame is not None:
        outputs = frame.f_locals[code.co_varnames[0]]
    roots = [o.grad_fn if isinstance(o, Tensor) else o.node for o in outputs]
    handles: list[RemovableHandle] = []
    for gradient, path in _paths([r for r in roots if r is not None], by_weight):
        before = partial(_before_product, gradient, path, backward)
        handles.append(path[0].register_prehook(before))
    return handles


def _paths(
    roots: Sequence[Node], by_weight: Mapping[Tensor, Gradient]
) -> list[tuple[Gradient, Sequence[Node]]]:
    """Return the nodes from product to weight, where a weight is used but once."""
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
    leaves = [leaf for leaf in leaves if num_uses[leaf] == 1 and leaf in user]
    paths: list[tuple[Gradient, Sequence[Node]]] = []
    for leaf in leaves:
        path = [user[leaf], leaf]
        if path[0].name() == "TBackward0" and num_uses[path[0]] == 1:
            path.insert(0, user.get(path[0], leaf))
        if path[0].name() in _PRODUCTS and leaf.name() == _LEAF:
            gradient = by_weight.get(cast("Any", leaf).variable)
            if gradient is not None:
                paths.append((gradient, path))
    return paths


def _before_product(
    gradient: Gradient, path: Sequence[Node], backward: int, grads: Sequence[Any]
) -> None:
    """Have the node that runs next write the product to its place, if that is right."""
    grad, view = grads[0], gradient.view
    if (
        grad is not None
        and view is not None
        and gradient.is_open
        and not (gradient.was_used or gradient.is_written)
        and gradient.parameter.grad is None
        and backward == current_backward()
        and not _is_special()
        and not _is_hooked(gradient, path)
    ):
        # It is taken off again by the engine, which gives every node a fresh state.
        _push_mode(_IntoView(gradient, view, grad.data_ptr()))


def _is_special() -> bool:
    """Return whether somebody looks at single operations, or differentiates them."""
    level = cast("int", forward_ad._current_level)  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
    return (
        level >= 0
        or torch.is_grad_enabled()  # create_graph
        or torch.is_anomaly_enabled()
        or _get_current_dispatch_mode() is not None
        or maybe_current_level() is not None  # torch.func
    )


def _is_hooked(gradient: Gradient, path: Sequence[Node]) -> bool:
    """Return whether anybody but us has hooks where the gradient passes."""
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
    handle: RemovableHandle = register(_nothing)
    table = cast("Any", handle).hooks_dict_ref()
    handle.remove()
    return bool(table)


def _nothing(*_: object) -> None:
    pass


class _IntoView(TorchDispatchMode):
    """Sends one ``mm``, the one that makes a gradient, to the gradient's place."""

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
        if func is _MM and out is not None:
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
        # The node's other product, the gradient of its input, has the weight for one.
        return (
            self._grad_address in addresses
            and self._gradient.parameter.data_ptr() not in addresses
            and (left.shape[0], right.shape[1]) == out.shape
            and left.dtype == right.dtype == out.dtype
        )
