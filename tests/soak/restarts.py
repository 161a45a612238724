"""Kill ranks of a training at random steps, and see it go on from its checkpoint.

A job on three hosts (namespaces, each with its own sshd; needs root) or, with
``--local``, of two ranks here. A rank drawn at random gets SIGKILL at a step drawn at
random, ``--kills`` times. For each: the time from the death to the first new step, and
where it went. What must hold, and is counted where it does not:

- training goes on after the last checkpoint that was written, on all ranks;
- no process of a generation lives when the next one's first begins, on any host;
- no step of a generation is taken after one of the next, and each meets at a port of
  its own;
- the end is, to the last bit, that of a training without a kill.

``--peer`` has torchrun do the same with two ranks here, the two in turn. The last line
is JSON. Exits with 1 if anything was wrong with ronde.

    python -m tests.soak.restarts --kills 50
    python -m tests.soak.restarts --local --peer --kills 20
"""

import argparse
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.machines import ClusterError, machines
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
Start = Callable[[Sequence[str], dict[str, str]], "subprocess.Popen[str]"]


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
    """The results of all deaths under one launcher."""

    restarts: list[Restart] = field(default_factory=list)
    num_lost: int = 0
    wrong: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add the results of another one."""
        self.restarts += other.restarts
        self.num_lost += other.num_lost
        self.wrong += other.wrong
        self.losses += other.losses


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


def start_here(
    words: Sequence[str], environment: dict[str, str]
) -> "subprocess.Popen[str]":
    """Start a launcher on this machine."""
    return subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ronde_words(hosts: Sequence[str], restarts: int, mark: str) -> list[str]:
    """Return the command line of ``ronde run`` up to the program."""
    run = [sys.executable, "-m", "ronde", "run", "--nested", "--engine", "gloo"]
    options = ["--max-restarts", str(restarts), "-x", f"{MARK}={mark}"]
    return [*run, *hosts, *options, "--", sys.executable]


def torchrun_words(_hosts: Sequence[str], restarts: int, _mark: str) -> list[str]:
    """Return the command line of torchrun up to the program."""
    run = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
    return [*run, "--nproc-per-node=2", f"--max-restarts={restarts}"]


def environment(mark: str) -> dict[str, str]:
    """Return the environment of a launcher: one thread a rank."""
    path = os.defpath
    return {"PATH": path, "HOME": "/tmp", "OMP_NUM_THREADS": "1", MARK: mark}  # noqa: S108


@dataclass(frozen=True, slots=True)
class Bench:
    """The hosts and the command of the jobs.

    Attributes:
        start: Starts a launcher.
        hosts: Options of ``ronde run`` that say where.
        size: How many ranks.
        folder: For checkpoints and records, seen by all hosts.
        chance: Draws ranks and steps.
    """

    start: Start
    hosts: tuple[str, ...]
    size: int
    folder: Path
    chance: random.Random

    def run(
        self,
        make_words: Callable[[Sequence[str], int, str], list[str]],
        epochs: int,
        kills: int,
    ) -> Tally:
        """Run one job in which ranks are killed."""
        mark, tally, deaths = os.urandom(8).hex(), Tally(), list[float]()
        name = self.folder / mark
        words = [
            *make_words(self.hosts, kills, mark),
            *(_RANK, "--epochs", str(epochs), "--batch-size", str(_BATCH_SIZE)),
            *("--checkpoint", f"{name}.pt", "--checkpoint-every", str(EVERY)),
            *("--json", f"{name}.json"),
        ]
        observer = Observer(mark)
        process = self.start(words, environment(mark))
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
        tally.losses.append(loss_of(Path(f"{name}.json")))
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


def report(name: str, tally: Tally) -> dict[str, Any]:
    """Print and return the results of deaths under one launcher."""
    rows: dict[str, list[float]] = {}
    for phase in _PHASES:
        ordered = sorted(restart.parts[phase] for restart in tally.restarts)
        if ordered:
            p95 = ordered[round(0.95 * (len(ordered) - 1))]
            rows[phase] = [statistics.median(ordered), p95, ordered[-1]]
    print(f"\n{name}: {len(tally.restarts)} restarts, {tally.num_lost} jobs lost")
    print(f"{'s from the death until':24} {'median':>7} {'p95':>7} {'worst':>7}")
    for phase, figures in rows.items():
        print(f"{phase:24}", *(f"{figure:7.2f}" for figure in figures))
    for text in tally.wrong:
        print(f"WRONG: {text}")
    return {
        "launcher": name,
        "restarts": len(tally.restarts),
        "lost": tally.num_lost,
        "wrong": len(tally.wrong),
        "median_p95_worst_s": {w: [round(f, 3) for f in r] for w, r in rows.items()},
    }


@contextmanager
def bench(options: argparse.Namespace) -> Generator[Bench]:
    """Make the hosts."""
    chance = random.Random(options.seed)
    if options.local:
        with tempfile.TemporaryDirectory() as folder:
            yield Bench(start_here, ("-n", "2"), 2, Path(folder), chance)
        return
    with machines(3) as cluster:
        hosts = [f"{host.name}:{options.slots}" for host in cluster.hosts]

        def start(
            words: Sequence[str], environment: dict[str, str]
        ) -> "subprocess.Popen[str]":
            return cluster.start(
                cluster.hosts[0],
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

        words = ("-H", ",".join(hosts), "--ssh-args", f"-F {cluster.ssh_config}")
        yield Bench(start, words, 3 * options.slots, cluster.folder, chance)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill ranks, and see training go on.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--local", action="store_true", help="two ranks here")
    parser.add_argument("--slots", type=int, default=2, help="ranks on each host")
    parser.add_argument("--peer", action="store_true", help="torchrun, too, by turns")
    parser.add_argument("--each", type=int, default=0, help="kills in a job (all)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.peer and not options.local:
        parser.error("--peer must come with --local: torchrun reaches no other host")
    launchers = {"ronde run": ronde_words}
    if options.peer:
        launchers["torchrun"] = torchrun_words
    tallies = {name: Tally() for name in launchers}
    each = options.each or (5 if options.peer else options.kills)
    try:
        with bench(options) as place:
            epochs = place.count_epochs(each)
            [undisturbed] = place.run(ronde_words, epochs, 0).losses
            for _ in range(options.kills // each):
                for name, make_words in launchers.items():
                    tallies[name].add(place.run(make_words, epochs, each))
    except ClusterError as error:
        print(f"restarts: {error}", file=sys.stderr)
        return 2
    for tally in tallies.values():
        tally.wrong += [
            f"loss {loss}, undisturbed {undisturbed}"
            for loss in tally.losses
            if loss != undisturbed
        ]
    rows = [report(name, tally) for name, tally in tallies.items()]
    print(json.dumps({"benchmark": "restarts", "seed": options.seed, "rows": rows}))
    return 1 if tallies["ronde run"].wrong else 0


if __name__ == "__main__":
    sys.exit(main())
