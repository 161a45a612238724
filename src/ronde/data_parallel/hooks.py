"""How backward tells us of a gradient, and of its own end."""

import inspect
from collections.abc import Callable
from types import FrameType
from typing import cast
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from ronde.collectives.compiler import outside_compiler

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


def call_at_end_of_backward(method: Callable[[], None]) -> None:
    """Call ``method`` when the backward pass that runs now is over.

    Source: the way of torch's own DistributedDataParallel and FSDP2.
    """
    engine = Variable._execution_engine  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
    engine.queue_callback(method)


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
