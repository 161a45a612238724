"""What is shared memory's own: whose it is, what becomes of it, who carries on."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.limits import HANG_S
from tests.namespaces import why_not
from torch.distributed import HashStore

from ronde.collectives import (
    Communicator,
    SharedMemoryEngine,
    connect,
    open_store,
    store_at,
    through_store,
)
from ronde.errors import CollectiveError, PeerLostError
from ronde.memory import available_memory

MIB = 1 << 20


def shared(claim):
    return connect(claim, timeout_s=HANG_S, engine="shared_memory")


def held_bytes():
    """Return how much of ronde's memory this process maps."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    bounds = [line.split()[0].split("-") for line in maps if "memfd:ronde" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in bounds)


def give_back(communicator):
    """Allocate again and again; keep a view of a view, then nothing."""
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
    communicator.all_reduce(torch.ones(MIB)).wait()  # it looks what is gone
    gc.collect()
    return during, held_bytes() - before


def test_what_nobody_refers_to_is_given_back(run_ranks):
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


def test_closing_gives_everything_back_but_what_is_in_use(run_ranks_bare):
    for outlived, after in run_ranks_bare(2, close_all):
        assert outlived == 4096
        assert after == 0


def reduce_many_lengths(communicator):
    """Return how many tensors and bytes are kept after ever more lengths."""
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


def test_lengths_that_never_come_again_are_forgotten(run_ranks):
    for num_tensors, num_bytes in run_ranks(2, reduce_many_lengths, connecting=shared):
        assert num_tensors < 7_000
        assert num_bytes < 8 * MIB


def test_what_ranks_told_each_other_does_not_stay_in_the_store():
    store, size = HashStore(), 3

    def tell(rank):
        exchange = through_store(store, rank, size, timeout_s=HANG_S)
        return [exchange(b"%d %d" % (turn, rank)) for turn in range(50)]

    with ThreadPoolExecutor(size) as threads:
        told = list(threads.map(tell, range(size)))
    expected = [[b"%d %d" % (turn, rank) for rank in range(size)] for turn in range(50)]
    assert told == [expected] * size
    assert store.num_keys() == size


def differ(communicator):
    """Each pair of calls fails on both ranks, in the same words; then all is well."""
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
    return texts


def test_calls_that_do_not_fit_are_named(run_ranks):
    first, second = run_ranks(2, differ, connecting=shared)
    assert first == second
    assert "all_reduce of 100000 elements of torch.float32 by sum on rank 0" in first[0]
    assert "barrier on rank 1" in first[0]
    assert "of 5 elements" in first[1]
    assert "from 1 on rank 1" in first[2]
    assert "reduce_scatter" in first[3]


def ask_for_too_much(communicator):
    with pytest.raises(CollectiveError) as caught:
        communicator.allocate(1 << 44, torch.float32)
    assert communicator.all_reduce(torch.ones(1)).wait().item() == 2.0
    return str(caught.value)


def test_too_much_is_refused_with_the_sum(run_ranks):
    first, second = run_ranks(2, ask_for_too_much, connecting=shared)
    for text in (first, second):
        assert "not enough shared memory: 2 ranks * 64TiB = 128TiB needed," in text
        assert "available (" in text


def leave_it_to_the_progress_thread(claim):
    """Rank 0 starts a collective, then waits for rank 1 by other means."""
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


def test_a_rank_that_computes_keeps_nobody_waiting(run_ranks_bare):
    results = run_ranks_bare(2, leave_it_to_the_progress_thread)
    assert results == [[6.0], [6.0]]


def close_early(communicator):
    if communicator.rank == 1:
        communicator.close()
        return ""
    with pytest.raises(PeerLostError) as caught:
        communicator.barrier().wait()
    return str(caught.value)


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


def test_who_closed_is_named(run_ranks):
    text, _ = run_ranks(2, close_early, connecting=shared)
    assert "rank 1 closed its communicator" in text


PROGRAM = """
import torch, ronde.torch as hvd
hvd.init()
gradients = hvd.allreduce(torch.ones(4_000_000), op=hvd.Sum)
print(gradients[-1].item(), "memfd:ronde" in open("/proc/self/maps").read())
"""


def test_a_small_dev_shm_does_not_matter():
    """16 MB of gradients a rank, and /dev/shm has 64 KiB: most containers are so."""
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


RUN = [sys.executable, "-m", "ronde", "run", "-n", "2"]
WAITING = """
import torch, ronde.torch as hvd, time
hvd.init()
tensor = hvd.allreduce(torch.ones(1_000_000))
print("ready", flush=True)
time.sleep(600)
"""


def processes_with(mark):
    """Return all processes that have ``mark`` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def files_in_dev_shm(pids):
    """Return the files in /dev/shm that processes map or have open."""
    found = []
    for pid in pids:
        folder = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):
            found += (folder / "maps").read_text().split()
            found += [str(each.readlink()) for each in (folder / "fd").iterdir()]
    return {name for name in found if name.startswith("/dev/shm/")}  # noqa: S108


def kill_all_with(mark, launcher):
    while pids := processes_with(mark):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.poll()


def test_killing_everything_leaves_nothing():
    """Controller, agent, keeper and ranks at once: there is nobody to clear up.

    No file can be left in /dev/shm, for they have none there.
    """
    mark = f"RONDE_TEST_MARK={uuid.uuid4()}"
    launcher = subprocess.Popen(
        ["/usr/bin/env", mark, *RUN, sys.executable, "-c", WAITING],
        stdout=subprocess.PIPE,
        text=True,
    )
    with launcher:
        try:
            lines = [launcher.stdout.readline() for _ in range(2)]
            pids = processes_with(mark)
            mapped = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
            files = files_in_dev_shm(pids)
        finally:
            kill_all_with(mark, launcher)
    assert sorted(lines) == ["[0] ready\n", "[1] ready\n"]
    assert sum("memfd:ronde" in text for text in mapped) == 2
    assert not files


def test_memory_is_what_the_tightest_group_leaves(tmp_path):
    """A tree as in a container of a job: the group above is the tighter one."""
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
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 100 kB\n")
    assert available_memory(tmp_path).num_bytes == 102_400


def without_naps(claim):
    """Connect so that a rank that nobody wakes sleeps on for an hour."""
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
