"""Call functions on ranks with a ``ronde`` process group."""

import ctypes
import os
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from tests.limits import HANG_S
from tests.ranks import run_ranks_bare
from torch import Tensor, distributed as dist

from ronde.process_group import GroupOptions

_CLONE_NEWUTS = 0x04000000


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine and a size; the ranks of hierarchical are on two hosts."""

    engine: str
    size: int

    def __str__(self) -> str:
        return f"{self.engine}-{self.size}"


ENGINES = [
    Setting(engine, 3) for engine in ("auto", "gloo", "scheduled", "hierarchical")
]
AUTO = ENGINES[0]
SMOKE = [Setting("auto", 2), Setting("hierarchical", 4)]
"""Other sizes, for one case per file."""
NEVER = timedelta(seconds=5 * HANG_S)
"""A timeout that groups never reach within a test."""


def run_in_group(
    setting: Setting, fn: Callable[..., Any], *args: Any, dying: Collection[int] = ()
) -> list[Any]:
    """Call ``fn(*args)`` on the ranks of a group without an effective timeout."""
    return run_ranks_bare(
        setting.size,
        _run,
        fn,
        args,
        setting.engine,
        launcher="torchrun",
        dying=dying,
        timeout_s=HANG_S,
    )


def _run(info: Any, fn: Callable[..., Any], args: tuple[Any, ...], engine: str) -> Any:
    if engine == "hierarchical":
        _live_on_host("ab"[info.rank % 2])
    dist.init_process_group("ronde", pg_options=GroupOptions(engine), timeout=NEVER)
    result = fn(*args)
    dist.destroy_process_group()
    return result


def _live_on_host(name: str) -> None:
    """Give this process its own host name, if permitted."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWUTS) == 0:
        socket.sethostname(f"{name}{os.getppid()}")


def every(*calls: tuple[Any, ...]) -> list[Any]:
    """Run several calls one after the other in one group."""
    return [fn(*args) for fn, *args in calls]


def run_all(setting: Setting, calls: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the results of each call on all ranks of one group, by name."""
    of_ranks = run_in_group(setting, every, *calls.values())
    return dict(zip(calls, zip(*of_ranks, strict=True), strict=True))


def same(result: Tensor, expected: Tensor) -> None:
    """Compare bit for bit, as not every dtype can be compared."""
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    result, expected = (
        t.detach().contiguous().reshape(-1).view(torch.uint8)
        for t in (result, expected)
    )
    assert torch.equal(result, expected)
