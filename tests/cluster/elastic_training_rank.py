"""A rank of an elastic training that tests break: ``elastic_training_rank.py FOLDER``.

It keeps a ledger, and the times at which it had imported everything (``loaded-*``) and
applied steps (``applied-*``). Checkpoints are in ``FOLDER/state``. The training ends
with the epoch in which ``FOLDER/finish`` appears. Who starts while there is
``FOLDER/hold`` waits until that is gone.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests import ledger  # noqa: E402  found by the line above
from tests.cluster.training_rank import Descent  # noqa: E402

import ronde.torch as hvd  # noqa: E402
from ronde.membership import own_member  # noqa: E402

NUM_SAMPLES, BATCH = 96, 12
CHECKPOINT_EVERY = 5
_STEP_S = 0.02  # of other work, so that others have the processor too


class Ending:
    """The epoch with which the training ends: part of the state, as all must agree."""

    def __init__(self, loader: hvd.elastic.ElasticLoader) -> None:
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.loader.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.epochs = state["epochs"]


def main(folder: Path) -> None:
    """Train until all are told to finish."""
    torch.set_num_threads(1)
    loaded_s = time.monotonic()
    while (folder / "hold").exists():
        time.sleep(_STEP_S)
    hvd.init()
    member = own_member()
    if member is None:
        raise SystemExit("start it by ronde run --min-ranks")
    host = os.uname().nodename
    applied = (folder / f"applied-{host}-{member.number}").open("a", buffering=1)
    (folder / f"loaded-{host}-{member.number}").write_text(f"{loaded_s}\n")
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(
        Descent(model.parameters(), 0.01), model.named_parameters()
    )
    inputs = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(5))
    samples = torch.utils.data.TensorDataset(inputs, inputs[:, :2])
    ending = Ending(hvd.elastic.ElasticLoader(samples, BATCH, seed=3))
    loop = hvd.elastic.Loop(
        model,
        optimizer,
        ending.loader,
        objects={"end": ending},
        checkpoint=str(folder / "state"),
        checkpoint_every=CHECKPOINT_EVERY,
    )
    for step in loop:
        with step:
            entry = ledger.Entry(
                member.number, member.view.view, 0, step.number, step.epoch,
                step.share.batch_size, tuple(step.ids), is_applied=False,
            )  # fmt: skip
            ledger.write(folder / f"ledger-{member.number}", entry)
            time.sleep(_STEP_S)
            is_last = torch.tensor([int((folder / "finish").exists())])
            is_last = hvd.allreduce(is_last, op=hvd.Max, name="finish")
            x, y = step.inputs
            (model(x) - y).square().mean().backward()
            optimizer.step()
            if is_last.item():
                ending.loader.epochs = step.epoch + 1
            written = entry._replace(is_applied=True)
            ledger.write(folder / f"ledger-{member.number}", written)
            applied.write(f"{time.monotonic()} {written.view} {step.number}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
