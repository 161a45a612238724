"""Start jobs on two nodes of a real Ray, break them, and count wrong ends.

For each fault, drawn at random: whether the exit code was right, how long the end took
from then on, and whether anything was left: a process of ronde on either host, a task,
a placement group or a resource of Ray that is not free. The last line is JSON. Exits
with 1 if anything was wrong. Needs root, and Ray: ``scripts/test_ray`` runs it.

    python -m tests.soak.ray_faults --runs 50 --seed 1
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster.machines import HostProcess
from tests.limits import until
from tests.ray.cluster import RayCluster, end_of, ray_cluster
from tests.soak.figures import reset_signals, show
from tests.soak.launch_faults import Tally

_STAY = 'touch "$0/ready.$RANK"; exec sleep 1000'
_LOST = 69


def main() -> int:
    """Run the loop and print the table; return the exit code."""
    reset_signals()
    parser = argparse.ArgumentParser(description="Break jobs on Ray.")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chosen = random.Random(options.seed)
    names = [list(FAULTS)[i % len(FAULTS)] for i in range(options.runs)]
    chosen.shuffle(names)
    tallies = {name: Tally() for name in FAULTS}
    with tempfile.TemporaryDirectory() as folder, ray_cluster([Path(folder)]) as ray:
        for run, name in enumerate(names):
            own = Path(folder, str(run))
            own.mkdir()
            seconds, wrong = _break_one(ray, name, own)
            tallies[name].seconds.append(seconds)
            tallies[name].wrong += wrong
            print(f"{run + 1}: {name}: {seconds:.2f} s {wrong or ''}", flush=True)
    is_good = show(
        "ray-faults",
        {name: tally.seconds for name, tally in tallies.items()},
        {name: tally.wrong for name, tally in tallies.items()},
        seed=options.seed,
    )
    return 0 if is_good else 1


def _break_one(ray: RayCluster, name: str, folder: Path) -> tuple[float, list[str]]:
    """Start a job and break it; return the seconds to its end, and what was wrong."""
    apply, codes = FAULTS[name]
    job = ray.launch("--grace", "1s", "--", "sh", "-c", _STAY, str(folder))
    for rank in (0, 1):
        until(lambda: (folder / f"ready.{rank}").exists() or job.poll() is not None)  # noqa: B023
    begun_s = time.monotonic()
    apply(ray, job)
    code, _, errors = end_of(job)
    seconds = time.monotonic() - begun_s
    wrong = [] if code in codes else [f"exit code {code}: {errors}"]
    if name.endswith("Ray node"):
        host = ray.cluster.hosts[1]
        until(lambda: ray.state()["nodes"] == 1)
        if "crash" in name:
            ray.cluster.boot(host)
        ray.restart_node(host)
        until(lambda: ray.state()["nodes"] == 2)
    try:
        ray.await_nothing_left()
    except AssertionError as error:
        wrong.append(f"left: {error}")
    return seconds, wrong


def _kill(ray: RayCluster, host: int, *words: str) -> None:
    """Kill the first process of a host that has these words."""
    found = [
        process.pid
        for process in ray.cluster.processes(ray.cluster.hosts[host])
        if all(any(word in each for each in process.words) for word in words)
    ]
    os.kill(min(found), signal.SIGKILL)


def _signal(number: int) -> Callable[[RayCluster, HostProcess], None]:
    return lambda _, job: job.send_signal(number)


FAULTS: dict[str, tuple[Callable[[RayCluster, HostProcess], None], set[int]]] = {
    "kill a task": (lambda ray, _: _kill(ray, 1, "ray::run_agent"), {_LOST}),
    "kill an agent": (lambda ray, _: _kill(ray, 0, "run", "--agent"), {_LOST}),
    "kill a rank": (lambda ray, _: _kill(ray, 1, "sleep", "1000"), {137}),
    "kill Ray's client": (lambda ray, _: _kill(ray, 0, "ray_nodes"), {_LOST}),
    "kill the raylet of a Ray node": (lambda ray, _: _kill(ray, 1, "raylet"), {_LOST}),
    "crash a Ray node": (
        lambda ray, _: ray.cluster.crash(ray.cluster.hosts[1]),
        {_LOST},
    ),
    "kill the launcher": (_signal(signal.SIGKILL), {-9, 137}),
    "Ctrl-C": (_signal(signal.SIGINT), {130}),
    "SIGTERM": (_signal(signal.SIGTERM), {143}),
}
"""What each fault does, and the exit codes that are right after it."""


if __name__ == "__main__":
    sys.exit(main())
