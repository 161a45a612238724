"""A program with planted faults: ``faulty_rank.py DIRECTORY [BACKEND]``.

It leaves a fault when the file of its name appears in the directory, or at a signal;
the last faults stay. With a backend it has only the deadlock of two groups. The tests
find the line of a fault by the comment there.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import ronde.torch as hvd

directory = Path(sys.argv[1])


class SlowImages(Dataset):
    """One image, which cannot be read for a time."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        while not (directory / "input").exists():
            time.sleep(0.05)
        return torch.ones(1)


def loop():
    (directory / "ready").touch()
    while not (directory / "loop").exists():  # loop
        pass


def load():
    for _ in DataLoader(SlowImages(), num_workers=1):  # input
        pass


def train(rank, reduce):
    """Make equal calls on all ranks of a backend, each after another fault."""
    for step in range(5):
        reduce(step)
    if rank == 2:
        loop()
    reduce(5)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)  # stopped
    reduce(6)
    if rank == 0:
        load()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # second
    reduce(7)


def skip_one(rank, reduce):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    for number in range(50):
        if (rank, number) != (3, 20):
            reduce(number)
    if rank == 3:
        signal.sigwait([signal.SIGUSR1])  # has skipped one
        reduce(20)


def deadlock(rank, within):
    first, second = (0, 1) if rank == 0 else (1, 0)
    within(first)  # first group
    within(second)


def deadlock_groups():
    dist.init_process_group(sys.argv[2])
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    deadlock(dist.get_rank(), lambda n: dist.all_reduce(torch.ones(8), group=groups[n]))


def main():
    sets = [hvd.ProcessSet([0, 1, 2]), hvd.ProcessSet([0, 1, 3])]
    hvd.init(process_sets=sets)
    rank = hvd.rank()
    dist.init_process_group("gloo")
    own = dist.new_group(backend="ronde")
    pair = dist.new_group([2, 3])
    x = torch.ones(8)

    train(rank, lambda step: hvd.allreduce(x, name=f"grad.{step}"))
    skip_one(rank, lambda _: dist.all_reduce(x))
    skip_one(rank, lambda _: dist.barrier(own))
    if rank < 2:
        deadlock(rank, lambda n: hvd.allreduce(x, name=f"set.{n}", process_set=sets[n]))
    elif rank == 2:
        dist.broadcast(x, 2, group=pair)  # other operation
    dist.all_reduce(x, group=pair)


if len(sys.argv) > 2:
    deadlock_groups()
else:
    main()
