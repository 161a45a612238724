"""Time the start of jobs of three pods, and the loss and return of a pod.

Pods are containers of ``tests/containers``. A start: from the begin of the last pod's
process until the last rank has begun. A loss, in an elastic training that has a step of
20 ms: from SIGKILL to the pod until the slowest survivor has applied its next step. A
return: from the end of the new rank's imports until it has applied a step. With
``--drain`` pods end with notice instead; then steps that were done again are counted.
The last line is JSON. Needs root.

    python benchmarks/pods.py --starts 50 --losses 50
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests import ledger  # noqa: E402
from tests.containers.pods import PodNetwork, pod_network, why_not  # noqa: E402
from tests.soak.figures import show  # noqa: E402
from tests.soak.pod_job import PodJob  # noqa: E402

_NOTE = 'date +%s.%N >/job/begun.$RONDE_NODE_INDEX; exec "$@"'
_SETTLED_STEPS = 5  # of all three, before the next loss


def time_start(network: PodNetwork, number: int) -> float:
    """Return the seconds from the last pod's process to the last rank."""
    job = PodJob(network, "timed", f"start{number}", random.Random(number))
    job.before = ("sh", "-c", _NOTE, "sh")
    for index in (0, 1):
        job.start(index)
    job.await_line(job.pods[0], "(1 of 2)")
    job.start(2)
    job.end_with(0)
    if wrong := job.problems():
        raise AssertionError(wrong)
    ranks = [float((job.folder / f"rank.{n}").read_text()) for n in range(3)]
    seconds = max(ranks) - float((job.folder / "begun.2").read_text())
    job.close()
    return seconds


class Training:
    """An elastic training of three pods, of which one is lost and comes back."""

    def __init__(self, network: PodNetwork) -> None:
        self.job = PodJob(network, "training", "training", random.Random(1))
        self.job.start_all()
        self.job.await_world(3)

    def lose(self, sig: int) -> tuple[float, float]:
        """Lose a pod; return the seconds of the loss and of the return."""
        job = self.job
        number = job.nodes()[0]
        others = [n for n in range(3) if n != number]
        view = max(self.applied(others[0]))[1]  # of the newest step
        at_s = time.monotonic()
        pod = job.pods[number]
        pod.signal(sig)
        job.expected[pod] = (128 + sig,)
        job.until(lambda: all(self.next_s(n, view) for n in others), "survivors")
        loss_s = max(self.next_s(n, view) for n in others) - at_s
        if sig == signal.SIGTERM:
            job.await_end(pod)
        before = {path.name for path in self.files(number)}
        job.start(number)
        job.until(lambda: self.has_returned(number, before), "the pod's return")
        new = [p for p in self.files(number) if p.name not in before]
        loaded_s = float(
            new[0].with_name(new[0].name.replace("applied", "loaded")).read_text()
        )
        return loss_s, read_applied(new[0])[0][0] - loaded_s

    def files(self, number: int) -> list[Path]:
        return list(self.job.folder.glob(f"applied-train-{number}-*"))

    def applied(self, number: int) -> list[tuple[float, int, int]]:
        return [each for path in self.files(number) for each in read_applied(path)]

    def next_s(self, number: int, view: int) -> float:
        """Return the time of the first step after a view; 0 before it."""
        times = [at_s for at_s, own, _ in self.applied(number) if own > view]
        return min(times, default=0.0)

    def has_returned(self, number: int, before: set[str]) -> bool:
        new = [p for p in self.files(number) if p.name not in before]
        return bool(new) and len(read_applied(new[0])) > _SETTLED_STEPS

    def finish(self) -> int:
        """End the training; return the number of steps that were done again."""
        (self.job.folder / "finish").touch()
        self.job.end_with(0)
        if wrong := self.job.problems():
            raise AssertionError(wrong)
        views: dict[int, set[int]] = defaultdict(set)
        for entry in ledger.read(self.job.folder.glob("ledger-*")):
            views[entry.step].add(entry.view)
        self.job.close()
        return sum(len(each) - 1 for each in views.values())


def read_applied(path: Path) -> list[tuple[float, int, int]]:
    """Return the times, views and steps of a rank."""
    found: list[tuple[float, int, int]] = []
    for line in path.read_text().split("\n")[:-1]:
        at_s, view, step = line.split()
        found.append((float(at_s), int(view), int(step)))
    return found


def main() -> int:
    """Measure, and print the table; return the exit code."""
    parser = argparse.ArgumentParser(description="Time jobs of pods.")
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--losses", type=int, default=50)
    parser.add_argument("--drain", action="store_true", help="losses come with notice")
    options = parser.parse_args()
    if reason := why_not():
        print(f"pods: {reason}", file=sys.stderr)
        return 2
    times: dict[str, list[float]] = defaultdict(list)
    load, again = os.getloadavg(), 0
    with pod_network() as network:
        for number in range(options.starts):
            seconds = time_start(network, number)
            times["last pod's process to ranks started"].append(seconds)
            print(f"start {number}: {seconds:.3f} s", file=sys.stderr)
        if options.losses:
            training = Training(network)
            sig = signal.SIGTERM if options.drain else signal.SIGKILL
            for _ in range(options.losses):
                loss_s, return_s = training.lose(sig)
                times[f"{sig.name} to next step"].append(loss_s)
                times["end of imports to first step"].append(return_s)
                text = f"loss {loss_s:.3f} s, return {return_s:.3f} s"
                print(text, file=sys.stderr)
            again = training.finish()
    loads = [round(each, 1) for each in (*load[:1], *os.getloadavg()[:1])]
    print(json.dumps({"all": times}))
    show("pods", times, {}, load=loads, steps_done_again=again)
    return 0


if __name__ == "__main__":
    sys.exit(main())
