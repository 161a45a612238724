"""Views of a job for a watcher: its shares of time, its ranks by blame, its hosts.

Note [Waiting and communication]
    Ranks that train in step block in the same collectives. In one step, the rank that
    arrives last blocks just as long as the communication takes, and the others block
    longer, as they wait for it. So the shortest blocked time of all ranks is the
    exposed communication of that step, and the rest is waiting for that rank.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from math import isfinite
from statistics import fmean, median
from typing import NamedTuple, cast

from ronde.errors import LaunchError
from ronde.launch.status import HostAnswer, JobConnection
from ronde.monitor.usage import HostUsage
from ronde.monitor.verdict import describe_hang, explain_hang
from ronde.plain_values import PlainValueError, from_plain, to_plain
from ronde.status.steps import StepTime
from ronde.status.table import JobInfo, JobStatus, WorkerInfo
from ronde.status.values import UNKNOWN
from ronde.units import counted

_MOST_STEPS = 600  # kept for the quantiles
_RATE_S = 10.0
_SILENT_S = 3.0  # a rank reports each second, and its agent passes it on each second
_LEAST_BLAME = 0.02
_FULL = 0.9


class Shares(NamedTuple):
    """Shares of the time of a step; the sum is 1."""

    compute: float
    communication: float  # exposed: not hidden by compute
    waiting: float  # for the rank that arrived last
    input: float
    other: float  # Python's garbage collector


class WatchedRank(NamedTuple):
    """One rank as a watcher shows it; None where nothing is known."""

    rank: int | None
    worker: int
    host: str
    pid: int
    state: str
    exit_code: int | None  # as in ``WorkerInfo``
    is_reporting: bool  # False if the program reports nothing
    step: int | None
    step_s: float | None  # the mean of the last seconds
    own_s: float | None  # of it without collectives
    slowness: float | None  # ``own_s`` relative to the median rank's
    shares: Shares | None
    blame: float  # share of the step time that other ranks wait for this one
    is_awaited: bool  # others are in a collective now and this one is not
    collective: str
    collective_age_s: float
    status_age_s: float
    cpu: float | None  # cores in use
    rss_bytes: int
    device_bytes: int
    progress: dict[str, float | None]

    @property
    def marks(self) -> tuple[str, ...]:
        """The reasons to look at this rank."""
        found = {
            "others wait for it": self.is_awaited,
            self.state: self.state in ("ended", "lost"),
            "holds others up": self.blame >= _LEAST_BLAME,
            "silent": self.state == "running" and self.status_age_s > _SILENT_S,
        }
        return tuple(name for name, is_so in found.items() if is_so)


class WatchedHost(NamedTuple):
    """One host as a watcher shows it; rates are None before the second answer."""

    host: str
    num_ranks: int
    usage: HostUsage | None  # without its workers: the ranks have their figures
    age_s: float  # of ``usage``
    cpu: float | None  # share of all cores in use
    received_per_s: float | None  # bytes, over all interfaces
    sent_per_s: float | None
    num_errors: int  # of the interfaces since the watcher began
    num_oom_kills: int  # since the watcher began

    @property
    def marks(self) -> tuple[str, ...]:
        """The reasons to look at this host."""
        usage = self.usage
        if usage is None:
            return ("no answer yet",)
        full = usage.shm_bytes / max(1, usage.total_shm_bytes)
        killed = counted(self.num_oom_kills, "process")
        found = {
            f"no answer for {self.age_s:.0f}s": self.age_s > _SILENT_S,
            f"the kernel has killed {killed}, as memory ran out": self.num_oom_kills,
            f"its /dev/shm is {full:.0%} full": full > _FULL,
            f"no figures of GPUs: {usage.gpu_problem}": usage.gpu_problem,
        }
        return tuple(text for text, is_so in found.items() if is_so)


class WatchedJob(NamedTuple):
    """A job as a watcher shows it at one time."""

    job: JobInfo
    at: float  # Unix time
    step: int | None
    step_s: float | None  # the median, of the slowest rank in each step
    step_p99_s: float | None
    tokens_per_s: float | None
    loss: float | None  # the mean over ranks
    shares: Shares | None  # the mean over ranks
    hang: str  # a sentence; empty if the job does not hang
    ranks: tuple[WatchedRank, ...]  # those to look at first come first
    hosts: tuple[WatchedHost, ...]


class _Host(NamedTuple):
    first: HostUsage
    before: HostUsage
    last: HostUsage
    at_s: float


class JobWatcher:
    """Collects tables and answers of a ``JobConnection``; ``view`` sums them up."""

    def __init__(self, status: JobStatus) -> None:
        self._status = status
        self._hosts: dict[str, _Host] = {}
        self._steps: dict[int, float] = {}
        self._tokens: dict[int, deque[tuple[float, float]]] = defaultdict(deque)
        self.add(status)

    def add(self, news: JobStatus | HostAnswer) -> None:
        """Take over a new table or a host's answer to ``usage``."""
        if isinstance(news, JobStatus):
            self._status = news
            self._add_figures(news.workers)
            return
        try:
            usage = from_plain(HostUsage, news.answer)
        except PlainValueError:  # the answer to another question
            return
        known = self._hosts.get(news.host)
        first, before = (known.first, known.last) if known else (usage, usage)
        self._hosts[news.host] = _Host(first, before, usage, time.monotonic())

    def view(self) -> WatchedJob:
        status = self._status
        running = [row for row in status.workers if row.state == "running"]
        times = _StepTimes(running)
        statuses = [row.status for row in running if row.status]
        steps = [each.step for each in statuses if each.step != UNKNOWN]
        ranks = self._rank_views(times)
        losses = [s.progress["loss"] for s in statuses if "loss" in s.progress]
        shares = [rank.shares for rank in ranks if rank.shares]
        slowest = sorted(self._steps.values())
        return WatchedJob(
            job=status.job,
            at=time.time(),
            step=max(steps, default=None),
            step_s=median(slowest) if slowest else None,
            step_p99_s=slowest[len(slowest) * 99 // 100] if slowest else None,
            tokens_per_s=self._tokens_per_s(),
            loss=_mean(losses),
            shares=Shares(*map(fmean, zip(*shares, strict=True))) if shares else None,
            hang=describe_hang(explain_hang(status, {})),
            ranks=tuple(ranks),
            hosts=tuple(self._host_views()),
        )

    def _add_figures(self, workers: Iterable[WorkerInfo]) -> None:
        now_s = time.monotonic()
        for row in workers:
            if row.status is None:
                continue
            for each in row.status.steps:
                self._steps[each.step] = max(
                    each.total_s, self._steps.pop(each.step, 0.0)
                )
            tokens, at_s = row.status.progress.get("tokens"), now_s - row.status_age_s
            series = self._tokens[row.worker]
            if tokens is not None and (not series or tokens != series[-1][1]):
                series.append((at_s, tokens))
            while series and series[0][0] < now_s - _RATE_S:
                series.popleft()
        for step in list(islice(self._steps, max(0, len(self._steps) - _MOST_STEPS))):
            del self._steps[step]

    def _tokens_per_s(self) -> float | None:
        rates = [
            (series[-1][1] - series[0][1]) / (series[-1][0] - series[0][0])
            for series in self._tokens.values()
            if len(series) > 1 and series[-1][0] > series[0][0]
        ]
        return sum(rates) if rates else None

    def _rank_views(self, times: "_StepTimes") -> list[WatchedRank]:
        awaited = {
            rank for ranks in self._status.find_awaited().values() for rank in ranks
        }
        views = [
            self._rank_view(row, times, is_awaited=row.rank in awaited)
            for row in self._status.workers
        ]
        return sorted(views, key=_blame_order)

    def _rank_view(
        self, row: WorkerInfo, times: "_StepTimes", *, is_awaited: bool
    ) -> WatchedRank:
        status = row.status
        cpu, rss_bytes = self._usage_of(row)
        return WatchedRank(
            rank=row.rank,
            worker=row.worker,
            host=row.host,
            pid=row.pid,
            state=row.state,
            exit_code=row.exit_code,
            is_reporting=status is not None,
            step=status.step if status and status.step != UNKNOWN else None,
            **times.of(row.worker)._asdict(),
            is_awaited=is_awaited,
            collective=row.collective.name if row.collective else "",
            collective_age_s=row.collective_age_s,
            status_age_s=row.status_age_s,
            cpu=cpu,
            rss_bytes=rss_bytes,
            device_bytes=status.device_bytes if status else 0,
            progress=status.progress if status else {},
        )

    def _usage_of(self, row: WorkerInfo) -> tuple[float | None, int]:
        """Return the cores that a worker uses, if known, and its memory in bytes."""
        host, name = self._hosts.get(row.host), str(row.worker)
        if host is None or (last := host.last.workers.get(name)) is None:
            return None, row.status.rss_bytes if row.status else 0
        before, took_s = (
            host.before.workers.get(name),
            host.last.at_s - host.before.at_s,
        )
        if before is None or took_s <= 0.0:
            return None, last.rss_bytes
        return max(0.0, last.cpu_s - before.cpu_s) / took_s, last.rss_bytes

    def _host_views(self) -> list[WatchedHost]:
        sizes = Counter(row.host for row in self._status.workers)
        return [_view_host(n, size, self._hosts.get(n)) for n, size in sizes.items()]


def watch_job(status: JobStatus) -> Generator[WatchedJob]:
    """Yield a view of a job about once a second, until the job is over.

    Rates exist from the third view on. Closing the generator does not affect the job.

    Raises:
        LaunchError: The job does not answer for 10 s, belongs to another user, or runs
            with another version of ronde.
    """
    watcher = JobWatcher(status)
    is_over = suppress(ConnectionError, FileNotFoundError)
    try:
        with is_over, JobConnection(status.socket) as job:
            for news in job:
                watcher.add(news)
                if isinstance(news, JobStatus):
                    with suppress(ConnectionError):  # this is the last table
                        job.send({"ask": "usage"})
                    yield watcher.view()
    except OSError as error:
        raise LaunchError(
            f"the job does not answer: {error}. Is ronde run stopped? Continue it: fg."
        ) from None


def view_to_plain(view: WatchedJob) -> dict[str, object]:
    """Return a view as JSON's types; figures that are not finite become text."""
    plain = cast("dict[str, object]", to_plain(view))
    for name, value in plain.items():
        if isinstance(value, float) and not isfinite(value):
            plain[name] = str(value)
    for name, rows in ("ranks", view.ranks), ("hosts", view.hosts):
        shown = cast("list[dict[str, object]]", plain[name])
        for each, row in zip(shown, rows, strict=True):
            each["marks"] = list(row.marks)
    return plain


def _view_host(name: str, num_ranks: int, host: _Host | None) -> WatchedHost:
    if host is None:
        return WatchedHost(name, num_ranks, None, 0.0, None, None, None, 0, 0)
    first, before, last, at_s = host
    took_s = last.at_s - before.at_s
    cpu = received = sent = None
    if took_s > 0.0:
        cpu = (last.cpu_s - before.cpu_s) / took_s / last.num_cpus
        old = {each.name: each for each in before.interfaces}
        pairs = [(old[each.name], each) for each in last.interfaces if each.name in old]
        received = sum(b.received_bytes - a.received_bytes for a, b in pairs) / took_s
        sent = sum(b.sent_bytes - a.sent_bytes for a, b in pairs) / took_s
    errors = [sum(i.num_errors for i in each.interfaces) for each in (first, last)]
    return WatchedHost(
        host=name,
        num_ranks=num_ranks,
        usage=last._replace(workers={}),
        age_s=time.monotonic() - at_s,
        cpu=cpu,
        received_per_s=received,
        sent_per_s=sent,
        num_errors=errors[1] - errors[0],
        num_oom_kills=last.num_oom_kills - first.num_oom_kills,
    )


def _blame_order(rank: WatchedRank) -> tuple[float, ...]:
    is_over = rank.state in ("ended", "lost")
    number = rank.worker if rank.rank is None else rank.rank
    return -rank.is_awaited, -is_over, -round(rank.blame, 2), number


def _mean(values: Sequence[float | None]) -> float | None:
    found = [float("nan") if value is None else value for value in values]
    # Not of fmean, which fails if the sum of finite values is not finite.
    return sum(value / len(found) for value in found) if found else None


class _RankTimes(NamedTuple):
    """Fields of a ``WatchedRank``."""

    step_s: float | None = None
    own_s: float | None = None
    slowness: float | None = None
    shares: Shares | None = None
    blame: float = 0.0


class _StepTimes:
    """The times of the steps that all ranks report, divided as the note above says."""

    def __init__(self, workers: Iterable[WorkerInfo]) -> None:
        reported = {
            row.worker: {each.step: each for each in row.status.steps}
            for row in workers
            if row.status and row.status.steps
        }
        common = set[int]().union(*reported.values()).intersection(*reported.values())
        self._steps = {
            worker: [steps[step] for step in sorted(common)]
            for worker, steps in reported.items()
            if common
        }
        self._own_s = {
            worker: fmean(each.total_s - each.blocked_s for each in steps)
            for worker, steps in self._steps.items()
        }
        self._median_s = median(self._own_s.values()) if common else 0.0
        columns = list(zip(*self._steps.values(), strict=True))
        self._exposed_s = [min(each.blocked_s for each in column) for column in columns]
        self._blame = self._find_blame(columns)

    def of(self, worker: int) -> _RankTimes:
        steps = self._steps.get(worker)
        if not steps:
            return _RankTimes()
        total_s = sum(each.total_s for each in steps)
        exposed_s = sum(self._exposed_s)
        parts = {
            "communication": exposed_s,
            "waiting": sum(each.blocked_s for each in steps) - exposed_s,
            "input": sum(each.input_s for each in steps),
            "other": sum(each.gc_s for each in steps),
        }
        parts = {name: part / total_s for name, part in parts.items()}
        own_s = self._own_s[worker]
        return _RankTimes(
            step_s=fmean(each.total_s for each in steps),
            own_s=own_s,
            slowness=own_s / self._median_s if self._median_s else None,
            shares=Shares(compute=1.0 - sum(parts.values()), **parts),
            blame=self._blame.get(worker, 0.0),
        )

    def _find_blame(self, columns: Sequence[Sequence[StepTime]]) -> Mapping[int, float]:
        workers = list(self._steps)
        blame: dict[int, float] = defaultdict(float)
        total_s = sum(fmean(each.total_s for each in column) for column in columns)
        for column, exposed_s in zip(columns, self._exposed_s, strict=True):
            last = min(range(len(column)), key=lambda i: column[i].blocked_s)
            others = [each for i, each in enumerate(column) if i != last]
            if others and total_s:
                waited_s = fmean(each.blocked_s - exposed_s for each in others)
                blame[workers[last]] += waited_s / total_s
        return blame
