"""A rank that says when it starts, trains until it is told to stop, and stays a while.

``python -m tests.cluster.guarded_rank FOLDER``, in some launcher's environment. It goes
on from stage to stage when a file is there: ``go``, on rank 0 also ``go.0``; ``stop``;
``leave``.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from tests.cluster.training_rank import Descent

import ronde.torch as rd
from ronde.world import read_rank_info

SIZES = (64, 7)
STEP_S = 0.05
"""At least, so that there are processors left for the strangers."""


def wait_for(path):
    while not path.exists():
        time.sleep(0.01)


def main():
    """Train, compare with the others, and write down what came of it."""
    folder, claim = Path(sys.argv[1]), read_rank_info()
    names = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    draft = folder / f"started.{claim.rank}.draft"
    draft.write_text(json.dumps({name: os.environ.get(name) for name in names}))  # noqa: TID251  a test's own program
    draft.rename(folder / f"started.{claim.rank}")
    wait_for(folder / ("go.0" if claim.rank == 0 else "go"))
    rd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(*SIZES)
    optimizer = Descent(model.parameters(), 0.01)
    optimizer = rd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters()
    )
    rd.broadcast_parameters(model.state_dict(), root_rank=0)
    num_steps, is_over = 0, False
    while not is_over:
        time.sleep(STEP_S)
        optimizer.zero_grad()
        (model(torch.ones(2, SIZES[0])).sum() * (rd.rank() + 1)).backward()
        optimizer.step()
        num_steps += 1
        (folder / f"ready.{rd.rank()}").touch()
        flag = torch.tensor([float((folder / "stop").exists())])
        is_over = rd.allreduce(flag, op=rd.Max).item() > 0
    # The gradient of a weight is 2 * (rank + 1), averaged over the ranks.
    torch.manual_seed(0)
    expected = torch.nn.Linear(*SIZES).weight.detach()
    gradient = torch.full_like(expected, rd.size() + 1)
    for _ in range(num_steps):
        expected.add_(gradient, alpha=-0.01)
    is_right = torch.allclose(model.weight.detach(), expected)
    (folder / f"done.{rd.rank()}").write_text("right" if is_right else "wrong")
    rd.shutdown()
    wait_for(folder / "leave")


if __name__ == "__main__":
    main()
