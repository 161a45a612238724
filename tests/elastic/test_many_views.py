"""Two hundred views in the same processes leave nothing behind."""

import ctypes
import gc
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.membership_controller import become_member, controlling
from tests.ranks import run_ranks_bare

import ronde.torch as hvd
from ronde.collectives.scope import ABORTING
from ronde.errors import CollectiveError
from ronde.torch.lifetime import reform

ENGINES = ("shared_memory", "gloo", "hierarchical")
VIEWS = 200
_M_ARENA_MAX = -8
ROOM_BYTES = 16 << 20  # the allocator's; one view's segments alone are as much


def held() -> tuple[int, int, int, int]:
    """Return this process's descriptors, threads, mappings and resident bytes.

    What the last view left is being dropped.
    """
    for thread in threading.enumerate():
        if thread.name == ABORTING:
            thread.join()
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    num_mappings = len(Path("/proc/self/maps").read_text().splitlines())
    num_fds = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    return num_fds, threading.active_count(), num_mappings, pages * 4096


def go_through_views(claim: Any, path: str) -> Any:
    # Else threads that allocate at the same moment have glibc map one more arena, at
    # random, up to eight for each core.
    assert ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1) == 1
    become_member(path, claim.rank)
    hvd.init()
    model = torch.nn.Linear(256, 256)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), model.named_parameters()
    )
    measured = [held()]
    for view in range(VIEWS):
        with suppress(CollectiveError):
            hvd.allreduce(torch.ones(4), name="x")
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()
        reform("it goes on")
        optimizer.zero_grad()
        if view in (VIEWS // 4, VIEWS - 1):
            measured.append(held())
    hvd.shutdown()
    return measured


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_left_behind(engine: str) -> None:
    with controlling(3) as (_, path):
        results = run_ranks_bare(
            3,
            go_through_views,
            path,
            timeout_s=110.0,
            environment={"RONDE_ENGINE": engine},
        )
    for _, (*early, early_bytes), (*late, late_bytes) in results:
        for before, after in zip(early, late, strict=True):
            assert after <= before + 2
        assert late_bytes < early_bytes + ROOM_BYTES
