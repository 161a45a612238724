"""The cost of looking into a running job.

    python benchmarks/observer_cost.py inspect --turns 25
    python benchmarks/observer_cost.py watch --turns 25
    python benchmarks/observer_cost.py usage

Two ranks train a small MLP, in turns of five seconds. ``inspect``: in every second turn
all processes are inspected once a second, as ``ronde why`` does once. ``watch``: in
every second turn the ranks report their steps and a watcher asks for ``usage`` once a
second, as ``ronde top`` does; in the others there are neither reports nor a watcher.
Both print the steps' times, and ratios of neighbouring turns. ``usage``: the CPU time
of one answer about 8 ranks with 2 and with 64 processes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ronde.launch import HostAnswer, JobConnection, list_jobs, watch as watch_tables
from ronde.monitor import JobWatcher, UsageReader
from ronde.processes import descendants, read_processes, read_stat, read_text

TURN_S = 5.0
WARM_S = 1.5  # of each turn, in which reports begin or end
TRAIN = """
import gc, json, os, pathlib, sys, time
import torch
import ronde.torch as hvd
from ronde.session import current_session
from ronde.status import StatusReporter

folder, turn_s, num_turns = pathlib.Path(sys.argv[1]), *map(float, sys.argv[2:4])
is_switched, turn, begins = sys.argv[4] == "watch", 0, None
channel = os.environ["RONDE_CHANNEL"]
hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
inputs, steps, is_over = torch.ones(64, 256), [], False
while not is_over:
    if begins is None and len(steps) % 50 == 0 and (folder / "begins").exists():
        begins = float((folder / "begins").read_text())
    now = 0 if begins is None else int((time.time() - begins) // turn_s)
    if is_switched and now != turn:
        turn = now
        os.environ["RONDE_CHANNEL"] = channel if turn % 2 else ""
        if turn % 2:
            reporter = StatusReporter()
            reporter.add(optimizer.report)
            reporter.add(current_session().waits.report)
            gc.callbacks.pop()  # the first reporter's is enough
    begun, begun_cpu = time.perf_counter(), time.process_time()
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
    cpu = time.process_time() - begun_cpu
    steps.append((time.time(), time.perf_counter() - begun, cpu))
    if len(steps) % 50 == 0:
        is_over = hvd.allreduce(torch.tensor([float(now >= num_turns)]), op=hvd.Max)
        (folder / f"trains-{hvd.rank()}").touch()
if hvd.rank() == 0:
    (folder / "steps.json").write_text(json.dumps(steps))
"""


def look_once(socket: Path) -> None:
    with JobConnection(socket) as job:
        job.send({"ask": "inspect"})
        next(news for news in job if isinstance(news, HostAnswer))


def inspect(socket: Path, until_s: float) -> None:
    while (now_s := time.time()) < until_s:
        look_once(socket)
        time.sleep(max(0.0, now_s + 1 - time.time()))


def watch(socket: Path, until_s: float) -> None:
    with JobConnection(socket) as job:
        watcher = JobWatcher(next(watch_tables(socket)))
        for news in job:
            watcher.add(news)
            if not isinstance(news, HostAnswer):
                watcher.view()
                job.send({"ask": "usage"})
            if time.time() >= until_s:
                return


def measure(kind: str, num_turns: int) -> None:
    look = watch if kind == "watch" else inspect
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script, begin = folder / "train.py", folder / "begins"
        script.write_text(TRAIN)
        words = ["run", "-n", "2", str(script), name, str(TURN_S), str(num_turns), kind]
        with subprocess.Popen([sys.executable, "-m", "ronde", *words]) as process:
            while len(list(folder.glob("trains-*"))) < 2:
                time.sleep(0.1)
            begins = time.time() + 2.0
            (folder / "new").write_text(str(begins))
            (folder / "new").rename(begin)
            observer_s = take_turns(process.pid, begins, num_turns, look)
        steps = json.loads((folder / "steps.json").read_text())

    def is_in(turn: int, step: Sequence[float]) -> bool:
        return WARM_S <= step[0] - begins - TURN_S * turn <= TURN_S

    statistic = {"median": statistics.median, "mean": statistics.mean}
    for name, column in (("median", 1), ("mean", 1), ("mean", 2)):
        turns_ms = [
            1e3 * statistic[name](step[column] for step in steps if is_in(turn, step))
            for turn in range(num_turns)
        ]
        print_ratios(f"{name}{' CPU time' * (column == 2)}", turns_ms)
    share = observer_s / (TURN_S * (num_turns // 2))
    print(f"the observer took {share:.2%} of a core while it was asked")


def take_turns(
    pid: int, begins: float, num_turns: int, look: Callable[[Path, float], None]
) -> float:
    """Look in every second turn; return the CPU time of the observer."""
    time.sleep(begins - time.time())
    [job] = [job for job in list_jobs() if job.job.head_pid == pid]
    cpu_s = 0.0
    for turn in range(num_turns):
        ends = begins + TURN_S * (turn + 1)
        if turn % 2:
            before_s = observer_cpu_s(pid)
            look(job.socket, ends - 0.3)
            cpu_s += observer_cpu_s(pid) - before_s
        time.sleep(max(0.0, ends - time.time()))
    return cpu_s


def observer_cpu_s(pid: int) -> float:
    for process in descendants(pid):
        if "ronde.monitor.observer" in read_text(f"/proc/{process.pid}/cmdline"):
            ticks = sum(map(int, read_stat(process.pid)[12:14]))
            return ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


def print_ratios(name: str, turns_ms: Sequence[float]) -> None:
    # Each against the mean of its neighbours, so that a drift cancels.
    ratios = [
        2 * turns_ms[turn] / (turns_ms[turn - 1] + turns_ms[turn + 1])
        for turn in range(1, len(turns_ms) - 1, 2)
    ]
    noise = [
        max(a, b) / min(a, b) for a, b in pairwise(turns_ms[::2])
    ]  # of turns without a look
    print(
        f"{name:13} {statistics.median(turns_ms[::2]):.3f} ms alone; ratio "
        f"{statistics.median(ratios):.3f}, quartiles "
        f"{', '.join(f'{q:.3f}' for q in statistics.quantiles(ratios)[::2])}; "
        f"two turns alone differ by {statistics.median(noise) - 1:.1%}",
        flush=True,
    )


def measure_usage() -> None:
    child = "import subprocess, sys; n = int(sys.argv[1]); own = [subprocess.Popen("
    child += "['/bin/sleep', '60']) for _ in range(n)]; print(flush=True); "
    child += "sys.stdin.read(); [each.kill() for each in own]"
    for num_processes in (2, 64):
        num_workers = min(8, num_processes)
        more = str(num_processes // num_workers - 1)
        words = [sys.executable, "-c", child, more]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        workers: list[Any] = [
            subprocess.Popen(words, **pipes) for _ in range(num_workers)
        ]
        for each in workers:
            each.stdout.readline()
        pids = {number: each.pid for number, each in enumerate(workers)}
        reader = UsageReader()
        reader.read(pids)
        begun_s = time.process_time()
        for _ in range(200):
            reader.read(pids)
        took_ms = (time.process_time() - begun_s) * 1e3 / 200
        present = len(read_processes())
        print(
            f"{num_workers} ranks, {num_processes} processes of {present} on this "
            f"host: {took_ms:.2f} ms an answer"
        )
        for each in workers:
            each.communicate(b"")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["inspect", "watch", "usage"])
    parser.add_argument("--turns", type=int, default=25, help="at least 5, odd")
    options = parser.parse_args()
    if options.kind == "usage":
        measure_usage()
    else:
        measure(options.kind, options.turns)


if __name__ == "__main__":
    main()
