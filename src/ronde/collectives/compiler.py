"""Collectives run outside of what ``torch.compile`` compiles."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])

_REASON = "ronde talks to other ranks outside of compiled code"


def outside_compiler(function: F) -> F:
    """Have ``torch.compile`` leave ``function``, and all that it calls, as they are.

    A compiled function that calls it is compiled up to there and from there on.

    Note [Not torch.compiler.disable]
        That says the same by a wrapper. It imports ``torch._dynamo``, which takes
        seconds, also for programs that compile nothing; every call costs a microsecond
        more, and warnings point at the wrapper. Here the compiler finds the function's
        code marked when it meets it, in the way in which it marks its own.
    """
    try:
        skip = eval_frame._FrameAction.SKIP  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
        strategy = eval_frame._FrameExecStrategy(skip, skip)  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
        code = cast("FunctionType", function).__code__
        eval_frame.set_code_exec_strategy(code, strategy)
    except AttributeError:  # another torch
        return cast("F", torch.compiler.disable(function, reason=_REASON))
    marks: dict[str, object] = function.__dict__
    marks["_torchdynamo_disable"] = True
    marks["_torchdynamo_disable_msg"] = _REASON
    return function
