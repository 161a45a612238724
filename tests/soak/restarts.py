"""Kill ranks of a training at random steps, and see it go on from its checkpoint.

The job runs on three hosts: namespaces, each with its own sshd; needs root. A rank
drawn at random gets SIGKILL at a step drawn at random, ``--kills`` times. For each: the
parts of the time from the death to the first new step. These must hold:

- training goes on after the last checkpoint that was written, on all ranks;
- no process of a generation lives when the next one's first begins, on any host;
- no step of a generation is taken after one of the next, and each connects at a port
  of its own;
- the end is, to the last bit, that of a training without a kill.

The last line is JSON. Exits with 1 if anything was wrong.

    python -m tests.soak.restarts --kills 50
"""

import argparse
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.machines import Cluster, ClusterError, machines
from tests.soak.lives import MARK, TICK_S, Observer, now_s

RECOVERY_S = 120.0
"""A job that takes no step for so long is over."""

EVERY = 10
"""Steps between two checkpoints."""

FURTHEST = 3 * EVERY
"""Steps after which a rank of a generation is killed, at most."""

_BATCH_SIZE = 8
_NUM_IMAGES = 1437  # as many as digits.py has
_RANK = str(Path(__file__).with_name("restarts_rank.py"))
_PHASES = ("gone", "begun", "torch", "imported", "met", "step")

Line = dict[str, Any]


@dataclass(slots=True)
class Restart:
    """The results of one death.

    Attributes:
        parts: Seconds from the death on: until all of the old generation had ended
            (``gone``), until all ranks of the new one had ``begun``, imported torch,
            ``imported`` the rest, ``met``, and until the first one took a ``step``.
        wrong: What was not as it must be.
    """

    parts: dict[str, float]
    wrong: list[str]


@dataclass(slots=True)
class Tally:
    """The results of all deaths of one job."""

    restarts: list[Restart] = field(default_factory=list)
    num_lost: int = 0
    wrong: list[str] = field(default_factory=list)
    loss: str = ""


class Job:
    """A training with ranks that are killed one by one.

    Args:
        process: The launcher.
        observer: Of its processes.
        size: How many ranks there are.
    """

    def __init__(
        self, process: "subprocess.Popen[str]", observer: Observer, size: int
    ) -> None:
        self.lines: list[Line] = []
        self.said: list[str] = []
        self._process = process
        self._observer = observer
        self._size = size
        self._fresh: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._fresh.put(line)
        self._fresh.put("")

    def await_step(self, epoch: int, num_steps: int) -> None:
        """Wait until so many steps of a generation were said by its rank 0.

        Raises:
            TimeoutError: The job has ended, or is at a standstill.
        """
        due_s = now_s() + RECOVERY_S
        while num_steps:
            try:
                text = self._fresh.get(timeout=max(0.0, due_s - now_s()))
            except queue.Empty:
                raise TimeoutError(f"no step of generation {epoch}") from None
            if not text:
                raise TimeoutError(f"the job ended in generation {epoch}")
            line = self._keep(text)
            if line.get("event") == "step" and line["epoch"] == epoch:
                num_steps -= line["rank"] == 0

    def _keep(self, text: str) -> Line:
        brace = text.find("{")
        try:
            line: Line = json.loads(text[brace:]) if brace >= 0 else {}
        except ValueError:
            line = {}
        if line:
            self.lines.append(line)
        elif text.strip():
            self.said.append(text)
        return line

    def kill(self, epoch: int, rank: int) -> float:
        """Kill a rank; return when."""
        os.kill(self._observer.find(epoch, rank), 9)
        return now_s()

    def finish(self) -> int:
        """Wait for the end; return the exit code."""
        while text := self._fresh.get(timeout=RECOVERY_S):
            self._keep(text)
        return self._process.wait(RECOVERY_S)

    def of(self, epoch: int, event: str) -> list[Line]:
        """Return the lines of one kind of a generation's ranks."""
        return [o for o in self.lines if (o["epoch"], o["event"]) == (epoch, event)]

    def judge(self, epoch: int, died_s: float) -> Restart:
        """Judge a generation after the one in which a rank died."""
        lives = self._observer.lives
        gone_s = max(life.ended_s for life in lives if life.epoch < epoch)
        began_s = min(life.begun_s for life in lives if life.epoch == epoch)
        times = {"gone": gone_s}
        for phase in _PHASES[1:]:
            said = [line["at_s"] for line in self.of(epoch, phase)]
            times[phase] = min(said) if phase == "step" else max(said)
        wrong = self._compare(epoch)
        # A process is known to have begun within the tick after ``began_s``.
        if gone_s > began_s + TICK_S:
            wrong.append(f"generation {epoch} began while {epoch - 1} lived")
        return Restart({phase: at - died_s for phase, at in times.items()}, wrong)

    def _compare(self, epoch: int) -> list[str]:
        """Return the faults of a generation's steps, given those before."""
        wrong: list[str] = []
        old, new = self.of(epoch - 1, "step"), self.of(epoch, "step")
        reached = max(line["step"] for line in old)
        kept = {reached // EVERY * EVERY}
        if reached % EVERY == 0:
            # A step is said before it is kept.
            kept.add(max(0, reached - EVERY))
        begun = {line["rank"]: line["step"] - 1 for line in reversed(new)}
        # The next one to be killed may be so before its first step.
        met = {line["rank"] for line in self.of(epoch, "met")}
        is_whole = len(met) == self._size and len(begun) >= self._size - 1
        if not is_whole or len({*begun.values()} - kept) > 0:
            wrong.append(f"generation {epoch} began at {begun}, {kept} were kept")
        for rank, first in begun.items():
            mine = [line["step"] for line in new if line["rank"] == rank]
            if mine != list(range(first + 1, first + 1 + len(mine))):
                wrong.append(f"rank {rank} of generation {epoch} took steps {mine}")
        if max(o["at_s"] for o in old) > min(n["at_s"] for n in new):
            wrong.append(f"steps of generations {epoch - 1} and {epoch} mix")
        ports = [{line["port"] for line in lines} for lines in (old, new)]
        if len(ports[1]) != 1 or ports[0] & ports[1]:
            wrong.append(f"ports of generations {epoch - 1} and {epoch}: {ports}")
        return wrong


def launcher_words(hosts: Sequence[str], restarts: int, mark: str) -> list[str]:
    """Return the command line of ``ronde run`` up to the program."""
    run = [sys.executable, "-m", "ronde", "run", "--nested", "--engine", "gloo"]
    options = ["--max-restarts", str(restarts), "-x", f"{MARK}={mark}"]
    return [*run, *hosts, *options, "--", sys.executable]


def environment(mark: str) -> dict[str, str]:
    """Return the environment of a launcher: one thread a rank."""
    path = os.defpath
    return {"PATH": path, "HOME": "/tmp", "OMP_NUM_THREADS": "1", MARK: mark}  # noqa: S108


@dataclass(frozen=True, slots=True)
class Bench:
    """The hosts of the jobs; ``chance`` draws ranks and steps."""

    cluster: Cluster
    slots: int
    chance: random.Random

    @property
    def size(self) -> int:
        return self.slots * len(self.cluster.hosts)

    def start(self, words: Sequence[str], mark: str) -> "subprocess.Popen[str]":
        return self.cluster.start(
            self.cluster.hosts[0],
            words,
            env=environment(mark),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, epochs: int, kills: int) -> Tally:
        """Run one job and kill ranks of it."""
        names = [f"{host.name}:{self.slots}" for host in self.cluster.hosts]
        ssh = f"-F {self.cluster.ssh_config}"
        hosts = ("-H", ",".join(names), "--ssh-args", ssh)
        mark, tally, deaths = os.urandom(8).hex(), Tally(), list[float]()
        name = self.cluster.folder / mark
        words = [
            *launcher_words(hosts, kills, mark),
            *(_RANK, "--epochs", str(epochs), "--batch-size", str(_BATCH_SIZE)),
            *("--checkpoint", f"{name}.pt", "--checkpoint-every", str(EVERY)),
            *("--json", f"{name}.json"),
        ]
        observer = Observer(mark)
        process = self.start(words, mark)
        with process, observer.watching():
            job = Job(process, observer, self.size)
            try:
                self._kill_ranks(job, kills, deaths)
                if code := job.finish():
                    tally.wrong.append(f"exit code {code}: {''.join(job.said)}")
            except (TimeoutError, queue.Empty) as error:
                tally.num_lost += 1
                tally.wrong.append(f"{error}: {''.join(job.said)[-3000:]}")
            finally:
                process.terminate()
                process.wait(RECOVERY_S)
        for epoch, died_s in enumerate(deaths, 1):
            if job.of(epoch, "step"):
                tally.restarts.append(job.judge(epoch, died_s))
                tally.wrong += tally.restarts[-1].wrong
        tally.loss = loss_of(Path(f"{name}.json"))
        return tally

    def _kill_ranks(self, job: Job, kills: int, deaths: list[float]) -> None:
        for epoch in range(kills):
            job.await_step(epoch, self.chance.randint(1, FURTHEST))
            deaths.append(job.kill(epoch, self.chance.randrange(self.size)))
            print(f"{epoch + 1} killed", end="\r", file=sys.stderr, flush=True)
        job.await_step(kills, 1)

    def count_epochs(self, kills: int) -> int:
        """Return the number of steps that is enough for this many kills."""
        steps_an_epoch = _NUM_IMAGES // (_BATCH_SIZE * self.size)
        return (kills + 1) * FURTHEST // steps_an_epoch + 1


def loss_of(record: Path) -> str:
    """Return the loss of a training's end to the last bit."""
    if not record.exists():
        return "none"
    [line] = record.read_text().splitlines()
    return float(json.loads(line)["values"]["loss"]).hex()


def report(tally: Tally, seed: int) -> None:
    rows: dict[str, list[float]] = {}
    print(f"{len(tally.restarts)} restarts, {tally.num_lost} jobs lost")
    print(f"{'s from the death until':24} {'median':>7} {'p95':>7} {'worst':>7}")
    for phase in _PHASES:
        ordered = sorted(restart.parts[phase] for restart in tally.restarts)
        if ordered:
            p95 = ordered[round(0.95 * (len(ordered) - 1))]
            rows[phase] = [statistics.median(ordered), p95, ordered[-1]]
            print(f"{phase:24}", *(f"{figure:7.2f}" for figure in rows[phase]))
    for text in tally.wrong:
        print(f"WRONG: {text}")
    result = {
        "benchmark": "restarts",
        "seed": seed,
        "restarts": len(tally.restarts),
        "lost": tally.num_lost,
        "wrong": len(tally.wrong),
        "median_p95_worst_s": {w: [round(f, 3) for f in r] for w, r in rows.items()},
    }
    print(json.dumps(result))


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill ranks, and see training go on.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--slots", type=int, default=2, help="ranks on each host")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    try:
        with machines(3) as cluster:
            bench = Bench(cluster, options.slots, random.Random(options.seed))
            epochs = bench.count_epochs(options.kills)
            undisturbed = bench.run(epochs, 0).loss
            tally = bench.run(epochs, options.kills)
    except ClusterError as error:
        print(f"restarts: {error}", file=sys.stderr)
        return 2
    if tally.loss != undisturbed:
        tally.wrong.append(f"loss {tally.loss}, undisturbed {undisturbed}")
    report(tally, options.seed)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
