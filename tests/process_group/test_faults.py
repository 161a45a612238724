"""Faults: ranks that die, are late, or make different calls."""

import gc
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import weakref
from datetime import timedelta

import pytest
import torch
from tests.conformance.test_faults import By
from tests.limits import HANG_S
from tests.process_group.groups import AUTO, ENGINES, Setting, every, run_in_group
from tests.ranks import run_ranks, run_ranks_bare
from tests.resources import least_resources
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel

from ronde.errors import CollectiveError
from ronde.process_group import Attendance, RondeProcessGroup, SideStore

HANG = timedelta(seconds=HANG_S)
BRIEF = timedelta(seconds=0.5)
"""The timeout of calls that must fail."""
on_engines = pytest.mark.parametrize("setting", [*ENGINES[:2], ENGINES[3]], ids=str)


def message_of(call, *args, **kwargs):
    """Return the first line of the error that a call of the group raises."""
    try:
        call(*args, **kwargs)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    raise AssertionError("nothing was raised")


# Ranks that die


def die_in_backward():
    """Kill rank 1 in the third backward; return the other ranks' errors."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)))
    seen = []

    def die(_):
        seen.append(None)
        if dist.get_rank() == 1 and len(seen) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    model.module[1].weight.register_hook(die)
    for _ in range(2):
        model(torch.ones(2, 9)).sum().backward()
    loss = model(torch.ones(2, 9)).sum()
    with pytest.raises(RuntimeError) as raised:
        loss.backward()
    with pytest.raises(CollectiveError) as again:
        dist.all_reduce(torch.ones(1))
    assert isinstance(again.value, dist.DistBackendError)
    return str(raised.value)


@pytest.mark.parametrize(
    "setting", [*ENGINES[:2], Setting("auto", 2), Setting("hierarchical", 4)], ids=str
)
def test_rank_killed_in_backward(setting):
    first, _, *others = run_in_group(setting, die_in_backward, dying=[1])
    for message in (first, *others):
        assert "PeerLostError" in message, message


# Ranks that come late


def wait_twice():
    """Let waits for rank 1 expire, then wait again until it has made the call."""
    store = dist.distributed_c10d._get_default_store()
    rank, size, total = dist.get_rank(), dist.get_world_size(), torch.ones(1)
    if rank == 1:
        for other in {*range(size)} - {rank}:
            store.wait([f"gave up {other}"], HANG)
    work = dist.all_reduce(total, async_op=True)
    if rank != 1:
        with pytest.raises(CollectiveError, match=r"within the 0\.5 s of this wait"):
            work.wait(BRIEF)
        store.set(f"gave up {rank}", "")
    work.wait()
    dist.all_reduce(total)
    assert total == size**2


@on_engines
def test_call_goes_on_after_a_brief_wait(setting):
    run_in_group(setting, wait_twice)


def wait_in_brief_group(communicator, port):
    """Use a short timeout for the calls, but not for connecting."""
    rank, size = communicator.rank, communicator.size
    store = dist.TCPStore("127.0.0.1", port, timeout=HANG)
    group = RondeProcessGroup(communicator, store, timedelta(seconds=2))
    others = [f"over {other}" for other in range(size) if other != 1]
    if rank == 1:
        store.wait(others, HANG)
        return
    with pytest.raises(
        CollectiveError, match=r"(rank 1 did not make this call)|(from ranks \[1\])"
    ):
        group.barrier().wait()
    store.set(f"over {rank}", "")
    store.wait(others, HANG)


@pytest.mark.waits
@pytest.mark.parametrize("engine", ["auto", "gloo"])
def test_timeout_names_the_absent_rank(engine):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    by = By(engine)
    run_ranks(3, wait_in_brief_group, store.port, timeout_s=HANG_S, connecting=by)


@pytest.mark.waits
def test_a_lost_store_does_not_delay_a_late_call():
    """A clone of the store would try to connect until its timeout."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(minutes=30))
    del server
    attendance = Attendance(SideStore(store), 0, 2)
    attendance.note(1)
    assert attendance.find_absent(1) == []


class Continuing(logging.Handler):
    """Continues the process that a warning reports as stopped."""

    def emit(self, record):
        os.kill(
            int(re.search(r"kill -CONT (\d+)", record.getMessage())[1]), signal.SIGCONT
        )


def stop_for_a_while():
    """Stop rank 1; rank 0 continues it after the warning."""
    if dist.get_rank() == 0:
        logging.getLogger("ronde").addHandler(Continuing())
    total = torch.ones(1)
    dist.all_reduce(total)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(total)
    return total.item()


def test_stopped_rank_is_not_lost():
    assert run_in_group(AUTO, stop_for_a_while) == [9.0] * 3


def monitor():
    """Rank 0's error names the late ranks, and the group stays usable."""
    group, rank = dist.group.WORLD, dist.get_rank()
    group.monitored_barrier(HANG)
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 0 timed out"):
            group.monitored_barrier(timedelta(0), True)
        with pytest.raises(RuntimeError, match="Ranks 1, 2 failed to"):
            group.monitored_barrier(BRIEF, True)
    dist.barrier()


def test_monitored_barrier_names_absent_ranks():
    run_in_group(AUTO, monitor)


# Calls that do not fit


def other_shape(rank):
    dist.all_reduce(torch.ones(3 + (rank == 1)))


def other_dtype(rank):
    dist.all_reduce(torch.ones(3, dtype=torch.float64 if rank == 1 else None))


def other_order(rank):
    if rank == 1:
        dist.broadcast(torch.ones(3), 0)
    else:
        dist.all_reduce(torch.ones(3))


def mismatch(call):
    rank, size = dist.get_rank(), dist.get_world_size()
    message = message_of(call, rank)
    for _ in range(2):
        tensor = torch.full((3,), rank + 1.0)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [size * (size + 1) / 2] * 3
    return message


def test_mismatch():
    calls = [other_shape, other_dtype, other_order]
    first, *others = run_in_group(AUTO, every, *((mismatch, call) for call in calls))
    assert others == [first] * 2


def fail_in_backward(call, raised):
    """Fail while the last layer's bucket is reduced; then train normally."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = DistributedDataParallel(layers, bucket_cap_mb=1e-5)

    def train(inputs):
        model.zero_grad()
        model(inputs).sum().backward()

    train(torch.ones(1, 3))  # after it there are as many buckets as are asked for
    inputs = torch.ones(1, 3, requires_grad=True)
    inputs.register_hook(lambda _: call(rank))
    with pytest.raises(raised) as failure:
        train(inputs)
    model = DistributedDataParallel(layers, bucket_cap_mb=1e-5)
    for step in range(3):
        train(torch.full((1, 3), rank + 1.0 + step))
        mean = (size + 1) / 2 + step
        expected = mean * layers[1].weight.detach().sum(0)[:, None].expand(3, 3)
        torch.testing.assert_close(layers[0].weight.grad, expected)
    return str(failure.value).splitlines()[0]


def fail(rank):
    raise KeyError("on every rank")


def test_failure_in_backward():
    first, *others = run_in_group(
        AUTO,
        every,
        (fail_in_backward, other_shape, CollectiveError),
        (fail_in_backward, other_order, CollectiveError),
        (fail_in_backward, fail, KeyError),
    )
    assert others == [first] * 2


# Beginning and end


def begin_again(_):
    """Return the resources held, without Python's cycle collector."""
    gc.disable()
    counts = []
    for turn in range(10):
        dist.init_process_group("ronde", timeout=HANG)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == dist.get_world_size()
        pair = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            dist.broadcast(tensor, 1, group=pair)
        if turn % 2:
            message_of(other_shape, dist.get_rank())
        dist.destroy_process_group()
        if turn in (4, 9):
            counts.append(least_resources())
    return counts


def test_groups_free_their_resources():
    for early, late in run_ranks_bare(
        3, begin_again, launcher="torchrun", timeout_s=HANG_S
    ):
        assert late == early


def use_after_end():
    group = dist.group.WORLD
    kept = torch.ones(100)
    work = dist.all_reduce(kept, async_op=True)
    work.wait()
    other = dist.new_group()
    dist.destroy_process_group(other)
    with pytest.raises(CollectiveError):
        other.allreduce([torch.ones(1)]).wait()
    with pytest.raises(CollectiveError):
        other.barrier().wait()
    dist.all_reduce(torch.ones(1))
    group.shutdown()
    group.shutdown()
    with pytest.raises(CollectiveError) as raised:
        dist.all_reduce(torch.ones(1))
    with pytest.raises(CollectiveError):
        dist.broadcast(torch.ones(1), 0)
    assert work.wait()
    assert kept.tolist() == [dist.get_world_size()] * 100
    return str(raised.value)


@on_engines
def test_use_after_end(setting):
    run_in_group(setting, use_after_end)


def use_in_fork():
    """Make a call in a forked child; return its error."""
    size = dist.get_world_size()
    dist.all_reduce(torch.ones(1))
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, message_of(dist.all_reduce, torch.ones(1)).encode())
            dist.destroy_process_group()
            weakref.finalize._exitfunc()  # what Python does when it ends
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size
    return os.read(reading, 1000).decode()


@on_engines
def test_use_in_fork(setting):
    for message in run_in_group(setting, use_in_fork):
        assert "cannot be used in its fork" in message


def load_in_workers():
    multiprocessing.current_process()._config["daemon"] = False  # it may have children
    rows = torch.utils.data.DataLoader(
        list(range(20)), num_workers=2, batch_size=5, multiprocessing_context="fork"
    )
    total = torch.zeros(1)
    for row in rows:
        total += row.sum()
        dist.all_reduce(torch.ones(1))
    del rows
    dist.all_reduce(total)
    return total.item()


def test_data_loader():
    assert run_in_group(AUTO, load_in_workers) == [570.0] * 3


# Programs of their own. They fork their ranks, so that torch is imported once.

RANKS = """
import os, sys
from datetime import timedelta

import torch
from torch import distributed as dist

torch.set_num_threads(1)
import torch._dynamo, ronde.process_group.creation

def is_rank(size, path):
    "Return the rank in each rank; in this program, None when all have ended."
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            dist.init_process_group(
                "ronde", init_method=f"file://{path}", rank=rank, world_size=size,
                timeout=timedelta(seconds=120),
            )
            return rank
        children.append(child)
    for child in children:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None
"""

EXITS = """
for turn in range(2):
    rank = is_rank(2, f"{sys.argv[1]}/{turn}")
    if rank is None:
        continue
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 50))
    model(torch.ones(1, 50)).sum().backward()
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(3)]
    if turn:  # else they are left under way
        for work in works:
            work.wait()
        raise SystemExit(3 + rank)
    break
"""


def run_program(source, *args):
    done = subprocess.run(
        [sys.executable, "-c", source, *args],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_exits_without_destroy(tmp_path):
    done = run_program(RANKS + EXITS, str(tmp_path))
    assert done.stdout.split() == ["0", "0", "3", "4"], done.stderr
    assert "Traceback" not in done.stderr


BROKEN = """
import sys
import torch
from torch import distributed as dist
assert not any(name.startswith("ronde.") for name in set(sys.modules) - {
    "ronde.torch_entry"})
sys.modules["ronde.process_group"] = None  # importing it fails from here on
print(torch.ones(2).sum().item())
options = {"init_method": f"file://{sys.argv[1]}/store", "rank": 0, "world_size": 1}
try:
    dist.init_process_group("ronde", **options)
except ImportError as error:
    print("refused")
dist.init_process_group("gloo", **options)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
print("gloo")
del sys.modules["ronde.process_group"]
options["init_method"] += "d"
dist.init_process_group("ronde", **options)
dist.barrier()
print(dist.get_backend())
"""


def test_without_import_and_with_a_broken_ronde(tmp_path):
    done = run_program(BROKEN, str(tmp_path))
    assert done.stdout.split() == ["2.0", "refused", "gloo", "ronde"]
