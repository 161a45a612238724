"""Process sets, timelines and tuning from one view to the next."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.limits import HANG_S
from tests.membership_controller import become_member, controlling
from tests.ranks import run_ranks_bare

import ronde.torch as hvd
from ronde.errors import CollectiveError, UsageError
from ronde.membership import Rules, own_member
from ronde.session import reform


def sums_of(sets: list[hvd.ProcessSet]) -> list[Any]:
    """Return each set's ranks, and the sum over them of all that have it."""
    found: list[Any] = []
    for index, each in enumerate(sets):
        total = None
        if each.included():
            tensor = torch.tensor([hvd.rank() + 1.0])
            name = f"set{index}"
            total = hvd.allreduce(tensor, name=name, op=hvd.Sum, process_set=each)
        found.append((each.ranks, total and total.item()))
    return found


def until_lost() -> None:
    """Reduce until the view is over."""
    try:
        while True:
            hvd.allreduce(torch.ones(4))
    except CollectiveError:
        pass


def lose_and_grow(claim: Any, path: str) -> Any:
    channel = become_member(path, claim.rank)
    sets = [hvd.ProcessSet(ranks) for ranks in ([0, 2], [1, 2, 3], [3])]
    hvd.init(process_sets=sets)
    member = own_member()
    assert member is not None
    found = [sums_of(sets[:2])]
    if member.view.view == 0:
        if channel.number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        until_lost()
        reform()
        found.append(sums_of(sets[:2]))
        with pytest.raises(UsageError, match="have left the job"):
            hvd.allreduce(torch.ones(1), process_set=sets[2])
        if channel.number == 0:
            channel.order("grow")
        until_lost_or_asked(member)
        reform()
        found.append(sums_of(sets[:2]))
    member.done(member.step)
    return found


def until_lost_or_asked(member: Any) -> None:
    while True:
        hvd.allreduce(torch.ones(4))
        member.step += 1
        member.allow(member.step + 1)
        if member.should_settle(member.step):
            return


@pytest.mark.parametrize("engine", ["shared_memory", "gloo"])
def test_process_sets_keep_who_is_left(engine: str) -> None:
    with controlling(4, Rules(1, 4)) as (_, path):
        results = run_ranks_bare(
            5,
            lose_and_grow,
            path,
            dying=[3],
            timeout_s=HANG_S,
            environment={"RONDE_ENGINE": engine},
        )
    first, second = [([0, 2], 4.0), ([1, 2, 3], 9.0)], [([0, 2], 4.0), ([1, 2], 5.0)]
    expected = [first, second, second]
    for number in range(3):
        own = [
            [(ranks, total if number in ranks else None) for ranks, total in each]
            for each in expected
        ]
        assert results[number] == own
    # Of the new one the first two sets are what the others have.
    assert results[4] == [[([0, 2], None), ([1, 2], None)]]


def record(claim: Any, path: str, file: str) -> None:
    channel = become_member(path, claim.rank)
    hvd.init()
    hvd.allreduce(torch.ones(2), name="before")
    Path(f"{file}.{channel.number}").touch()
    if channel.number == 2:
        while not all(Path(f"{file}.{number}").exists() for number in range(2)):
            time.sleep(0.01)  # else the others' would end with the view
        os.kill(os.getpid(), signal.SIGKILL)
    until_lost()
    reform()
    hvd.allreduce(torch.ones(2), name="after")
    member = own_member()
    assert member is not None
    member.done(1)
    hvd.shutdown()


def test_a_timeline_has_a_part_for_each_view(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    with controlling(3) as (_, path):
        run_ranks_bare(
            3,
            record,
            path,
            str(file),
            dying=[2],
            timeout_s=HANG_S,
            environment={"HOROVOD_TIMELINE": str(file)},
        )
    first = json.loads(file.read_text())
    second = json.loads((tmp_path / "timeline.view1.json").read_text())
    assert "before" in str(first)
    assert "after" not in str(first)
    assert "view 1: rank 2 on" in str(second)
    assert "after" in str(second)
