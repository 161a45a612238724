"""The cost of ``ronde profile``: steps of a training whose ranks are sampled.

    python benchmarks/profile_cost.py --turns 12 --ranks 2 --rate 100

The ranks train a small MLP. In every second turn of five seconds all are sampled.
Prints the mean step of each turn, and the median ratio of a turn to the one before.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ronde.launch.status import JobConnection, list_jobs, watch
from ronde.monitor.collecting import ProfileCollector
from ronde.status.table import JobStatus

TURN_S = 5.0
TRAIN = """
import json, sys, time
import torch
import ronde.torch as hvd

ends = time.time() + float(sys.argv[1])
hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
inputs, steps, is_over = torch.ones(64, 256), [], False
while not is_over:
    begun = time.perf_counter()
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
    steps.append((time.time(), time.perf_counter() - begun))
    if len(steps) % 50 == 0:
        is_over = hvd.allreduce(torch.tensor([float(time.time() > ends)]), op=hvd.Max)
if hvd.rank() == 0:
    open(sys.argv[2], "w").write(json.dumps(steps))
"""


def is_training(job: JobStatus) -> bool:
    return all(row.status and row.status.step > 100 for row in job.workers)


def sample(job: JobStatus, rate_hz: int) -> tuple[float, float]:
    """Sample the ranks; return the time for which all were sampled."""
    ends = time.time() + TURN_S
    collector = ProfileCollector(rate_hz)
    with JobConnection(job.socket) as connection:
        collector.collect(connection, lambda: time.time() > ends)
    profile = collector.profile()
    windows = profile.windows if profile else ()
    if {window.worker for window in windows} != {row.worker for row in job.workers}:
        sys.exit("the ranks were not sampled")
    begun, ended = zip(*((w.begun_at, w.ended_at) for w in windows), strict=True)
    return max(begun), min(ended)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--rate", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder, "train.py"), Path(folder, "steps.json")
        script.write_text(TRAIN)
        limit_s = str((TURN_S + 3) * options.turns + 20)
        words = ["run", "-n", str(options.ranks), str(script), limit_s, str(out)]
        with subprocess.Popen([sys.executable, "-m", "ronde", *words]) as process:
            jobs: list[JobStatus] = []
            while not jobs:
                jobs = [j for j in list_jobs() if j.job.head_pid == process.pid]
            job = next(each for each in watch(jobs[0].socket) if is_training(each))
            turns: list[tuple[float, float]] = []
            for turn in range(options.turns):
                begun = time.time()
                if turn % 2:
                    turns.append(sample(job, options.rate))
                else:
                    time.sleep(TURN_S)
                    turns.append((begun, time.time()))
        steps = json.loads(out.read_text())
    means_ms = [
        1e3 * statistics.mean(took for at, took in steps if first <= at <= last)
        for first, last in turns
    ]
    for name, own in (("alone", means_ms[::2]), ("sampled", means_ms[1::2])):
        print(f"{name:8} {statistics.median(own):.3f} ms", *map("{:.3f}".format, own))
    ratios = [b / a for a, b in zip(means_ms[::2], means_ms[1::2], strict=False)]
    print(f"ratio    {statistics.median(ratios):.3f}", *map("{:.3f}".format, ratios))


if __name__ == "__main__":
    main()
