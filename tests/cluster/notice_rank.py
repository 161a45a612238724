"""A rank that trains until its steps are done: ``notice_rank.py FOLDER NUM_STEPS``.

Each step that it begins is a line of ``FOLDER/steps.HOST``: its number and the size.
"""

import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.cluster.training_rank import Descent

import ronde.torch as hvd

_STEP_S = 0.02  # while there are others
_BATCH = 8


def main() -> None:
    """Train."""
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    hvd.init()
    inputs = torch.ones(num_steps * _BATCH, 4)
    data = torch.utils.data.TensorDataset(inputs)
    model = torch.nn.Linear(4, 1)
    optimizer = Descent(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    loop = hvd.elastic.Loop(model, optimizer, data, batch=_BATCH, epochs=1)
    with (folder / f"steps.{os.uname().nodename}").open("a", buffering=1) as steps:
        for step in loop:
            with step:
                steps.write(f"{step.number} {hvd.size()}\n")
                (x,) = step.inputs
                model(x).square().mean().backward()
                optimizer.step()
                if hvd.size() > 1:
                    time.sleep(_STEP_S)


if __name__ == "__main__":
    main()
