"""Break a training on three hosts at random moments, and see it go on.

Hosts are namespaces with an sshd each; a fourth one has the controller. Ranks are
killed and stopped, hosts and links lost, hosts added and removed, several at once and
while ranks change: see ``elastic_job.py``. ``--faults`` are done in pieces,
each one job. What must hold: a step at least every 30 s, no process left at the end,
all samples once an epoch, the weights of one process to the last bit, and descriptors,
threads and memory that do not grow. Shows how long the next step took after each kind
of fault. The last line is JSON. Exits with 1 if anything was wrong. Needs root.

    python -m tests.soak.elastic_faults --faults 1000 --seed 1
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tests.cluster.machines import Cluster, ClusterError, machines
from tests.soak.elastic_job import KINDS, PER_HOST, PLANNED, Fault, ImpossibleError, Job
from tests.soak.elastic_proof import Mark, problems_of, read_marks
from tests.soak.figures import show

HANG_S = 30.0
NUM_HOSTS = 4  # with the controller's
_START_S = 150.0
_END_S = 60.0
_ORPHAN_S = 15.0
_POLL_S = 0.02
_LOOK_S = 0.1
_SAMPLE_S = 3.0
_WINDOW_S = 12.0  # within which a fault that may pass has passed
_GROWTH_MIB = 4.0
_COUNTS = ("faults", "views", "steps")
_RANK = str(Path(__file__).with_name("elastic_rank.py"))


class Pace(NamedTuple):
    """The pace of faults."""

    apart_s: tuple[float, float]
    patience: float  # how often a number of ranks is waited for first
    num_ranks: int  # that number
    full_s: float  # for how long
    rest_s: float  # after the last fault
    is_one_by_one: bool = False  # whether all of who was lost must have left the view


USUAL = Pace((0.2, 4.0), 0.5, 5, 15.0, _WINDOW_S)
ONE_BY_ONE = Pace((0.2, 2.0), 1.0, 4, 60.0, _WINDOW_S, is_one_by_one=True)
QUICK = Pace((0.1, 1.0), 0.9, 3, 4.0, 4.0)


class Plan(NamedTuple):
    """The kinds of faults, their pace, and the training."""

    kinds: Sequence[str] = tuple(KINDS)
    pace: Pace = USUAL
    is_divided: bool = False  # whether with zero=1


class Held(NamedTuple):
    """The descriptors, threads and memory of a process."""

    at_s: float
    descriptors: int
    threads: int
    rss_mib: float
    kinds: dict[str, int]  # of both: what they are


@dataclass(slots=True)
class Piece:
    """The results of one job."""

    seed: int
    num_faults: int = 0
    num_views: int = 0
    num_steps: int = 0
    took_s: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    wrong: list[str] = field(default_factory=list[str])


class Sampler:
    """Counts the resources of a job's processes while its view is the same."""

    def __init__(self) -> None:
        self.samples: dict[str, dict[tuple[int, ...], list[Held]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def sample(self, job: Job) -> None:
        """Look at the controller, all agents and all ranks."""
        members = job.watcher.members
        in_view = Counter(host for _, host, _ in members)
        first = {host: number for number, host, _ in reversed(members)}
        sizes = tuple(sorted(in_view.values()))
        ranks = {host.name: job.rank_processes(host) for host in job.hosts}
        started = tuple(sorted(map(len, ranks.values())))
        self._add("controller", started, job.launcher.program_pid())
        for host, processes in ranks.items():
            for number, process in processes.items():
                # How it is connected depends on who is on which host, and the first of
                # a host's ranks is connected with other hosts'.
                if job.watcher.stepped.get(number, -1) == job.watcher.view:
                    key = (number == first[host], in_view[host], *sizes)
                    self._add(f"rank {number}", key, process.pid)
            # An agent has more for a rank that has come to it.
            if processes and processes.keys() == {
                n for n, h, _ in members if h == host
            }:
                parent = next(iter(processes.values())).parent
                self._add(f"agent {parent}", (len(processes),), parent)

    def _add(self, name: str, key: tuple[int, ...], pid: int) -> None:
        with suppress(OSError, KeyError):  # it ends
            self.samples[name][key].append(held_by(pid))

    def grown(self) -> list[str]:
        """Return the processes that grew.

        That is: in the last third of the samples at least more than ever before.
        """
        wrong: list[str] = []
        for name, by_key in self.samples.items():
            for key, samples in by_key.items():
                third = len(samples) // 3
                if third < 3:
                    continue
                early, late = samples[:-third], samples[-third:]
                for what, allowed in (
                    ("descriptors", 0), ("threads", 0), ("rss_mib", _GROWTH_MIB)
                ):  # fmt: skip
                    before = max(getattr(each, what) for each in early)
                    after = min(getattr(each, what) for each in late)
                    if after > before + allowed:
                        more = dict(Counter(late[-1].kinds) - Counter(early[-1].kinds))
                        wrong.append(
                            f"{what} of {name} with {key} ranks: {before} -> {after} "
                            f"for {late[-1].at_s - late[0].at_s:.0f} s, {more}"
                        )
        return wrong


def held_by(pid: int) -> Held:
    folder = Path(f"/proc/{pid}")
    kinds: Counter[str] = Counter()
    for link in (folder / "fd").iterdir():
        kinds[re.sub(r":?\[?\d+\]?", "", str(link.readlink()))] += 1
    num = kinds.total()
    for thread in (folder / "task").iterdir():
        kinds[f"thread {(thread / 'comm').read_text().strip()}"] += 1
    status = (folder / "status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    rss_mib = int(fields["VmRSS"].split()[0]) / 1024
    threads = int(fields["Threads"])
    return Held(time.monotonic(), num, threads, round(rss_mib, 1), dict(kinds))


def start(
    cluster: Cluster, folder: Path, chance: random.Random, *, is_divided: bool
) -> Job:
    """Start the job; the last host has the controller alone."""
    *hosts, head = cluster.hosts
    (folder / "hosts").write_text("")
    words = [
        *(sys.executable, "-m", "ronde", "run", "--nested", "--grace", "2s"),
        *("--ssh-args", f"-F {cluster.ssh_config}"),
        *("--host-discovery", str(folder / "hosts"), "--cooldown", "1s,4s"),
        *("--min-ranks", "1", "--max-ranks", str(PER_HOST * len(hosts)), "--"),
        *(sys.executable, _RANK, str(folder), *(["zero"] if is_divided else [])),
    ]
    job = Job(cluster, hosts, None, folder, chance)  # pyright: ignore[reportArgumentType]
    job.list_hosts()
    with (folder / "output").open("wb") as output:
        job.launcher = cluster.start(
            head, words, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    return job


class Breaker:
    """Breaks a job, fault by fault, and follows it to its end."""

    def __init__(self, job: Job, num_faults: int, plan: Plan) -> None:
        self.job, self.num_faults = job, num_faults
        self.kinds, self.pace, self.is_divided = plan
        self.faults: list[Fault] = []
        self.sampler = Sampler()
        self.wrong: list[str] = []
        self._look_s = self._sample_s = 0.0

    def run(self) -> None:
        """Raise ``TimeoutError`` where it hangs."""
        self._wait_for_all()
        next_s, full_s = time.monotonic() + 1.0, 0.0
        while len(self.faults) < self.num_faults:
            self._turn()
            is_due = time.monotonic() >= next_s and self._is_full(full_s)
            if is_due and self._break():
                chance = self.job.chance
                next_s = time.monotonic() + chance.uniform(*self.pace.apart_s)
                is_patient = chance.random() < self.pace.patience
                full_s = time.monotonic() + self.pace.full_s if is_patient else 0.0
        self.job.act_due(is_end=True)
        ends_s = time.monotonic() + self.pace.rest_s
        while time.monotonic() < ends_s:
            self._turn()
        (self.job.folder / "finish").touch()
        ends_s = time.monotonic() + _END_S
        while self.job.launcher.poll() is None:
            self._turn(is_ending=True)
            if time.monotonic() > ends_s:
                raise TimeoutError(f"the job has not ended after {_END_S:.0f} s")

    def _is_full(self, until_s: float) -> bool:
        """Return True if enough ranks are there, or it is too late to wait."""
        job, pace = self.job, self.pace
        num_safe = len(job.safe(set(), set()))
        is_over = not (pace.is_one_by_one and job.members & job.doomed)
        is_full = num_safe >= pace.num_ranks and is_over
        return is_full or time.monotonic() >= until_s

    def _wait_for_all(self) -> None:
        ends_s = time.monotonic() + _START_S
        watcher, size = self.job.watcher, PER_HOST * len(self.job.hosts)
        # Before there is one, shares that are lost with their copies end the job.
        checkpoints = self.job.folder / "checkpoints"
        while (
            len(watcher.members) < size
            or watcher.step_s == 0.0
            or (self.is_divided and not [*checkpoints.glob("step-*.pt")])
        ):
            time.sleep(_LOOK_S)
            watcher.look()
            if time.monotonic() > ends_s or self.job.launcher.poll() is not None:
                raise TimeoutError("the job has not started")

    def _turn(self, *, is_ending: bool = False) -> None:
        """Wait a moment; look after the job."""
        job, now_s = self.job, time.monotonic()
        time.sleep(_POLL_S)
        job.act_due()
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            job.watcher.look()
        if now_s >= self._sample_s and not is_ending:
            self._sample_s = now_s + _SAMPLE_S
            self.sampler.sample(job)
        if is_ending:
            return
        if job.launcher.poll() is not None:
            raise TimeoutError(f"the job ended with {job.launcher.returncode}")
        if now_s - job.watcher.step_s > HANG_S:
            raise TimeoutError(f"no step for {HANG_S:.0f} s")

    def _break(self) -> bool:
        """Break something; return True if that was possible."""
        job = self.job
        job.watcher.look()
        weights = [KINDS[kind][0] for kind in self.kinds]
        (kind,) = job.chance.choices(self.kinds, weights)
        fault, members = Fault(kind, time.monotonic()), job.members
        try:
            KINDS[kind][1](job, fault)
        except ImpossibleError:
            if not fault.members:
                return False
        fault.is_in_view = bool(fault.members & members) or not fault.members
        self.faults.append(fault)
        return True


def seconds_of(fault: Fault, marks: Sequence[Mark]) -> float | None:
    """Return the seconds from a fault to the next step; None if unknown.

    Nothing is, where no member of the view was lost. Where ranks change as planned, how
    long none was applied because of it. Where a fault may pass, the longest time
    without a step after it.
    """
    if not fault.is_in_view:
        return None
    steps = [m for m in marks if not (m.is_view or m.is_end)]
    members = {m.view: {n for n, _, _ in m.members} for m in marks if m.is_view}
    hosts = {m.view: {h for _, h, _ in m.members} for m in marks if m.is_view}
    if fault.may_pass:
        times = [m.at_s for m in steps if 0 <= m.at_s - fault.at_s <= _WINDOW_S]
        pairs = pairwise([fault.at_s, *times])
        return max((after - before for before, after in pairs), default=None)
    for index, step in enumerate(steps):
        if step.at_s < fault.at_s:
            continue
        is_over = not members[step.view] & fault.members
        if fault.hosts:
            before = next((m.view for m in reversed(steps[:index])), -1)
            is_over = hosts[step.view].issuperset(fault.hosts)
            is_over = is_over and not hosts.get(before, set()).issuperset(fault.hosts)
        if not is_over:
            continue
        if fault.kind in PLANNED:
            earlier = [m.at_s for m in steps[:index] if m.view < step.view]
            return step.at_s - max(earlier, default=fault.at_s)
        return step.at_s - fault.at_s
    return None


def orphans(cluster: Cluster) -> list[str]:
    """Wait until no process of the job is left on any host; return those that stay."""
    ends_s = time.monotonic() + _ORPHAN_S
    while True:
        left = [
            f"left on {host.name}: {p.pid} {p.state} {' '.join(p.words)[:80]}"
            for host in cluster.hosts
            for p in cluster.processes(host)
            if b"RONDE_COOKIE=" in p.environment
        ]
        if not left or time.monotonic() > ends_s:
            return left
        time.sleep(_LOOK_S)


def run_piece(
    cluster: Cluster,
    folder: Path,
    seed: int,
    num_faults: int,
    plan: Plan = Plan(),  # noqa: B008  immutable
) -> Piece:
    """Run one job, break it ``num_faults`` times, and judge it."""
    piece = Piece(seed)
    begun_s = time.monotonic()
    job = start(cluster, folder, random.Random(seed), is_divided=plan.is_divided)
    breaker = Breaker(job, num_faults, plan)
    is_over = False
    try:
        breaker.run()
        is_over = True
        if job.launcher.returncode:
            piece.wrong.append(f"the job ended with {job.launcher.returncode}")
    except TimeoutError as error:
        piece.wrong.append(f"{error}: {breaker.faults[-3:]}")
        show_stacks(job)
    finally:
        job.launcher.kill()
        job.launcher.wait()
        job.act_due(is_end=True)
        cluster.heal()
    left = orphans(cluster)
    piece.wrong += left if is_over else []
    marks = read_marks(folder)
    if is_over:
        piece.wrong += problems_of(folder, is_divided=plan.is_divided)
        piece.wrong += breaker.sampler.grown()
    output = (folder / "output").read_text(errors="replace")
    piece.wrong += [line for line in output.splitlines() if "terminate called" in line]
    for fault in breaker.faults:
        if (found_s := seconds_of(fault, marks)) is not None:
            piece.seconds.setdefault(fault.kind, []).append(found_s)
    piece.num_faults = len(breaker.faults)
    piece.num_views = max((m.view for m in marks), default=-1) + 1
    piece.num_steps = max((m.step for m in marks), default=-1) + 1
    piece.took_s = time.monotonic() - begun_s
    (folder / "faults").write_text(
        "".join(
            f"{f.at_s:.3f} {f.kind} {sorted(f.members)} {f.hosts}\n"
            for f in breaker.faults
        )
    )
    return piece


def show_stacks(job: Job) -> None:
    """Have all ranks write their threads' stacks into the job's output."""
    for host in job.hosts:
        for process in job.rank_processes(host).values():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR2)
    time.sleep(1.0)


def main() -> int:
    """Run all pieces; return the exit code."""
    parser = argparse.ArgumentParser(description="Break an elastic training.")
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--piece", type=int, default=40, help="faults of one job")
    parser.add_argument("--only", action="append", choices=KINDS, help="this kind")
    parser.add_argument(
        "--one-by-one", action="store_true", help="no fault during another"
    )
    parser.add_argument("--zero", action="store_true", help="train with zero=1")
    parser.add_argument("--keep", type=Path, help="keep all that ranks write here")
    options = parser.parse_args()
    pace = ONE_BY_ONE if options.one_by_one else USUAL
    plan = Plan(options.only or tuple(KINDS), pace, options.zero)
    pieces: list[Piece] = []
    with tempfile.TemporaryDirectory(prefix="ronde-elastic-soak-") as made:
        kept = options.keep or Path(made)
        kept.mkdir(parents=True, exist_ok=True)
        try:
            with machines(NUM_HOSTS, shared=[kept.resolve()]) as cluster:
                while (num := sum(p.num_faults for p in pieces)) < options.faults:
                    seed = options.seed + len(pieces)
                    folder = kept.resolve() / f"seed-{seed}"
                    folder.mkdir()
                    count = min(options.piece, options.faults - num)
                    piece = run_piece(cluster, folder, seed, count, plan)
                    pieces.append(piece)
                    print(
                        f"seed {seed}: {piece.num_faults} faults, {piece.num_views} "
                        f"views, {piece.num_steps} steps, {piece.took_s:.0f} s; "
                        f"{piece.wrong or 'nothing wrong'}",
                        file=sys.stderr, flush=True,
                    )  # fmt: skip
                    if not piece.num_faults:
                        break
        except ClusterError as error:
            print(f"elastic_faults: {error}", file=sys.stderr)
            return 2
    seconds: dict[str, list[float]] = defaultdict(list)
    for piece in pieces:
        for kind, found_s in piece.seconds.items():
            seconds[kind] += found_s
    wrong = {"all": [f"seed {p.seed}: {text}" for p in pieces for text in p.wrong]}
    more = {name: sum(getattr(p, f"num_{name}") for p in pieces) for name in _COUNTS}
    return 0 if show("elastic_faults", seconds, wrong, **more) else 1


if __name__ == "__main__":
    sys.exit(main())
