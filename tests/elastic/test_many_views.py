"""Many views in the same processes leave nothing behind."""

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
ROOM_BYTES = 16 << 20  # the allocator's; one view's segments alone are as much


def held() -> tuple[int, int, int, int]:
    """Return this process's descriptors, threads, mapped files and resident bytes.

    What the last view left is being dropped. The C library keeps the stacks of some
    threads that are over, and maps memory for each that allocates: neither is a file.
    """
    for thread in threading.enumerate():
        if thread.name == ABORTING:
            thread.join()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    num_files = Path("/proc/self/maps").read_text().count(" /")
    num_fds, num_threads = (
        len(os.listdir(f"/proc/self/{each}"))  # noqa: PTH208
        for each in ("fd", "task")
    )
    return num_fds, num_threads, num_files, pages * 4096


def go_through_views(claim: Any, path: str, num_views: int) -> Any:
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
@pytest.mark.parametrize("num_views", [60, pytest.param(200, marks=pytest.mark.long)])
def test_nothing_is_left_behind(engine: str, num_views: int) -> None:
    with controlling(3) as (_, path):
        results = run_ranks_bare(
            3,
            go_through_views,
            path,
            num_views,
            timeout_s=1.0 * num_views,
            environment={"RONDE_ENGINE": engine},
        )
    for _, (*early, early_bytes), (*late, late_bytes) in results:
        for before, after in zip(early, late, strict=True):
            assert after <= before + 2
        assert late_bytes < early_bytes + ROOM_BYTES
