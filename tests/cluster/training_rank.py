"""A rank of a training as short as one can be: ``training_rank.py RECORD``.

It classifies points by their largest coordinate, for one pass over them, and needs
nothing that takes long to import besides torch.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import ronde.torch as hvd

NUM_TRAIN, BATCH_SIZE = 1437, 64


class Descent(torch.optim.Optimizer):
    """Plain SGD, which imports no ``torch._dynamo``: torch's own does, for a second."""

    add_param_group = torch.optim.Optimizer.add_param_group.__wrapped__
    zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__
    state_dict = torch.optim.Optimizer.state_dict.__wrapped__
    load_state_dict = torch.optim.Optimizer.load_state_dict.__wrapped__

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        """Move all weights against their gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(weight.grad, alpha=-group["lr"])


def train() -> float:
    """Train; return the loss over all points."""
    hvd.init()
    size, rank = hvd.size(), hvd.rank()
    torch.manual_seed(2026)
    points = torch.randn(NUM_TRAIN, 10)
    answers = points.argmax(1)
    # Large enough for several hosts to add its weights in two levels.
    model = nn.Sequential(
        nn.Linear(10, 1000),
        nn.ReLU(),
        nn.Linear(1000, 60),
        nn.ReLU(),
        nn.Linear(60, 10),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        Descent(model.parameters(), 0.05), model.named_parameters()
    )
    for step in range(NUM_TRAIN // (BATCH_SIZE * size)):
        first = (step * size + rank) * BATCH_SIZE
        batch = slice(first, first + BATCH_SIZE)
        optimizer.zero_grad()
        functional.cross_entropy(model(points[batch]), answers[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        return functional.cross_entropy(model(points), answers).item()


def main() -> None:
    """Train; rank 0 says with how many ranks, and writes the loss down."""
    loss = train()
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks have trained", flush=True)  # noqa: T201
        with Path(sys.argv[1]).open("x") as record:
            json.dump({"size": hvd.size(), "loss": loss}, record)
    hvd.shutdown()


if __name__ == "__main__":
    main()
