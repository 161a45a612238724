"""Children of a rank, which are no ranks, and launchers that a rank starts."""

import os
import subprocess
import sys

import pytest
import torch
from tests.launchers import launcher_environment, launcher_words
from tests.limits import HANG_S
from tests.parity.sessions import message_of, run_sessions
from torch import nn

import ronde.torch as hvd
from ronde.errors import IN_CHILD, CollectiveError

# As Horovod's users write it: a child that imports the module comes by init(), too.
PROGRAM = """
import sys, torch, ronde.torch as hvd
hvd.init()
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        try:
            hvd.allreduce(torch.ones(1))
        except hvd.HorovodInternalError as error:
            assert "called by the rank itself" in str(error)
            return torch.tensor([hvd.rank(), hvd.size(), hvd.local_rank()])
if __name__ == "__main__":
    if hvd.rank() == 0:
        loader = torch.utils.data.DataLoader(
            Rows(), 1, num_workers=1, multiprocessing_context=sys.argv[1]
        )
        sys.stdout.write(f"{[batch.tolist() for batch in loader]}\\n")
    sys.stdout.write(f"{hvd.allreduce(torch.ones(1), op=hvd.Sum).item()}\\n")
"""
NESTED = """
import os, sys, ronde.torch as hvd
hvd.init()
parents = set(hvd.allgather_object(os.getppid()))
sys.stdout.write(f"{hvd.rank()} {hvd.size()} {len(parents)}\\n")
"""


def in_fork(call):
    """Return what a call gives in a forked child of this process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, repr(call()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


def collectives(optimizer, model):
    """Return what a rank's child is told of each way to a collective."""
    ones = torch.ones(2)
    told = [
        message_of(CollectiveError, call)
        for call in (
            lambda: hvd.allreduce(ones),
            lambda: hvd.allgather_object(1),
            hvd.barrier,
            hvd.join,
            lambda: model(ones).sum().backward(),
            lambda: hvd.DistributedOptimizer(optimizer.wrapped),
        )
    ]
    hvd.shutdown()
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.is_initialized(), set(told)


@pytest.mark.parametrize(("size", "engine"), [(3, "auto"), (2, "gloo")])
def test_a_forked_child_takes_no_part(size, engine):
    def run():
        model = nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()))
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        found = in_fork(lambda: collectives(optimizer, model))
        sums = [
            hvd.allreduce(torch.tensor(hvd.rank() + k), op=hvd.Sum).item()
            for k in range(3)
        ]
        optimizer.zero_grad()
        model(torch.full((2,), hvd.rank() + 1.0)).sum().backward()
        return found, sums, model.weight.grad.tolist()

    for rank, (found, sums, grad) in enumerate(run_sessions(size, run, engine=engine)):
        assert found == repr((rank, size, rank, True, {IN_CHILD}))
        total = size * (size - 1) // 2
        assert sums == [total, total + size, total + 2 * size]
        assert grad == [[(size + 1) / 2] * 2]


def output_of(tmp_path, script, words, *arguments):
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [*words, str(path), *arguments],
        env=launcher_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.split("\n"))[1:]


@pytest.mark.parametrize(
    "context", ["spawn", pytest.param("forkserver", marks=pytest.mark.soak)]
)
def test_a_child_that_imports_the_program_takes_no_part(tmp_path, context):
    words = launcher_words("ronde", 2)
    lines = output_of(tmp_path, PROGRAM, [*words, "--", sys.executable], context)
    assert lines == ["2.0", "2.0", "[[[0, 2, 0]], [[0, 2, 0]]]"]


@pytest.mark.parametrize("name", ["torchrun", "mpirun"])
def test_a_launcher_that_a_rank_starts_has_ranks_of_its_own(tmp_path, name):
    words = [*launcher_words("ronde", 2), "--", *launcher_words(name, 2)]
    lines = output_of(tmp_path, NESTED, words)
    assert lines == ["0 2 1", "0 2 1", "1 2 1", "1 2 1"]
