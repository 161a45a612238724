"""The cost of ``ronde why``: steps of a training that is inspected once a second.

    python benchmarks/observer_cost.py --turns 12

Two ranks train a small MLP. In every second turn of five seconds all processes are
inspected once a second, as ``ronde why`` does once. Prints the mean step of each turn.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ronde.launch.status import HostAnswer, ask, list_jobs

TURN_S = 5.0
TRAIN = """
import json, sys, time
import torch
import ronde.torch as hvd

ends = time.time() + float(sys.argv[1])
hvd.init()
torch.manual_seed(0)
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


def inspect(socket: Path) -> None:
    for news in ask(socket, {"ask": "inspect"}):
        if isinstance(news, HostAnswer):
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=12)
    num_turns = parser.parse_args().turns
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder, "train.py"), Path(folder, "steps.json")
        script.write_text(TRAIN)
        limit_s = str(TURN_S * num_turns + 20)
        words = ["run", "-n", "2", str(script), limit_s, str(out)]
        with subprocess.Popen([sys.executable, "-m", "ronde", *words]) as process:
            time.sleep(10)  # until the ranks train
            [job] = [j for j in list_jobs() if j.job.head_pid == process.pid]
            turns: list[tuple[bool, float, float]] = []
            for turn in range(num_turns):
                begun = time.time()
                while (past_s := time.time() - begun) < TURN_S:
                    if turn % 2:
                        inspect(job.socket)
                    time.sleep(1 - past_s % 1)
                turns.append((bool(turn % 2), begun, time.time()))
        steps = json.loads(out.read_text())
    for is_inspected in (False, True):
        means_ms = [
            1e3 * statistics.mean(took for at, took in steps if first <= at <= last)
            for is_one, first, last in turns
            if is_one == is_inspected
        ]
        name = "inspected" if is_inspected else "alone"
        print(
            f"{name:9} {statistics.median(means_ms):.3f} ms",
            *map("{:.3f}".format, means_ms),
        )


if __name__ == "__main__":
    main()
