"""An elastic rank: it trains until only one is left: ``elastic_rank.py FOLDER``."""

import sys
from pathlib import Path

import torch

import ronde.torch as hvd

FOLDER = Path(sys.argv[1])


@hvd.elastic.run
def train(state):
    """Add ones until no other rank adds any."""
    (FOLDER / f"begun.{hvd.rank()}.{hvd.size()}").touch()
    while hvd.size() > 1:
        hvd.allreduce(torch.ones(1), op=hvd.Sum)
        state.commit()
    (FOLDER / f"done.{hvd.rank()}.{hvd.size()}").touch()


hvd.init()
train(hvd.elastic.TorchState(step=0))
