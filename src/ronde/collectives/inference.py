"""Inference mode is a thread's own; work that another thread does needs it as well."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
_NOTHING = nullcontext()


def in_mode_of_caller(work: Callable[P, T]) -> Callable[P, T]:
    """Return ``work`` as it would be if this thread called it now.

    A tensor that was made in ``torch.inference_mode()`` may be written to there alone.
    """
    is_inference = torch.is_inference_mode_enabled()

    @wraps(work)
    def carry_out(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(mode=is_inference):
            return work(*args, **kwargs)

    return carry_out


def writing_to(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Enter inference mode where one of the tensors was made there.

    In it all of them may be written to.
    """
    for tensor in tensors:
        if tensor.is_inference():
            return torch.inference_mode()
    return _NOTHING
