"""Many views in the same processes leave nothing behind."""

import ctypes
import gc
import mmap
import resource
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.limits import HANG_S
from tests.membership_controller import become_member, controlling
from tests.ranks import run_ranks_bare
from tests.resources import least_resources

import ronde.torch as hvd
from ronde.collectives import ABORTING
from ronde.errors import CollectiveError
from ronde.session import reform

ENGINES = ("shared_memory", "gloo", "hierarchical")
_M_ARENA_MAX = -8
ROOM_BYTES = 16 << 20  # the allocator's; one view's segments alone are as much


def num_mappings() -> int:
    """Count what this process maps, but stacks, of which the C library keeps old ones.

    Each is of one size, behind a page that nobody may touch.
    """
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    left = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, *_, inode = line.split()[:5]
        start, end = (int(each, 16) for each in place.split("-"))
        is_stack = access == "rw-p" and end - start == stack
        is_guard = access == "---p" and end - start == mmap.PAGESIZE
        left += inode != "0" or not (is_stack or is_guard)
    return left


def held() -> tuple[int, int, int, int]:
    """Return this process's descriptors, threads, mappings and resident bytes.

    What the last view left is being dropped.
    """
    for thread in threading.enumerate():
        if thread.name == ABORTING:
            thread.join()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return *least_resources(), num_mappings(), pages * mmap.PAGESIZE


def go_through_views(claim: Any, path: str, num_views: int) -> Any:
    # Else threads that allocate at the same moment have glibc map one more arena, at
    # random, up to eight for each core.
    assert ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1) == 1
    gc.disable()  # nothing waits for it
    become_member(path, claim.rank)
    hvd.init()
    model = torch.nn.Linear(256, 256)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), model.named_parameters()
    )
    measured = [held()]
    for view in range(num_views):
        with suppress(CollectiveError):
            is_away = view % 4 == claim.rank  # the others wait for it in vain
            if not (is_away and view % 8 < 4):
                hvd.allreduce(torch.ones(4), name="x")
            if not is_away:
                model(torch.ones(1, 256)).sum().backward()
                optimizer.step()
        reform("it goes on")
        optimizer.zero_grad()
        if view in (num_views // 4, num_views - 1):
            measured.append(held())
    hvd.shutdown()
    return measured


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("num_views", [pytest.param(60, marks=pytest.mark.soak)])
def test_nothing_is_left_behind(engine: str, num_views: int) -> None:
    with controlling(3) as (_, path):
        results = run_ranks_bare(
            3,
            go_through_views,
            path,
            num_views,
            timeout_s=max(HANG_S, 1.0 * num_views),
            environment={"RONDE_ENGINE": engine},
        )
    for _, (*early, early_bytes), (*late, late_bytes) in results:
        for before, after in zip(early, late, strict=True):
            assert after <= before + 2
        assert late_bytes < early_bytes + ROOM_BYTES
