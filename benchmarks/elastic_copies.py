"""Time a step and a copy of the shares of ``zero=1``.

    ronde run -H localhost:2 --min-ranks 1 python benchmarks/elastic_copies.py

The model is an MLP of 15.8 million parameters, with Adam. Prints medians of rank 0.
"""

import statistics
import time

import torch
from torch import nn

import ronde.torch as hvd
from ronde.torch.elastic.copies import ShareCopies
from ronde.torch.elastic.data import ElasticLoader
from ronde.torch.elastic.training import Training

ROUNDS = 12
NUM_COLD = 2


def main() -> None:
    """Time steps and copies by turns."""
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 3072), nn.ReLU()
    model = nn.Sequential(*layers, nn.Linear(3072, 10))
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    optimizer = hvd.DistributedOptimizer(adam, model.named_parameters(), zero=1)
    copies = ShareCopies([hvd.DistributedOptimizer.share_of(optimizer)], every=1)
    rows = torch.randn(32, 784)
    training = Training(model, [optimizer], ElasticLoader(rows, 32), {})
    times: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        begun_s = time.perf_counter()
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        stepped_s = time.perf_counter()
        copies.make(training)
        times.append((stepped_s - begun_s, time.perf_counter() - stepped_s))
    step_s, copy_s = map(statistics.median, zip(*times[NUM_COLD:], strict=True))
    if hvd.rank() == 0:
        print(f"step {step_s * 1e3:.1f} ms, copy {copy_s * 1e3:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
