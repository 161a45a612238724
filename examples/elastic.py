"""Train on handwritten digits while ranks are lost, leave and join.

Start it with ``ronde run -H localhost:3 --min-ranks 1 python elastic.py`` and kill a
rank by its pid: the others go on, and a new one takes its place. Any launcher runs it.
"""

import argparse
import os

import torch
from digits import make_model, read_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ronde.torch as hvd

BATCH = 96  # of all ranks together


def report_rank() -> None:
    """Print who this rank is now, so that it can be killed."""
    print(f"rank {hvd.rank()} of {hvd.size()}, pid {os.getpid()}", flush=True)


def main() -> None:
    """Train on all ranks, test on rank 0."""
    parser = argparse.ArgumentParser(description="Train on digits, elastically.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--checkpoint", default="", help="directory, none by default")
    options = parser.parse_args()

    hvd.init()
    images = read_digits()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model.named_parameters(),
    )
    steps_per_epoch = -(-len(images.train) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, options.epochs * steps_per_epoch
    )
    loop = hvd.elastic.Loop(
        model,
        optimizer,
        TensorDataset(images.train, images.train_labels),
        batch=BATCH,
        epochs=options.epochs,
        objects={"schedule": schedule},
        on_change=report_rank,
        checkpoint=options.checkpoint,
        checkpoint_every=steps_per_epoch,
    )
    for step in loop:
        with step:
            pixels, labels = step.inputs
            loss = cross_entropy(model(pixels), labels)
            loss.backward()
            optimizer.step()
            # From here on the step counts: what follows is never done twice.
            schedule.step()
            if hvd.rank() == 0 and loop.num_applied % steps_per_epoch == 0:
                print(f"epoch {step.epoch + 1}: loss {loss.item():.4f}", flush=True)

    if hvd.rank() == 0:
        model.eval()
        with torch.inference_mode():
            hits = model(images.test).argmax(1) == images.test_labels
        print(
            f"{loop.num_applied} steps, test accuracy {hits.float().mean():.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
