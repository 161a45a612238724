"""The verdict on a hang: the ranks that hold up the others, and the reasons.

Each pending collective has a group, and each member of the group is in it or not. A
member that is not, and that waits for nobody itself, is at fault. If all of them wait,
they wait for each other: then a cycle is at fault, or ranks that call different
operations. All faults are reported, not just the first.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ronde.monitor.looks import Frame, Look
from ronde.status.table import JobStatus, WorkerInfo
from ronde.status.values import UNKNOWN, PendingCollective
from ronde.topology.cpu_sets import format_list

HANG_S = 2.0  # a shorter wait is not called a hang
_BUSY = 0.5
_IDLE = 0.05
_MANY_FAULTS_PER_S = 500.0
_LOADER = "/torch/utils/data/dataloader.py"
_DISTRIBUTED = ("/ronde/", "/torch/distributed/")


class Fault(NamedTuple):
    """One reason for a hang."""

    kind: str
    ranks: tuple[int, ...]
    text: str  # whole sentences: rank, place, cause and remedy


class Wait(NamedTuple):
    """A pending collective, with the ranks in it and those that it waits for."""

    collective: PendingCollective
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    unknown: tuple[int, ...]  # ranks that may be in it or not
    age_s: float


class Verdict(NamedTuple):
    """All that is wrong with a job now; without faults it does not hang."""

    faults: tuple[Fault, ...]
    waits: tuple[Wait, ...]  # the longest first


class _Job:
    """The ranks of a job, their table rows and the looks at their processes."""

    def __init__(self, status: JobStatus, looks: Mapping[int, Look]) -> None:
        ranked = [row for row in status.workers if row.rank is not None]
        self.rows = {row.rank: row for row in ranked if row.rank is not None}
        self.looks = {
            rank: looks[row.worker]
            for rank, row in self.rows.items()
            if row.worker in looks
        }

    def is_in_call(self, rank: int) -> bool | None:
        """Return True if a rank's stack is in a collective; None without a stack."""
        look = self.looks.get(rank)
        if look is None or not look.frames:
            return None
        for frame in look.frames:
            if frame.is_user:
                return False
            if any(part in frame.file for part in _DISTRIBUTED):
                return True
        return False

    def line_of(self, rank: int) -> str:
        look = self.looks.get(rank)
        frame = look.user_frame if look else None
        return f" at {frame.file}:{frame.line}" if frame else ""


def judge(status: JobStatus, looks: Mapping[int, Look]) -> Verdict:
    """Find the faults of a job from its table and looks at its workers, by worker."""
    job = _Job(status, looks)
    waits = _find_waits(job)
    long = [wait for wait in waits if wait.age_s >= HANG_S]
    if not waits and not any(row.status for row in job.rows.values()):
        return Verdict(_judge_stacks(job), ())
    waiting = {rank for wait in waits for rank in wait.ranks}
    missing = {rank for wait in long for rank in wait.missing}
    guilty = sorted(missing - waiting)
    faults = [describe_rank(job, rank, long) for rank in guilty]
    faults += _find_mismatches(job, long)
    known = {rank for fault in faults for rank in fault.ranks}
    faults += _find_cycles(job, long, known)
    if long and not faults:
        unknown = {rank for wait in long for rank in wait.unknown} - waiting
        faults = [describe_rank(job, rank, long) for rank in sorted(unknown)]
    return Verdict(tuple(faults), tuple(waits))


def _find_waits(job: _Job) -> list[Wait]:
    by_key: dict[object, list[tuple[int, PendingCollective]]] = defaultdict(list)
    for rank, row in job.rows.items():
        if row.status is not None and row.state == "running":
            for each in row.status.collectives:
                by_key[each.key, each.ranks].append((rank, each))
    waits: list[Wait] = []
    for members in by_key.values():
        ranks, first = tuple(rank for rank, _ in members), members[0][1]
        age_s = max(each.age_s + _silence_s(job.rows[rank]) for rank, each in members)
        group = first.ranks or tuple(job.rows)
        others = [rank for rank in group if rank not in ranks and rank != UNKNOWN]
        missing = tuple(r for r in others if _is_missing(job, r, first, age_s))
        unknown = tuple(rank for rank in others if rank not in missing)
        waits.append(Wait(first, ranks, missing, unknown, age_s))
    return sorted(waits, key=lambda wait: -wait.age_s)


def _silence_s(row: WorkerInfo) -> float:
    return row.status_age_s


def _is_missing(
    job: _Job, rank: int, collective: PendingCollective, age_s: float
) -> bool:
    row = job.rows.get(rank)
    if row is None or row.is_absent(collective.key, age_s):
        return True
    look = job.looks.get(rank)
    if look is not None and (look.state in ("", "T", "t", "Z", "X", "D")):
        return True
    # It has not reported since the others wait: its stack decides.
    return row.status is not None and job.is_in_call(rank) is False


def describe_rank(job: _Job, rank: int, waits: Sequence[Wait]) -> Fault:
    """Describe a rank that others wait for: place, cause and remedy."""
    row, look = job.rows.get(rank), job.looks.get(rank)
    late = [wait for wait in waits if rank in (*wait.missing, *wait.unknown)]
    name = late[0].collective.name if late else "a collective"
    if row is None:
        text = f"Rank {rank} is not in the job's view, but {name} waits for it."
        return Fault("gone", (rank,), text)
    who = f"Rank {rank} ({row.host}, pid {look.pid if look else row.pid})"
    if row.state == "ended":
        code = row.exit_code or 0
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return Fault("dead" if code else "left", (rank,), f"{who} {how} before {name}.")
    if row.state == "lost":
        return Fault("dead", (rank,), f"{who} was lost with its host.")
    if look is None:
        text = f"{who} is not in {name}; the observer on its host does not answer."
        return Fault("silent", (rank,), text)
    kind, text = _explain(look)
    return Fault(kind, (rank,), f"{who} is not in {name}: it {text}.")


def _explain(look: Look) -> tuple[str, str]:
    frame = look.user_frame
    place = _place(frame)
    match look.state:
        case "T" | "t":
            kill = f"kill -CONT {look.pid}"
            return "stopped", f"is stopped{place} (SIGSTOP or a debugger). Type: {kill}"
        case "" | "Z" | "X":
            return "dead", "has ended"
        case "D":
            where = f" ({look.waits_in})" if look.waits_in else ""
            why = "a disk, a network file system or a driver does not answer"
            return "blocked", f"hangs in the kernel{where}{place}: {why}"
        case _:
            pass
    if look.faults_per_s > _MANY_FAULTS_PER_S:
        return "memory", f"waits for memory pages from disk{place}: its host is full"
    if not look.frames:
        return "unknown", f"uses {look.cpu:.0%} of a core; no stack: {look.problem}"
    if any(_LOADER in each.file for each in look.frames):
        return "input", f"waits for its DataLoader{place}"
    inner = look.frames[0]
    if frame is not None and inner is not frame:
        place += f", in {inner.function} of {inner.file.rpartition('/')[2]}"
    if look.cpu >= _BUSY:
        return "busy", f"computes{place} ({look.cpu:.0%} of a core)"
    if look.cpu <= _IDLE:
        return "sleeping", f"sleeps or waits{place} (no CPU time)"
    return "slow", f"runs{place} ({look.cpu:.0%} of a core)"


def _place(frame: Frame | None) -> str:
    return f" at {frame.file}:{frame.line} in {frame.function}()" if frame else ""


def _find_mismatches(job: _Job, waits: Sequence[Wait]) -> list[Fault]:
    """Find ranks whose call of one group and number is another operation."""
    calls: dict[object, list[Wait]] = defaultdict(list)
    for wait in waits:
        own = wait.collective
        if own.sequence:
            calls[own.group, own.sequence, own.ranks].append(wait)
    faults: list[Fault] = []
    for found in calls.values():
        if len(found) < 2:
            continue
        sizes = Counter({wait.collective.kind: len(wait.ranks) for wait in found})
        (_, most), (_, second) = sizes.most_common(2)
        faults.append(_mismatch(job, found, is_tie=most == second))
    return faults


def _mismatch(job: _Job, found: Sequence[Wait], *, is_tie: bool) -> Fault:
    ordered = sorted(found, key=lambda wait: len(wait.ranks))
    texts = [
        f"{_ranks(wait.ranks)} called {wait.collective.kind}"
        f"{job.line_of(wait.ranks[0])}"
        for wait in ordered
    ]
    own = ordered[0].collective
    text = f"Call {own.sequence} of {own.group} differs: {'; '.join(texts)}."
    if is_tie:
        return Fault("mismatch", tuple(r for w in found for r in w.ranks), text)
    odd = tuple(rank for wait in ordered[:-1] for rank in wait.ranks)
    return Fault("mismatch", odd, text)


def _find_cycles(
    job: _Job, waits: Sequence[Wait], known: Iterable[int]
) -> list[Fault]:
    """Find ranks that wait for each other in different collectives."""
    by_rank = {rank: wait for wait in reversed(waits) for rank in wait.ranks}
    done = set(known)
    faults: list[Fault] = []
    for start in sorted(by_rank):
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in path and rank not in done:
            path.append(rank)
            wait = by_rank.get(rank)
            rank = next(iter(wait.missing), None) if wait else None
        done.update(path)
        if rank in path:
            cycle = path[path.index(rank) :]
            faults.append(_cycle(job, [(r, by_rank[r]) for r in cycle]))
    return faults


def _cycle(job: _Job, cycle: Sequence[tuple[int, Wait]]) -> Fault:
    texts = [
        f"rank {rank} is in {wait.collective.name} of {wait.collective.group}"
        f"{job.line_of(rank)} and waits for rank {wait.missing[0]}"
        for rank, wait in cycle
    ]
    text = "; ".join(texts)
    advice = "Call the collectives in the same order on all ranks."
    ranks = tuple(sorted(rank for rank, _ in cycle))
    return Fault("order", ranks, f"{text[0].upper()}{text[1:]}. {advice}")


def _judge_stacks(job: _Job) -> tuple[Fault, ...]:
    """Judge a program that reports no collectives, by its stacks alone."""
    inside = [rank for rank in job.rows if job.is_in_call(rank)]
    outside = [rank for rank in job.rows if rank not in inside]
    if not inside:
        return ()
    return tuple(describe_rank(job, rank, ()) for rank in outside)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {format_list(sorted(ranks))}"
