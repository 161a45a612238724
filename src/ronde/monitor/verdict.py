"""The verdict on a hang: the ranks that hold up the others, and the reasons.

If some members of a group are in a collective, each member that is in no collective is
at fault. If each missing member is in another collective, the ranks wait for each
other: they call different collectives, or use several groups in different orders. All
faults are reported, not just the first.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ronde.launch.job.failure import signal_name
from ronde.monitor.inspection import Inspection, StackFrame
from ronde.monitor.usage import HostUsage
from ronde.status.table import JobStatus, WorkerInfo
from ronde.status.values import UNKNOWN, PendingCollective
from ronde.units import format_duration, grouped, name_ranks

HANG_S = 3.0  # a shorter wait is no hang; it may have begun after the inspections
_BUSY = 0.3
_MOST_WAITS = 3
_MOST_EVIDENCE = 8
_FULL = 0.97  # of a host's memory
_MANY_FAULTS_PER_S = 500.0
_BLOCKED = "a disk, a network file system or a driver does not answer"
_LOADER = "/torch/utils/data/dataloader.py"
_DISTRIBUTED = ("/ronde/", "/torch/distributed/")


class Fault(NamedTuple):
    """One reason for a hang."""

    kind: str
    ranks: tuple[int, ...]
    text: str  # whole sentences: rank, line, cause and remedy


_INSIDE = Fault(
    "inside",
    (),
    "All of its ranks are in it: the network or a driver does not move the data, or "
    "they passed different sizes; with NCCL they may be in different operations.",
)


class Wait(NamedTuple):
    """A pending collective, with the ranks in it and those that it waits for."""

    collective: PendingCollective
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    unknown: tuple[int, ...]  # ranks that may be in it or not
    age_s: float


class Verdict(NamedTuple):
    """The faults that make a job hang; none if it does not hang."""

    faults: tuple[Fault, ...]
    waits: tuple[Wait, ...]  # the longest first


class _Job:
    """The status rows of a job and the inspections of its processes, by rank."""

    def __init__(
        self, status: JobStatus, inspections: Mapping[int, Inspection]
    ) -> None:
        ranked = [row for row in status.workers if row.rank is not None]
        self.rows = {row.rank: row for row in ranked if row.rank is not None}
        self.inspections = {
            rank: inspections[row.worker]
            for rank, row in self.rows.items()
            if row.worker in inspections
        }

    def is_in_call(self, rank: int) -> bool | None:
        inspection = self.inspections.get(rank)
        return None if inspection is None else is_in_call(inspection)

    def is_frozen(self, rank: int) -> bool:
        """Return True if a rank cannot report that it is outside of a collective."""
        inspection = self.inspections.get(rank)
        is_running = inspection is None or inspection.state in ("R", "S")
        return not is_running and not self.is_in_call(rank)

    def line_of(self, rank: int) -> str:
        """Return the line of user code that a rank executes, and that of its caller."""
        inspection = self.inspections.get(rank)
        frames = inspection.frames if inspection else ()
        own = [frame for frame in frames if frame.is_user]
        if not own:
            return ""
        callers = [f", called from line {frame.line}" for frame in own[1:2]]
        return f" at {own[0].file}:{own[0].line}{''.join(callers)}"


def is_in_call(inspection: Inspection) -> bool | None:
    """Return True if a stack is in a collective; None without a stack."""
    for frame in inspection.frames:
        if frame.is_user or _LOADER in frame.file:
            return False
        if any(part in frame.file for part in _DISTRIBUTED):
            return True
    return False if inspection.frames else None


def explain_hang(status: JobStatus, inspections: Mapping[int, Inspection]) -> Verdict:
    """Find the faults of a running job; the keys of ``inspections`` are worker IDs."""
    job = _Job(status, inspections)
    waits = _find_waits(job)
    long = [wait for wait in waits if wait.age_s >= HANG_S]
    if not waits and not any(row.status for row in job.rows.values()):
        return Verdict(_judge_stacks(job), ())
    waiting = _ranks_of(waits)
    missing = {rank for wait in long for rank in wait.missing}
    guilty = sorted(missing - waiting)
    faults = [_describe_rank(job, rank, long) for rank in guilty]
    faults += find_conflicts(long, job.line_of)
    if long and not faults:
        unknown = {rank for wait in long for rank in wait.unknown} - waiting
        faults = [_describe_rank(job, rank, long) for rank in sorted(unknown)]
        is_known = UNKNOWN not in long[0].collective.ranks
        faults = faults or ([_INSIDE] if is_known else [*_judge_stacks(job)])
    return Verdict(tuple(faults), tuple(waits))


def find_evidence(
    verdict: Verdict, status: JobStatus, usages: Mapping[str, HostUsage]
) -> list[str]:
    """Return sentences on GPUs, memory and networks of the hosts of ranks at fault."""
    ranks = {rank for fault in verdict.faults for rank in fault.ranks}
    rows = [row for row in status.workers if row.rank in ranks]
    texts: list[str] = []
    for host in dict.fromkeys(row.host for row in rows if row.host in usages):
        usage = usages[host]
        uses_gpus = any(row.status and row.status.device_bytes for row in rows)
        if usage.gpu_problem and uses_gpus:
            texts.append(f"The GPUs of {host} cannot be read: {usage.gpu_problem}.")
        for gpu in usage.gpus:
            if gpu.throttled_by:
                why = ", ".join(gpu.throttled_by)
                texts.append(f"GPU {gpu.number} of {host} is throttled ({why}).")
        if usage.memory_bytes > _FULL * usage.total_memory_bytes:
            texts.append(f"The memory of {host} is full.")
        for each in usage.interfaces:
            if each.num_errors:
                since = f"{each.num_errors:,} errors since boot"
                texts.append(f"Interface {each.name} of {host} has had {since}.")
    return texts[:_MOST_EVIDENCE]


def describe_hang(verdict: Verdict) -> str:
    """Return a sentence on the longest waits; "" if the job does not hang."""
    long = [wait for wait in verdict.waits if wait.age_s >= HANG_S]
    texts: list[str] = []
    for wait in long[:_MOST_WAITS]:
        have = "have" if len(wait.ranks) > 1 else "has"
        missing = wait.missing or wait.unknown
        for_whom = f" for {name_ranks(missing)}" if missing else ""
        waited = f"{have} waited {format_duration(wait.age_s)} in "
        texts.append(
            f"{name_ranks(wait.ranks)} {waited}{wait.collective.name}{for_whom}"
        )
    return f"The job hangs: {'; '.join(texts)}." if texts else ""


def _find_waits(job: _Job) -> list[Wait]:
    by_key = grouped(
        ((each.key, each.ranks), (rank, each))
        for rank, row in job.rows.items()
        if row.status and row.state == "running" and not job.is_frozen(rank)
        for each in row.status.collectives
    )
    waits: list[Wait] = []
    for members in by_key.values():
        ranks, first = tuple(rank for rank, _ in members), members[0][1]
        age_s = max(each.age_s + job.rows[rank].status_age_s for rank, each in members)
        group = first.ranks or tuple(job.rows)
        others = [rank for rank in group if rank not in ranks and rank != UNKNOWN]
        others = [rank for rank in others if not _has_passed(job.rows.get(rank), first)]
        missing = tuple(r for r in others if _is_missing(job, r, first, age_s))
        unknown = tuple(rank for rank in others if rank not in missing)
        waits.append(Wait(first, ranks, missing, unknown, age_s))
    return sorted(waits, key=lambda wait: -wait.age_s)


def _has_passed(row: WorkerInfo | None, call: PendingCollective) -> bool:
    """Return True if a rank is in a later call of the group, as a root may be."""
    calls = row.status.collectives if row is not None and row.status else ()
    return any(
        each.sequence > call.sequence > 0 and each.name == each.kind
        for each in calls
        if (each.group, each.ranks) == (call.group, call.ranks)
    )


def _is_missing(
    job: _Job, rank: int, collective: PendingCollective, age_s: float
) -> bool:
    row = job.rows.get(rank)
    if row is None or row.is_absent(collective, age_s):
        return True
    if job.is_frozen(rank):
        return True
    # It has not reported since the others wait: its stack decides.
    return row.status is not None and job.is_in_call(rank) is False


def _describe_rank(job: _Job, rank: int, waits: Sequence[Wait]) -> Fault:
    """Describe a rank that others wait for: line, cause and remedy."""
    row, inspection = job.rows.get(rank), job.inspections.get(rank)
    late = [wait for wait in waits if rank in (*wait.missing, *wait.unknown)]
    name = late[0].collective.name if late else "a collective"
    if row is None:
        text = f"Rank {rank} is no longer in the job, but {name} waits for it."
        return Fault("gone", (rank,), text)
    who = f"Rank {rank} ({row.host}, pid {inspection.pid if inspection else row.pid})"
    if row.state == "ended":
        code = row.exit_code or 0
        killed = f"was killed by {signal_name(-code)}"
        how = killed if code < 0 else f"exited with code {code}"
        return Fault("dead" if code else "left", (rank,), f"{who} {how} before {name}.")
    if row.state == "lost":
        return Fault("dead", (rank,), f"{who} was lost with its host.")
    if inspection is None:
        text = f"{who} is not in {name}. Its host did not answer: no reason is known."
        return Fault("silent", (rank,), text)
    kind, text = _explain(inspection)
    return Fault(kind, (rank,), f"{who} is not in {name}: it {text}.")


def _explain(process: Inspection) -> tuple[str, str]:
    """Return the kind of a fault, and a description that continues a sentence."""
    where, state = locate(process.user_frame), process.state
    is_loading = any(_LOADER in frame.file for frame in process.frames)
    inside = f" in {process.waits_in}" * bool(process.waits_in)
    kill, core = f"kill -CONT {process.pid}", f"({process.cpu:.0%} of a core)"
    stopped = f"is stopped{where} (SIGSTOP or a debugger). Type: {kill}"
    swapped = f"reads its memory back from disk{where}: the host's memory is full"
    reasons = {
        "dead": (state in ("", "Z", "X"), "has ended"),
        "stopped": (state in ("T", "t"), stopped),
        "blocked": (state == "D", f"hangs in the kernel{inside}{where}: {_BLOCKED}"),
        "memory": (process.faults_per_s > _MANY_FAULTS_PER_S, swapped),
        "unknown": (not process.frames, f"runs {core}; no stack: {process.problem}"),
        "input": (is_loading, f"waits for its DataLoader{where}"),
        "busy": (process.cpu >= _BUSY or state == "R", f"computes{where} {core}"),
    }
    found = [(kind, text) for kind, (applies, text) in reasons.items() if applies]
    return found[0] if found else ("sleeping", f"sleeps or waits{where} {core}")


def locate(frame: StackFrame | None) -> str:
    """Return `` at FILE:LINE in FUNCTION()``, or no text."""
    if frame is None:
        return ""
    is_named = not frame.function.startswith("<")
    function = f" in {frame.function}()" * is_named
    return f" at {frame.file}:{frame.line}{function}"


LineOf = Callable[[int], str]
"""Returns the user's line of a rank's call as `` at FILE:LINE``, or no text."""


def find_conflicts(waits: Sequence[Wait], line_of: LineOf) -> list[Fault]:
    """Find ranks that wait for each other: in one group, and across groups."""
    groups = grouped(((w.collective.group, w.collective.ranks), w) for w in waits)
    faults: list[Fault] = []
    rest = list(waits)
    for found in groups.values():
        # A rank may be in several calls at once, such as named ones.
        own = [wait for wait in found if _ranks_of(found).intersection(wait.missing)]
        num_calls = Counter(rank for wait in own for rank in wait.ranks)
        own = [wait for wait in own if all(num_calls[rank] == 1 for rank in wait.ranks)]
        if len(own) > 1:
            faults.append(_describe_mismatch(own, line_of))
            rest = [wait for wait in rest if not _ranks_of(own) & set(wait.ranks)]
    return [*faults, *_find_cycles(rest, line_of)]


def _ranks_of(waits: Sequence[Wait]) -> set[int]:
    return {rank for wait in waits for rank in wait.ranks}


def _describe_mismatch(waits: list[Wait], line_of: LineOf) -> Fault:
    ordered = sorted(waits, key=lambda wait: len(wait.ranks))
    odd, most = ordered[:-1], ordered[-1]
    is_tie = max(len(wait.ranks) for wait in odd) == len(most.ranks)
    named = [
        f"{name_ranks(wait.ranks)} {_be(wait.ranks)} in {wait.collective.name}"
        f"{line_of(wait.ranks[0])}"
        for wait in ordered
    ]
    advice = "All ranks of a group must call the same collectives in the same order."
    text = f"{'; '.join(named[:-1])}, but {named[-1]}."
    doubt = " As many ranks do one as the other, so either may be wrong." * is_tie
    guilty = waits if is_tie else odd
    ranks = tuple(sorted(_ranks_of(guilty)))
    return Fault("mismatch", ranks, f"{text[0].upper()}{text[1:]}{doubt} {advice}")


def _find_cycles(waits: Sequence[Wait], line_of: LineOf) -> list[Fault]:
    """Find ranks that wait for each other in the collectives of several groups."""
    by_rank = {rank: wait for wait in reversed(waits) for rank in wait.ranks}
    done: set[int] = set()
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
            faults.append(_describe_cycle([(r, by_rank[r]) for r in cycle], line_of))
    return faults


def _describe_cycle(cycle: Sequence[tuple[int, Wait]], line_of: LineOf) -> Fault:
    texts = [
        f"rank {rank} is in {wait.collective.name} of {_group(wait.collective)}"
        f"{line_of(rank)} and waits for rank {wait.missing[0]}"
        for rank, wait in cycle
    ]
    text = "; ".join(texts)
    advice = "Ranks must call the collectives of different groups in the same order."
    ranks = tuple(sorted(rank for rank, _ in cycle))
    return Fault("order", ranks, f"{text[0].upper()}{text[1:]}. {advice}")


def _group(collective: PendingCollective) -> str:
    ranks = collective.ranks
    return f"{collective.group} ({name_ranks(ranks)})" if ranks else collective.group


def _judge_stacks(job: _Job) -> tuple[Fault, ...]:
    """Judge a program that reports no collectives, by its stacks alone."""
    inside = [rank for rank in job.rows if job.is_in_call(rank)]
    outside = [rank for rank in job.rows if rank not in inside]
    if not inside:
        return ()
    return tuple(_describe_rank(job, rank, ()) for rank in outside)


def _be(ranks: Sequence[int]) -> str:
    return "are" if len(ranks) > 1 else "is"
