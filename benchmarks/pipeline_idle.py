"""The part of a pipeline's step in which ranks do not compute: theory and measured.

Theory holds for stages that take equally long and messages that take no time. Measured
is what the same layers take alone, on each rank, against the step; by turns, medians.

    ronde run -n 2 python benchmarks/pipeline_idle.py
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, distributed as dist, nn

from ronde.torch import parallel

WIDTH, ROWS, NUM_BLOCKS = 768, 64, 8


class Block(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.relu(self.up(inputs)))


def seconds_alone(stages: nn.Module, inputs: Tensor, count: int) -> float:
    """Return how long a rank's layers take for all microbatches, without waiting."""
    layers = nn.Sequential(*stages.children())
    start = time.perf_counter()
    for _ in range(count):
        layers(inputs.detach().requires_grad_()).sum().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--microbatches", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    mesh = parallel.init_mesh(parallel.Layout(pp=-1))
    count = options.microbatches
    batch = torch.randn(ROWS * count, WIDTH)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {count} microbatches")
        print(f"{'':16} theory  measured  step ms", flush=True)
    for name, num_chunks in (("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2)):
        torch.manual_seed(0)
        model = parallel.pipeline(
            nn.Sequential(*(Block() for _ in range(NUM_BLOCKS))),
            mesh,
            nn.functional.mse_loss,
            count,
            schedule=name,
            num_chunks=num_chunks,
        )
        alone: list[float] = []
        steps: list[float] = []
        for _ in range(options.rounds):
            dist.barrier()
            alone.append(seconds_alone(model.stages, batch[:ROWS], count))
            dist.barrier()
            start = time.perf_counter()
            model.step(batch, batch)
            dist.barrier()
            steps.append(time.perf_counter() - start)
            model.stages.zero_grad()
        busy = torch.tensor(statistics.median(alone))
        dist.all_reduce(busy)
        step_s = statistics.median(steps)
        idle = 1 - float(busy) / dist.get_world_size() / step_s
        if dist.get_rank() == 0:
            columns = f"{model.plan.idle_share:6.3f}  {idle:8.3f}"
            print(f"{name:16} {columns}  {1e3 * step_s:7.1f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
