"""The parts of a step: every call that blocks counts, and the DataLoader's input."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest
import torch
from tests.limits import HANG_S, until
from tests.ranks import run_ranks_bare
from torch import distributed as dist, nn
from torch.utils.data import dataloader

import ronde.torch as hvd
from ronde.launch import own_environment
from ronde.status import decode_status, own_meter

LATE_S = 0.25


def blocked_times(info, folder):
    """Return the time that this rank blocks in each call; rank 1 comes last to all."""
    torch.set_num_threads(1)
    hvd.init()
    found, x = {}, torch.ones(1000)

    def measure(name, call):
        call()
        file, begun_s = folder / name, own_meter().blocked.total_s
        if hvd.rank() == 0:
            file.touch()
        else:
            until(file.exists)
            time.sleep(LATE_S)
        call()
        found[name] = own_meter().blocked.total_s - begun_s

    model = nn.Linear(8, 8)
    wrapped = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(wrapped, model.named_parameters())

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    measure("allreduce", lambda: hvd.allreduce(x, name="x"))
    measure("synchronize", lambda: hvd.synchronize(hvd.allreduce_async(x, name="y")))
    measure("step", step)
    dist.init_process_group("ronde")
    replica = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    measure("all_reduce", lambda: dist.all_reduce(x))
    measure("wait", lambda: dist.all_reduce(x, async_op=True).wait())
    measure("barrier", dist.barrier)
    measure("DDP", lambda: replica(torch.ones(2, 8)).sum().backward())
    dist.destroy_process_group()
    hvd.shutdown()
    return found


def test_the_rank_that_comes_last_blocks_least_in_every_call(tmp_path):
    punctual, late = run_ranks_bare(2, blocked_times, tmp_path, timeout_s=HANG_S)
    assert len(punctual) == 7
    assert {name for name in punctual if punctual[name] <= late[name]} == set()
    assert min(punctual.values()) > 0


LOADS = """
import gc, json, sys, time
import torch
assert gc.get_freeze_count() > 10_000  # no collection visits torch
import ronde
from ronde.status import own_meter
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    loaded_s = 0.0
    def __len__(self):
        return 4
    def __getitem__(self, index):
        begun_s = time.monotonic()
        time.sleep(0.02)
        Slow.loaded_s += time.monotonic() - begun_s
        return index

for num_workers in (0, 2):
    Slow.loaded_s, input_s = 0.0, own_meter().input.total_s
    loader, begun_s = DataLoader(Slow(), num_workers=num_workers), time.monotonic()
    ronde.progress(step=10 * num_workers)
    for step, batch in enumerate(loader, 1):
        time.sleep(0.01)
        ronde.progress(step=10 * num_workers + step)
    input_s = own_meter().input.total_s - input_s
    print(json.dumps([Slow.loaded_s, input_s, time.monotonic() - begun_s]), flush=True)
sys.stdin.read()
"""


def test_input_is_the_time_in_the_data_loader(tmp_path):
    """With workers, the parent waits at least for the first batch."""
    script = tmp_path / "loads.py"
    script.write_text(LOADS)
    own, other = socket.socketpair()
    with own, other:
        inode = os.fstat(other.fileno()).st_ino
        channel = f"{other.fileno()}:{inode}:0:plain"
        env = {**own_environment(), "RONDE_CHANNEL": channel, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, str(script)],
            env=env,
            pass_fds=[other.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with process, own.makefile() as lines:
            own.settimeout(HANG_S)
            try:
                times = [json.loads(process.stdout.readline()) for _ in range(2)]
                texts = (json.loads(line.removeprefix("status ")) for line in lines)
                last = next(s for s in map(decode_status, texts) if s.step == 24)
            finally:
                process.kill()
    alone, with_workers = times
    loaded_s, input_s, total_s = alone
    assert 0 < loaded_s <= input_s < total_s
    loaded_s, input_s, total_s = with_workers
    assert loaded_s == 0 < input_s < total_s
    assert [each.step for each in last.steps][-4:] == [21, 22, 23, 24]
    assert all(0 < each.input_s < each.total_s for each in last.steps[-4:])


def test_outside_of_a_job_torch_is_as_it_was():
    if "RONDE_CHANNEL" in own_environment():
        pytest.skip("the tests run below ronde run")
    method = dataloader._BaseDataLoaderIter.__next__
    assert method.__module__ == dataloader.__name__
