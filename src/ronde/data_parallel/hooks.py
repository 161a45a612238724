"""Hooks on gradients and on the end of backward."""

import inspect
import sys
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from ronde.collectives.torch_modes import outside_compiler
from ronde.data_parallel.buckets import Gradient


def add_hook(
    gradient: Gradient, index: int, method: Callable[[int], None], *, is_before: bool
) -> RemovableHandle:
    """Hook a gradient: call a bound method before or after backward adds to it.

    The method's object is held weakly. Frozen parameters are hooked too.
    """
    target = weakref.WeakMethod(method)

    @outside_compiler
    def call(_: Tensor) -> None:
        alive = target()
        if alive is not None:
            alive(index)

    # torch adds hooks only while a parameter requires a gradient, but keeps them.
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
    """Return True if the reducer's hook is the last one; else move it to the end.

    Later hooks would not find the gradient, as the reducer's hook removes it.
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
    """Call ``method`` after this backward pass.

    Exceptions that cannot be raised there are passed to ``keep_failure``.
    """
    callback = method
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(module, "in_compiled_autograd_region", False):
        # Compiled autograd queues callbacks without calling them, and releases them
        # after backward, even if that raised.
        @outside_compiler
        def call_at_release() -> None:
            try:
                method()
            except BaseException as error:  # noqa: BLE001  a finalizer cannot raise
                keep_failure(error)

        def release() -> None:
            pass

        callback = release
        weakref.finalize(release, call_at_release).atexit = False
    engine = Variable._execution_engine  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
    engine.queue_callback(callback)


def current_backward() -> int:
    return torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001


def is_nested_backward() -> bool:
    """Return True in a backward run inside another (reentrant checkpointing)."""
    # The engine calls nodes written in Python through this function.
    return caller_frame(BackwardCFunction.apply.__code__) is not None


def caller_frame(code: CodeType) -> FrameType | None:
    """Return the innermost frame of this thread that runs ``code``."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame
