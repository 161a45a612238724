"""How backward tells us of a gradient, and of its own end."""

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import cast
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from ronde.collectives.torch_modes import outside_compiler

_Register = Callable[[Callable[[Tensor], None]], RemovableHandle]


def call_on_gradient(
    parameter: Tensor, index: int, method: Callable[[int], None]
) -> RemovableHandle:
    """Call ``method(index)`` each time backward has added to ``parameter.grad``.

    ``method`` is a bound method; its object is held weakly. A frozen parameter is
    hooked too, and calls once it is thawed.
    """
    register = cast("_Register", parameter.register_post_accumulate_grad_hook)
    return _hook(parameter, register, index, method)


def call_before_gradient(
    parameter: Tensor, index: int, method: Callable[[int], None]
) -> RemovableHandle:
    """Call ``method(index)`` each time before backward adds to ``parameter.grad``."""
    register = cast("_Register", parameter.register_hook)
    return _hook(parameter, register, index, method)


def _hook(
    parameter: Tensor,
    register: "_Register",
    index: int,
    method: Callable[[int], None],
) -> RemovableHandle:
    target = WeakMethod(method)

    @outside_compiler
    def call(_: Tensor) -> None:
        alive = target()
        if alive is not None:
            alive(index)

    # Torch hooks only what requires a gradient, but keeps the hook when it is frozen.
    was_trained = parameter.requires_grad
    parameter.requires_grad_()
    handle = register(call)
    parameter.requires_grad_(was_trained)
    return handle


def call_at_end_of_backward(
    method: Callable[[], None], keep_failure: Callable[[BaseException], None]
) -> None:
    """Call ``method`` when the backward pass that runs now is over.

    Args:
        method: What to call.
        keep_failure: Takes what it raises where backward cannot: see ``_AtRelease``.

    Source: the way of torch's own DistributedDataParallel and FSDP2.
    """
    if _is_autograd_compiled():
        method = _AtRelease(method, keep_failure)
    engine = Variable._execution_engine  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
    engine.queue_callback(method)


class _AtRelease:
    """Calls a method when it is released, unless it was called before.

    Compiled autograd queues callbacks and never calls them. It releases them when its
    backward pass is over, also when that raised.
    """

    def __init__(
        self, method: Callable[[], None], keep_failure: Callable[[BaseException], None]
    ) -> None:
        self._method = method
        self._keep_failure = keep_failure
        self._is_called = False

    def __call__(self) -> None:
        self._is_called = True
        self._method()

    @outside_compiler
    def __del__(self) -> None:
        if self._is_called:
            return
        try:
            self._method()
        except BaseException as error:  # noqa: BLE001  a finalizer cannot raise
            self._keep_failure(error)


def _is_autograd_compiled() -> bool:
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(module, "in_compiled_autograd_region", False)


def current_backward() -> int:
    """Return a number of the backward pass that runs now; -1 outside of any."""
    return torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001


def is_nested_backward() -> bool:
    """Say whether this backward runs inside another one's node.

    Reentrant checkpointing does that: the end of such a backward is not the end of the
    outer one. A node written in Python is always called through this function.
    """
    entry = BackwardCFunction.apply.__code__
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code is entry:
            return True
        frame = frame.f_back
    return False
