"""Properties of shared memory: ownership, release, progress and wake-ups."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.limits import HANG_S
from tests.namespaces import why_not

from ronde.collectives import (
    Communicator,
    SharedMemoryEngine,
    connect,
    open_store,
    store_at,
)
from ronde.errors import CollectiveError, PeerLostError
from ronde.memory import available_memory, nearest_limit

MIB = 1 << 20


def shared(claim):
    return connect(claim, timeout_s=HANG_S, engine="shared_memory")


def held_bytes():
    """Return the bytes of ronde's memory that this process maps."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    bounds = [line.split()[0].split("-") for line in maps if "memfd:ronde" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in bounds)


def give_back(communicator):
    """Allocate repeatedly; keep only a view of a view, then nothing."""
    before = held_bytes()
    during = []
    for _ in range(5):
        tensor = communicator.allocate(MIB, torch.float32)
        communicator.all_reduce(tensor).wait()
        view = tensor[5:10].view(5, 1)
        del tensor
        during.append(held_bytes() - before)
        communicator.all_reduce(view).wait()
        assert communicator.size == 3
        del view
    communicator.all_reduce(torch.ones(MIB)).wait()  # frees unused regions
    gc.collect()
    return during, held_bytes() - before


def test_unreferenced_memory_is_freed(run_ranks):
    for during, after in run_ranks(3, give_back, connecting=shared):
        assert during == [3 * 4 * MIB] * 5
        assert after == 0


def close_all(claim):
    communicator = shared(claim)
    tensor = communicator.allocate(1000, torch.float32).fill_(1.0)
    copy = communicator.duplicate()
    copy.all_reduce(tensor).wait()
    assert held_bytes() > 0
    communicator.close()
    copy.close()
    del communicator, copy
    outlived = held_bytes()
    assert tensor.tolist() == [float(claim.size)] * 1000
    del tensor
    return outlived, held_bytes()


def test_closing_frees_all_memory_not_in_use(run_ranks_bare):
    for outlived, after in run_ranks_bare(2, close_all):
        assert outlived == 4096
        assert after == 0


def reduce_many_lengths(communicator):
    """Return the number of cached tensors and bytes after many lengths."""
    home = communicator.allocate(2 * MIB, torch.float32)
    for number in range(500):
        communicator.all_reduce(home[number:]).wait()
    for number in range(100):
        communicator.all_reduce(torch.ones(200_000 + number).bfloat16()).wait()
    del home
    kept = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    storages = [each.untyped_storage() for each in kept]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return len(kept), sum(sizes.values()) - held_bytes()


def test_caches_of_lengths_are_bounded(run_ranks):
    for num_tensors, num_bytes in run_ranks(2, reduce_many_lengths, connecting=shared):
        assert num_tensors < 7_000
        assert num_bytes < 8 * MIB


def differ(communicator):
    """Each pair of calls fails with one message on both ranks; later calls work."""
    ones = torch.ones(100_000)
    texts = []
    for first, second in (
        (lambda: communicator.all_reduce(ones), communicator.barrier),
        (
            lambda: communicator.all_reduce(ones),
            lambda: communicator.all_reduce(ones[:5]),
        ),
        (
            lambda: communicator.broadcast(ones, 0),
            lambda: communicator.broadcast(ones, 1),
        ),
        (
            lambda: communicator.all_gather(ones),
            lambda: communicator.reduce_scatter(ones),
        ),
    ):
        call = second if communicator.rank else first
        with pytest.raises(CollectiveError) as caught:
            call().wait()
        texts.append(str(caught.value))
        assert communicator.all_reduce(torch.ones(1)).wait().item() == 2.0
    with pytest.raises(CollectiveError) as caught:
        communicator.allocate(1 << 44, torch.float32)
    texts.append(str(caught.value))
    assert communicator.all_reduce(torch.ones(1)).wait().item() == 2.0
    if communicator.rank == 1:
        communicator.close()
    else:
        with pytest.raises(PeerLostError, match="rank 1 closed its communicator"):
            communicator.barrier().wait()
    return texts


def test_errors_of_calls_name_the_ranks(run_ranks):
    first, second = run_ranks(2, differ, connecting=shared)
    assert first == second
    assert "all_reduce of 100000 elements of torch.float32 by sum on rank 0" in first[0]
    assert "barrier on rank 1" in first[0]
    assert "of 5 elements" in first[1]
    assert "from 1 on rank 1" in first[2]
    assert "reduce_scatter" in first[3]
    assert "not enough shared memory: 2 ranks * 64TiB = 128TiB needed," in first[4]
    assert "available (" in first[4]


def leave_it_to_the_progress_thread(claim):
    """Rank 0 starts collectives, then waits for rank 1 through the store."""
    store = store_at(claim.store, HANG_S)
    communicator = shared(claim)
    tensor = torch.full((300_000,), 1.0 + claim.rank)
    if claim.rank == 0:
        works = [communicator.all_reduce(tensor), communicator.all_reduce(tensor)]
        store.wait(["through"])
        assert all(work.is_done() for work in works)
    else:
        communicator.all_reduce(tensor).wait()
        communicator.all_reduce(tensor).wait()
        store.set("through", "")
    communicator.close()
    return tensor.unique().tolist()


def test_a_computing_rank_makes_progress_in_the_background(run_ranks_bare):
    results = run_ranks_bare(2, leave_it_to_the_progress_thread)
    assert results == [[6.0], [6.0]]


@pytest.mark.parametrize("size", [2, 3])
def test_many_slots_from_one_tensor_into_another(run_ranks, size):
    """Less than a slot, several, and one more element."""

    def work(communicator):
        for numel in (5_000, 1 << 20, 3_000_001):
            source = torch.arange(float(numel)) % 1000 + communicator.rank
            tensor = torch.empty_like(source)
            before = source.clone()
            communicator.all_reduce(tensor, source=source, prescale=0.5).wait()
            every = sum(range(communicator.size))
            expected = torch.arange(float(numel)) % 1000 * communicator.size + every
            assert torch.equal(tensor, expected * 0.5)
            assert torch.equal(source, before)

    run_ranks(size, work)


PROGRAM = """
import torch, ronde.torch as hvd
hvd.init()
gradients = hvd.allreduce(torch.ones(4_000_000), op=hvd.Sum)
print(gradients[-1].item(), "memfd:ronde" in open("/proc/self/maps").read())
"""


def test_a_small_dev_shm_does_not_matter():
    """16 MB of gradients per rank with a /dev/shm of 64 KiB, as in many containers."""
    script = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    space = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if reason := why_not(space):
        pytest.skip(reason)
    run = [sys.executable, "-m", "ronde", "run", "-n", "2", "--no-prefix"]
    done = subprocess.run(
        [*space, *run, sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "2.0 True\n" * 2), done.stderr


def test_available_memory_is_that_of_the_tightest_cgroup(tmp_path):
    """In a job's container the parent group may have the lower limit."""
    for name, text in {
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n",
        "proc/self/cgroup": "4:memory:/job/step\n0::/job/step\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": "1000\n",
        "sys/fs/cgroup/job/memory.max": "6000000\n",
        "sys/fs/cgroup/job/memory.current": "3000000\n",
        "sys/fs/cgroup/job/memory.stat": "anon 5\ninactive_file 1000000\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "7\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = available_memory(tmp_path)
    assert found.num_bytes == 4_000_000
    assert found.source == "memory.max 6000000 of the control group"
    assert nearest_limit(str(tmp_path)) == (2_000_000, 6_000_000)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 100 kB\n")
    assert available_memory(tmp_path).num_bytes == 102_400


def without_naps(claim):
    """Connect with naps of an hour, so that a lost wake-up is noticed."""
    return Communicator(
        SharedMemoryEngine(
            open_store(claim, HANG_S),
            claim.rank,
            claim.size,
            timeout_s=HANG_S,
            first_nap_s=3600.0,
        )
    )


def meet_often(communicator, cores):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    for _ in range(200):
        communicator.barrier().wait()
    os.sched_setaffinity(0, before)
    return "met"


def test_no_wake_up_is_lost_where_there_are_more_ranks_than_cores(run_ranks):
    cores = sorted(os.sched_getaffinity(0))[:2]
    size = 4 * len(cores)
    assert run_ranks(size, meet_often, cores, connecting=without_naps) == ["met"] * size
