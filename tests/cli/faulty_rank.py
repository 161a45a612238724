"""A program with planted faults: ``faulty_rank.py BACKEND DIRECTORY [deadlock|other]``.

It leaves a fault when the file of its name appears in the directory. The tests find the
line of a fault by the comment there.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

backend, directory = sys.argv[1], Path(sys.argv[2])


class Named:
    """Named collectives of ronde.torch, and process sets."""

    def __init__(self):
        import ronde.torch as hvd

        self.hvd = hvd
        self.sets = [hvd.ProcessSet([0, 1, 2]), hvd.ProcessSet([0, 1, 3])]
        hvd.init(process_sets=self.sets)
        self.rank = hvd.rank()

    def reduce(self, step):
        self.hvd.allreduce(torch.ones(8), name=f"grad.{step}")

    def broadcast(self, step):
        self.hvd.broadcast(torch.ones(8), 0, name=f"weights.{step}")

    def within(self, number):
        self.hvd.allreduce(
            torch.ones(8), name=f"pair.{number}", process_set=self.sets[number]
        )


class Grouped:
    """Process groups of torch.distributed."""

    def __init__(self):
        dist.init_process_group(backend)
        self.rank = dist.get_rank()
        self.groups = [dist.new_group([0, 1, 2]), dist.new_group([0, 1, 3])]

    def reduce(self, step):
        dist.all_reduce(torch.ones(8))

    def broadcast(self, step):
        dist.broadcast(torch.ones(8), 0)

    def within(self, number):
        dist.all_reduce(torch.ones(8), group=self.groups[number])


def loop():
    while not (directory / "loop").exists():  # loop
        pass


class SlowImages(Dataset):
    """One image, which cannot be read for a time."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        while not (directory / "two").exists():
            time.sleep(0.05)
        return torch.ones(1)


def load():
    for _ in DataLoader(SlowImages(), num_workers=1):  # input
        pass


def train(job):
    for step in range(5):
        job.reduce(step)
    if job.rank == 2:
        (directory / "ready").touch()
        loop()
    job.reduce(5)
    if job.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)  # stopped
    job.reduce(6)
    if job.rank == 0:
        load()
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # second
    job.reduce(7)
    if backend == "named":
        job.reduce(9 if job.rank == 3 else 8)  # skips 8
    for number in range(50):
        if (job.rank, number) != (3, 20):
            job.reduce(number)
    if job.rank == 3:
        time.sleep(1000)  # has skipped one


def deadlock(job):
    first, second = (0, 1) if job.rank in (0, 2) else (1, 0)
    job.within(first)  # first group
    if job.rank < 2:
        job.within(second)


if __name__ == "__main__":
    work = Named() if backend == "named" else Grouped()
    if "deadlock" in sys.argv:
        deadlock(work)
    if "other" in sys.argv and work.rank == 0:
        work.broadcast(0)  # other operation
    train(work)
