"""A program with slow ranks: ``slow_rank.py DIRECTORY``.

Its faults are those of the phase that a file in the directory names. The tests find the
line of a fault by the comment there.
"""

import gc
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import ronde

WORK_S = 0.02


class Images(Dataset):
    """Images of which some are slow to read."""

    def __len__(self):
        return 1 << 30

    def __getitem__(self, index):
        if phase() == "several" and rank == 1 and index % 5 == 1:
            time.sleep(2 * WORK_S)
        return torch.ones(1)


def phase():
    return (Path(sys.argv[1]) / "phase").read_text()


def compute(duration_s):
    ends_s = time.thread_time() + duration_s
    while time.thread_time() < ends_s:
        pass


def work(step):
    """Work for one step; return the number of tokens in it."""
    time.sleep(WORK_S)
    if phase() == "code" and rank == 2:
        time.sleep(0.3 * WORK_S)  # slow
    if phase() == "cpu" and rank == 3:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        os.setpriority(os.PRIO_PROCESS, 0, 5)
        compute(WORK_S)
    if phase() == "several" and rank == 3 and step % 5 == 3:
        for _ in range(200000):
            cycle = []
            cycle.append(cycle)
        gc.collect()
    if phase() == "several" and rank == 0 and step % 5 == 0:
        time.sleep(2 * WORK_S)  # tokens
        return 500
    return 100


dist.init_process_group("ronde")
gc.freeze()  # what torch has made takes 50 ms to collect
rank = dist.get_rank()
for step, _ in enumerate(DataLoader(Images(), batch_size=None)):
    num_tokens = work(step)
    dist.all_reduce(torch.ones(8))
    ronde.progress(step=step, tokens=num_tokens)
