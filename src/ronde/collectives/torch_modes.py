"""torch's modes and memory: inference mode, the compiler, huge pages."""

import ctypes
import mmap
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame

P = ParamSpec("P")
T = TypeVar("T")
_NOTHING = nullcontext()


def in_mode_of_caller(work: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``work`` so that it runs in the inference mode of the current thread."""
    is_inference = torch.is_inference_mode_enabled()

    @wraps(work)
    def carry_out(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(mode=is_inference):
            return work(*args, **kwargs)

    return carry_out


def writing_to(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Return a context that allows writing to tensors made in inference mode."""
    for tensor in tensors:
        if tensor.is_inference():
            return torch.inference_mode()
    return _NOTHING


F = TypeVar("F", bound=Callable[..., Any])

_REASON = "ronde talks to other ranks outside of compiled code"


def outside_compiler(function: F) -> F:
    """Exclude ``function`` and all functions that it calls from ``torch.compile``."""
    # ``torch.compiler.disable`` uses a wrapper and imports ``torch._dynamo``. The
    # import takes seconds even in programs that compile nothing, each call costs a
    # microsecond more, and warnings point at the wrapper. This function marks the code
    # object instead, as the compiler marks its own functions.
    try:
        skip = eval_frame._FrameAction.SKIP  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
        strategy = eval_frame._FrameExecStrategy(skip, skip)  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
        code = cast("FunctionType", function).__code__
        eval_frame.set_code_exec_strategy(code, strategy)
    except AttributeError:  # another version of torch
        return cast("F", torch.compiler.disable(function, reason=_REASON))
    marks: dict[str, object] = function.__dict__
    marks["_torchdynamo_disable"] = True
    marks["_torchdynamo_disable_msg"] = _REASON
    return function


_HUGE_PAGE_BYTES = 2 << 20
_WORTH_BYTES = 4 * _HUGE_PAGE_BYTES
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise: Callable[[int, int, int], int] = _libc.madvise


def new_like(tensor: Tensor) -> Tensor:
    """Return an uninitialised tensor like ``tensor``, in huge pages if it is large."""
    # Touching 64 MiB for the first time takes 5 ms, and 16 ms in pages of 4 KiB.
    made = torch.empty_like(tensor)
    if made.is_cpu and made.nbytes >= _WORTH_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        begin = made.data_ptr()
        first = -(-begin // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        num_bytes = (begin + made.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        # This is only advice; the kernel may use small pages.
        _madvise(first, num_bytes, mmap.MADV_HUGEPAGE)
    return made
