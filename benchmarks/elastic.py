"""Time the pause of an elastic job when a rank is lost, leaves or joins.

Jobs of four ranks here train an MLP (``elastic_rank.py``); ranks are killed or stopped,
or a host (``127.0.0.1``) comes and goes in a watched host file. What is timed is seen
from outside: from the signal, or from the last step before a planned change, to the
first step that the slowest of the ranks had applied in the view after it.

    kill      SIGKILL of a rank, each position in turn; a new one joins afterwards
    stop      SIGSTOP of a rank
    spare     SIGKILL of a rank of four, while another process waits to take its place
    plan      a host joins, and leaves again; nothing may be done twice
    restart   SIGKILL of a rank under ``ronde run --max-restarts``
    torchrun  the same under ``torchrun --max-restarts``
    torchft   the same with torchft, of the Python that ``--torchft`` names
    cost      steps of a ``Loop`` against plain ones, by turns, two ranks

While a new process gets ready to join, the others rest between their steps: it takes
half as long, and nothing is timed then.

Kinds, engines and sizes come by turns, ``--each`` faults at a time, until all have had
``--faults``. Prints a table and the load beside it; ``--json`` appends a record for
each change, and ``--read`` prints the table of such files alone. Exits with 1 if a job
was lost or a step done twice.

    python benchmarks/elastic.py --kinds kill --engines gloo --faults 200 --json FILE
"""

import argparse
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ronde.records import Record, append_record

SIZE = 4
LIMIT_S = 60.0
"""A job in which nothing comes of a fault for so long is lost."""

_RANK = str(Path(__file__).with_name("elastic_rank.py"))
_POLL_S = 0.02
_JOINS_S = 1.3  # until a spare that is ready waits
_STEPS = 8  # of a view, before it is disturbed
_PEERS = ("restart", "torchrun", "torchft")
_KINDS = ("kill", "stop", "spare", "plan", *_PEERS, "cost")


@dataclass(slots=True)
class Part:
    """The times of one process in one view."""

    rank: int
    size: int
    first_s: float
    last_s: float
    first_step: int
    last_step: int
    num_steps: int = 1
    steps_s: list[float] = field(default_factory=list[float])  # of the first few


@dataclass(slots=True)
class Process:
    """The notes of one process."""

    parts: dict[int, Part] = field(default_factory=dict[int, Part])  # by view
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    is_ready: bool = False
    num_repeated: int = 0
    read: int = 0  # bytes
    newest_step: int = -1

    def take(self, note: list[Any]) -> None:
        """Add one note to the others."""
        if isinstance(note[0], str):
            self.spans.append((note[0], note[1], note[-1]))
            return
        at_s, step, view, rank, size = note
        self.is_ready = True
        if view < 0:
            return
        part = self.parts.get(view)
        self.num_repeated += step <= self.newest_step
        self.newest_step = max(step, self.newest_step)
        if part is None:
            self.parts[view] = Part(rank, size, at_s, at_s, step, step)
            return
        if part.num_steps < _STEPS:
            part.steps_s.append(at_s - part.last_s)
        part.last_s, part.last_step, part.size = at_s, step, size
        part.num_steps += 1


class JobLostError(Exception):
    """A job ended, or nothing came of a fault."""


class Job:
    """A training, seen from outside."""

    def __init__(self, folder: Path, words: Sequence[str], engine: str) -> None:
        self.processes: dict[int, Process] = {}
        self._folder, self._rest = folder / "notes", folder / "rest"
        self._folder.mkdir()
        self._output = folder / "output"
        self._env = own_environment(self._folder, engine)
        self._launched = [self.launch(words)]

    def launch(self, words: Sequence[str], **more: str) -> "subprocess.Popen[bytes]":
        """Start a process of the job."""
        with self._output.open("ab") as output:
            return subprocess.Popen(
                words,
                env=self._env | more,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def view(self) -> int:
        """The newest view in which a step was applied."""
        return max((v for p in self.processes.values() for v in p.parts), default=-1)

    def members(self, view: int) -> dict[int, Part]:
        every = self.processes.items()
        return {pid: p.parts[view] for pid, p in every if view in p.parts}

    def waiting(self) -> list[int]:
        """Return the living processes that wait to join."""
        every = self.processes.items()
        return [
            pid
            for pid, p in every
            if p.is_ready and not p.parts and Path(f"/proc/{pid}").exists()
        ]

    def read(self) -> None:
        """Read new notes."""
        for path in self._folder.iterdir():
            process = self.processes.setdefault(int(path.name), Process())
            with path.open("rb") as file:
                file.seek(process.read)
                whole = file.read()
            whole = whole[: whole.rfind(b"\n") + 1]
            process.read += len(whole)
            for line in whole.splitlines():
                process.take(json.loads(line))

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds of the notes."""
        due_s = time.monotonic() + LIMIT_S
        while True:
            self.read()
            if condition():
                return
            if time.monotonic() > due_s or self._launched[0].poll() is not None:
                tail = self._output.read_text(errors="replace")[-6000:]
                raise JobLostError(f"no {what}: {tail}")
            time.sleep(_POLL_S)

    def await_joiner(self) -> None:
        """Wait until a new process is ready to join, while the others hardly train."""
        self._rest.touch()
        try:
            self.wait("joiner", lambda: bool(self.waiting()))
        finally:
            self._rest.unlink()

    def await_whole(self, size: int, after: int = -1, num_steps: int = 1) -> int:
        """Return a view later than ``after`` in which so many have applied steps."""

        def is_whole() -> bool:
            parts = self.members(self.view).values()
            done = [p for p in parts if p.size == size and p.num_steps >= num_steps]
            return self.view > after and len(done) == size

        self.wait(f"view of {size} after {after}", is_whole)
        return self.view

    def await_next(self, after: int) -> int:
        """Return the first view after another one, when all have applied a step."""

        def later() -> int:
            views = {v for p in self.processes.values() for v in p.parts if v > after}
            whole = [
                view
                for view in views
                if (found := list(self.members(view).values()))
                and len(found) == found[0].size
            ]
            return min(whole, default=-1)

        self.wait(f"view after {after}", lambda: later() >= 0)
        return later()

    def end(self) -> None:
        """End all that was started."""
        for process in self._launched:
            process.terminate()
        for process in self._launched:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def replace(self) -> None:
        """Start processes in the place of those killed; launchers do so unasked."""


class TorchftJob(Job):
    """Replica groups of one rank each and their lighthouse."""

    def __init__(self, folder: Path, python: str, state_mb: int, engine: str) -> None:
        port = free_port()
        lighthouse = str(Path(python).with_name("torchft_lighthouse"))
        words = [lighthouse, "--min_replicas", "1", "--bind", f"127.0.0.1:{port}"]
        super().__init__(folder, words, engine)
        self._env["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
        self._words = [python, _RANK, "torchft", "--state", str(state_mb)]
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(SIZE):
            self._start(rank)

    def _start(self, rank: int) -> None:
        self._ranks[rank] = self.launch(self._words, RANK=str(rank))
        self._launched.append(self._ranks[rank])

    def replace(self) -> None:
        """Start all anew that have ended: survivors, too, may have died."""
        for rank, process in list(self._ranks.items()):
            if process.poll() is not None:
                self._start(rank)


def own_environment(folder: Path, engine: str) -> dict[str, str]:
    """Return the environment of a job: one thread a rank."""
    return {
        "PATH": os.defpath,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HOME": "/tmp",  # noqa: S108
        "OMP_NUM_THREADS": "1",
        "RONDE_ENGINE": engine,
        "FOLDER": str(folder),
    }


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@dataclass(frozen=True, slots=True)
class Case:
    """The settings of a measurement."""

    kind: str
    engine: str
    state_mb: int

    def words(self, folder: Path) -> list[str]:
        """Return the command line of its job."""
        how = {"restart": "anew", "torchrun": "ddp"}.get(self.kind, "elastic")
        rank = [sys.executable, _RANK, how, "--state", str(self.state_mb)]
        run = [sys.executable, "-m", "ronde", "run", "--nested"]
        if self.kind == "torchrun":
            run = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
            return [*run, f"--nproc-per-node={SIZE}", "--max-restarts=999", *rank[1:]]
        if self.kind == "restart":
            return [*run, "-n", str(SIZE), "--max-restarts", "999", "--", *rank]
        elastic = ["--min-ranks", "2", "--max-ranks", str(SIZE)]
        elastic += ["--cooldown", "0.01s,0.01s"]
        if self.kind == "spare":
            hosts = ["-H", f"localhost:{SIZE + 1}"]
            return [*run, *hosts, *elastic, "--spares", "1", "--", *rank]
        if self.kind != "plan":
            return [*run, "-n", str(SIZE), *elastic, "--", *rank]
        elastic += ["--host-discovery", str(folder / "hosts")]
        elastic += ["--discover-every", "0.5s", "--failure-domain", "host"]
        write_hosts(folder / "hosts", 0)
        return [*run, *elastic, "--", *rank]


def write_hosts(path: Path, others: int) -> None:
    """Have the job find one host, or two."""
    lines = [f"localhost slots={SIZE - 1}"] + ["127.0.0.1 slots=1"] * others
    path.write_text("\n".join(lines) + "\n")


class Bench:
    """Breaks jobs, and keeps the results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rows: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self._options = options
        self._chance = random.Random(options.seed)
        self._num_of: dict[Case, int] = {}

    def run(self, case: Case, num_faults: int) -> None:
        """Run one job with so many faults."""
        with tempfile.TemporaryDirectory(prefix="pauses-") as name:
            folder = Path(name)
            python = self._options.torchft
            if case.kind == "torchft":
                job: Job = TorchftJob(folder, python, case.state_mb, case.engine)
            else:
                job = Job(folder, case.words(folder), case.engine)
            try:
                job.await_whole(SIZE - (case.kind == "plan"), num_steps=_STEPS)
                for _ in range(num_faults):
                    if case.kind == "plan":
                        self._come_and_go(case, job, folder)
                    else:
                        self._break(case, job)
                    self._num_of[case] = self._num_of.get(case, 0) + 1
            except JobLostError as error:
                self.wrong.append(f"{case}: {error}")
            finally:
                job.end()
            job.read()
            repeated = sum(p.num_repeated for p in job.processes.values())
            if repeated and case.kind not in _PEERS:
                self.wrong.append(f"{case}: {repeated} steps done twice")

    def _break(self, case: Case, job: Job) -> None:
        """Kill or stop one rank, and see the others go on, then all."""
        if case.kind == "spare":
            job.await_joiner()
            time.sleep(_JOINS_S)
        time.sleep(self._chance.uniform(0, 0.1))
        job.read()
        before = job.view
        number = self._num_of.get(case, 0) % SIZE
        pid = next(n for n, p in job.members(before).items() if p.rank == number)
        is_stop = case.kind == "stop"
        at_s = time.monotonic()
        os.kill(pid, signal.SIGSTOP if is_stop else signal.SIGKILL)
        after = job.await_next(before)
        self._note(case, job, case.kind, (before, after), at_s, number)
        is_short = job.members(after)[min(job.members(after))].size < SIZE
        if is_short and case.kind == "spare":
            self.wrong.append(f"{case}: view {after} has no spare")
        if is_short or is_stop:
            job.replace()
            if case.kind not in _PEERS:
                job.await_joiner()
            whole = job.await_whole(SIZE, after)
            if whole == after + 1 and case.kind not in _PEERS:
                self._note(case, job, "replaced", (after, whole))
        job.await_whole(SIZE, before, _STEPS)

    def _come_and_go(self, case: Case, job: Job, folder: Path) -> None:
        """Have a host come, and take it out again."""
        for what, others in (("join", 1), ("leave", 0)):
            before = job.view
            write_hosts(folder / "hosts", others)
            if others:
                job.await_joiner()
            after = job.await_next(before)
            self._note(case, job, what, (before, after))
            job.await_whole(SIZE - 1 + others, before, _STEPS)

    def _note(
        self,
        case: Case,
        job: Job,
        what: str,
        views: tuple[int, int],
        at_s: float = 0.0,
        number: int = -1,
    ) -> None:
        """Keep the time from one view to another."""
        old, new = (job.members(view) for view in views)
        both = sorted(old.keys() & new.keys())
        took = {pid: new[pid].first_s - (at_s or old[pid].last_s) for pid in both}
        slowest = max(took, key=lambda pid: took[pid], default=0)
        last_s = max(part.first_s for part in new.values())
        everybody_s = last_s - (at_s or max(old[pid].last_s for pid in both))
        step_s = [each for p in old.values() for each in p.steps_s]
        begins_s = at_s or old[slowest].last_s
        ends_s = new[slowest].first_s if slowest else last_s
        row = {
            "what": what,
            "engine": case.engine,
            "state_mb": case.state_mb,
            "rank": number,
            "survivors_s": took.get(slowest, everybody_s),
            "everybody_s": everybody_s,
            "from_size": next(iter(old.values())).size,
            "to_size": next(iter(new.values())).size,
            "step_s": statistics.median(step_s) if step_s else None,
            "steps_apart": len({new[pid].first_step for pid in both}) - 1,
            "broadcast_s": bandwidth_of(job, views[0]),
            "load": os.getloadavg()[0],
            "spans_ms": spans_of(job, slowest, begins_s, ends_s),
        }
        self.rows.append(row)
        if self._options.json:
            append_record(self._options.json, Record(kind="elastic", values=row))
        print(f"{len(self.rows)} changes", end="\r", file=sys.stderr, flush=True)

    def measure_cost(self) -> None:
        """Run an elastic job and another one, by turns."""
        options = self._options
        for turn in range(options.cost_jobs):
            for is_elastic in (True, False) if turn % 2 else (False, True):
                with tempfile.TemporaryDirectory(prefix="pauses-") as name:
                    run = [sys.executable, "-m", "ronde", "run", "--nested", "-n", "2"]
                    run += ["--min-ranks", "1", "--max-ranks", "2"] * is_elastic
                    rank = [sys.executable, _RANK, "cost", "--builds", "1"]
                    rank += ["--rounds", str(options.cost_rounds)]
                    env = own_environment(Path(name), options.engines[0])
                    subprocess.run([*run, "--", *rank], env=env, check=True)
                    notes = [p.read_text().splitlines() for p in Path(name).iterdir()]
                for line in (line for lines in notes for line in lines):
                    what, *step_s = json.loads(line)
                    model, variant, _ = what.split()
                    row = {"what": "cost", "model": model, "variant": variant}
                    row |= {"is_elastic": is_elastic, "turn": turn, "step_s": step_s}
                    self.rows.append(row | {"load": os.getloadavg()[0]})
                    if options.json:
                        record = Record(kind="elastic", values=self.rows[-1])
                        append_record(options.json, record)


def bandwidth_of(job: Job, view: int) -> float | None:
    """Return the seconds of a plain broadcast of the state, on the slowest rank."""
    found = [
        end_s - begin_s
        for process in job.processes.values()
        for name, begin_s, end_s in process.spans
        if name == "bandwidth"
        and (part := process.parts.get(view))
        and part.first_s <= begin_s <= part.last_s
    ]
    return max(found, default=None)


def spans_of(
    job: Job, pid: int, begin_s: float, end_s: float
) -> dict[str, tuple[float, float]]:
    """Return the slowest's time of each event, in ms since the beginning."""
    spans = job.processes[pid].spans if pid else []
    return {
        name: (round((a - begin_s) * 1e3, 1), round((b - begin_s) * 1e3, 1))
        for name, a, b in spans
        if begin_s <= b <= end_s and name != "bandwidth"
    }


def figures(values: Sequence[float]) -> list[float]:
    """Return median, 95th percentile and worst."""
    ordered = sorted(values)
    p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
    return [statistics.median(ordered), p95, ordered[-1]]


def print_changes(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each kind of change."""
    head = ("what", "engine", "MB", "number", "p50 s", "p95 s", "worst s", "all p50")
    print("".join(f"{word:>14}" for word in (*head, "step p50", "bcast p50", "load")))
    keys = sorted({(r["what"], r["engine"], r["state_mb"]) for r in rows})
    for key in keys:
        these = [r for r in rows if (r["what"], r["engine"], r["state_mb"]) == key]
        p50, p95, worst = figures([r["survivors_s"] for r in these])
        cells = [f"{p50:.3f}", f"{p95:.3f}", f"{worst:.3f}"]
        for name in ("everybody_s", "step_s", "broadcast_s", "load"):
            known = [r[name] for r in these if r[name] is not None]
            cells.append(f"{statistics.median(known):.3f}" if known else "-")
        words = (key[0], key[1], key[2], len(these), *cells)
        print("".join(f"{word:>14}" for word in words))
    for key in keys:
        these = [r for r in rows if (r["what"], r["engine"], r["state_mb"]) == key]
        names = dict.fromkeys(n for r in these for n in r["spans_ms"])
        parts = []
        for name in names:
            found = [r["spans_ms"][name] for r in these if name in r["spans_ms"]]
            begin, end = (statistics.median(side) for side in zip(*found, strict=True))
            parts.append(f"{name} {begin:.0f}-{end:.0f}")
        if parts:
            print(*key, "ms:", ", ".join(parts))


def print_costs(rows: Sequence[dict[str, Any]]) -> None:
    """Print the cost of elastic steps against plain ones."""
    for model in sorted({row["model"] for row in rows}):
        these = [row for row in rows if row["model"] == model]
        pairs: list[float] = []
        for row in (r for r in these if r["variant"] == "loop"):
            [plain] = [
                r
                for r in these
                if r["is_elastic"] and r["variant"] == "plain"
                if r["turn"] == row["turn"]
            ]
            pairs += map(float.__truediv__, row["step_s"], plain["step_s"])
        jobs = {
            is_elastic: statistics.median(
                s
                for r in these
                if r["variant"] == "plain" and r["is_elastic"] == is_elastic
                for s in r["step_s"]
            )
            for is_elastic in (False, True)
        }
        low, middle, high = statistics.quantiles(pairs, n=4)
        print(
            f"{model}: Loop / plain, by turns in one job: {middle:.4f} "
            f"[{low:.4f}-{high:.4f}] of {len(pairs)}; plain steps of an elastic job "
            f"{jobs[True] * 1e3:.2f} ms, of another {jobs[False] * 1e3:.2f} ms, "
            f"load {statistics.median(r['load'] for r in these):.1f}"
        )


def print_all(rows: Sequence[dict[str, Any]]) -> None:
    """Print all tables."""
    changes = [row for row in rows if row["what"] != "cost"]
    if changes:
        print_changes(changes)
    print_costs([row for row in rows if row["what"] == "cost"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Time changes of an elastic job.")
    parser.add_argument("--faults", type=int, default=200, help="of each case")
    parser.add_argument("--each", type=int, default=25, help="faults in one job")
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=_KINDS[:4])
    engines = ("shared_memory", "gloo")
    parser.add_argument("--engines", nargs="+", choices=engines, default=engines)
    parser.add_argument("--states", nargs="+", type=int, default=[2], help="MB")
    parser.add_argument("--torchft", metavar="PYTHON", help="that has torchft")
    parser.add_argument("--peer-faults", type=int, default=30, help="of each peer")
    parser.add_argument("--cost-jobs", type=int, default=6)
    parser.add_argument("--cost-rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="append records to this file")
    parser.add_argument("--read", type=Path, nargs="+", help="print what was measured")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.read:
        lines = [li for path in options.read for li in path.read_text().splitlines()]
        print_all([json.loads(line)["values"] for line in lines])
        return 0
    if "torchft" in options.kinds and not options.torchft:
        parser.error("--kinds torchft must come with --torchft PYTHON")
    # The job that runs is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    bench = Bench(options)
    print(f"load average at the beginning: {os.getloadavg()}")
    if "cost" in options.kinds:
        bench.measure_cost()
    left = {
        Case(kind, engine, state): options.peer_faults if kind in _PEERS else most
        for kind in options.kinds
        for engine in (options.engines if kind not in _PEERS else ("gloo",))
        for state in options.states
        if kind != "cost"
        for most in (options.faults,)
    }
    num_rounds = max((math.ceil(n / options.each) for n in left.values()), default=0)
    for done in range(num_rounds):
        for case, num in left.items():
            share = num * (done + 1) // num_rounds - num * done // num_rounds
            if share:
                bench.run(case, share)
    print_all(bench.rows)
    for text in bench.wrong:
        print(f"WRONG: {text}")
    print(f"load average at the end: {os.getloadavg()}")
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
