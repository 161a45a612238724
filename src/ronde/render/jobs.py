"""Running jobs and the status of their ranks, as text."""

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence

from ronde.launch.job.failure import signal_name
from ronde.render.text import WIDTH, align, format_ranks, shorten
from ronde.status.table import JobInfo, JobStatus, WorkerInfo
from ronde.status.values import UNKNOWN
from ronde.units import counted, format_duration, grouped

_MOST_ROWS = 32
_MOST_HOSTS = 20
_MOST_OUTLIERS = 5
_LONG_S = 1.0  # longer than a collective of a healthy job takes
_HOST_LETTERS = 14
_NAME_LETTERS = 30  # of the only host
_DOING_LETTERS = 26
_AWAITED_LETTERS = 16
_RANK_TITLES = ("rank", "host", "pid", "step", "now", "for", "waits for")
_HOST_TITLES = ("host", "ranks", "steps", "waiting", "longest", "waits for")
_RIGHT = ("rank", "pid", "step", "for", "ranks", "steps", "waiting", "longest")

Awaited = Mapping[int, Sequence[int]]


def draw_jobs(jobs: Sequence[JobStatus], *, is_complete: bool = False) -> str:
    """Format jobs and their ranks; for a large job, only hosts and outliers."""
    if not jobs:
        return "No job of yours runs on this host.\n"
    return "\n".join(_draw_job(job, is_complete=is_complete) for job in jobs)


def _draw_job(job: JobStatus, *, is_complete: bool) -> str:
    workers, awaited = job.workers, job.find_awaited()
    hosts = dict.fromkeys(each.host for each in workers)
    lines = [*describe_job(job.job, len(workers), list(hosts)), ""]
    if is_complete or len(workers) <= _MOST_ROWS:
        return "\n".join(lines) + "\n" + _draw_ranks(workers, awaited)
    outliers = _find_outliers(workers, awaited)
    text = "\n".join(lines) + "\n" + _draw_hosts(workers, outliers, awaited)
    if outliers:
        text += "\nThe ranks to look at first:\n" + _draw_ranks(outliers, awaited)
    return text + "ronde ps --all shows all ranks.\n"


def describe_job(
    job: JobInfo, num_ranks: int, hosts: Sequence[str], width: int = WIDTH
) -> tuple[str, str]:
    """Return two lines: the job's command, and its ranks, hosts and age."""
    where = counted(len(hosts), "host")
    if len(hosts) == 1:
        where = shorten(hosts[0], _NAME_LETTERS)
    took = format_duration(max(0.0, time.time() - job.started_at))
    restarts = f", {counted(job.restarts, 'restart')}" if job.restarts else ""
    text = shorten(f"job {job.job_id}: {shlex.join(job.command)}", width - 3)
    return text, f"{counted(num_ranks, 'rank')} on {where}, for {took}{restarts}"


def _draw_ranks(workers: Iterable[WorkerInfo], awaited: Awaited) -> str:
    ordered = sorted(workers, key=lambda w: (w.rank is None, w.rank, w.worker))
    return align([_RANK_TITLES, *(_row(w, awaited) for w in ordered)], right=_RIGHT)


def _row(worker: WorkerInfo, awaited: Awaited) -> tuple[str, ...]:
    return (
        "-" if worker.rank is None else str(worker.rank),
        shorten(worker.host, _HOST_LETTERS),
        str(worker.pid or "-"),
        "-" if _step_of(worker) == UNKNOWN else str(_step_of(worker)),
        shorten(_describe(worker), _DOING_LETTERS),
        _format_age(worker.collective_age_s),
        _format_awaited([worker], awaited),
    )


def _describe(worker: WorkerInfo) -> str:
    """Describe a worker: its pending collective if it has one, else its state."""
    if worker.state != "running":
        return describe_end(worker.state, worker.exit_code)
    if worker.status is None:
        return "reports nothing"
    if worker.collective is None:
        return "not in a collective"
    return worker.collective.name


def describe_end(state: str, exit_code: int | None) -> str:
    """Describe a worker that does not run: its end, or its start."""
    if state == "ended" and exit_code is not None:
        if exit_code < 0:
            return f"killed by {signal_name(-exit_code)}"
        return f"exit code {exit_code}"
    return "lost with its host" if state == "lost" else state


def _format_age(age_s: float) -> str:
    return format_duration(age_s) if age_s else ""


def _awaited_by(workers: Iterable[WorkerInfo], awaited: Awaited) -> set[int]:
    """Return the ranks that some workers have long waited for."""
    late = [each for each in workers if each.collective_age_s >= _LONG_S]
    return {rank for each in late for rank in awaited.get(each.worker, ())}


def _format_awaited(workers: Iterable[WorkerInfo], awaited: Awaited) -> str:
    ranks = _awaited_by(workers, awaited)
    return shorten(format_ranks(ranks), _AWAITED_LETTERS) if ranks else ""


def _step_of(worker: WorkerInfo) -> int:
    return UNKNOWN if worker.status is None else worker.status.step


def _draw_hosts(
    workers: Sequence[WorkerInfo], outliers: Sequence[WorkerInfo], awaited: Awaited
) -> str:
    """Return a line per host; if some are left out, those with outliers come first."""
    by_host = grouped((each.host, each) for each in workers)
    hosts, left = list(by_host), len(by_host) - _MOST_HOSTS
    if left > 0:
        hosts = list(dict.fromkeys([*(each.host for each in outliers), *hosts]))
    rows = [_host_row(host, by_host[host], awaited) for host in hosts[:_MOST_HOSTS]]
    text = align([_HOST_TITLES, *rows], right=_RIGHT)
    return text + (f"and {counted(left, 'more host')}\n" if left > 0 else "")


def _host_row(
    host: str, own: Sequence[WorkerInfo], awaited: Awaited
) -> tuple[str, ...]:
    steps = sorted({step for each in own if (step := _step_of(each)) != UNKNOWN})
    ages_s = [each.collective_age_s for each in own]
    return (
        shorten(host, _HOST_LETTERS),
        str(len(own)),
        "-".join(str(step) for step in dict.fromkeys((*steps[:1], *steps[-1:]))) or "-",
        str(sum(age_s >= _LONG_S for age_s in ages_s)),
        _format_age(max(ages_s)),
        _format_awaited(own, awaited),
    )


def _find_outliers(workers: Sequence[WorkerInfo], awaited: Awaited) -> list[WorkerInfo]:
    """Return ranks that others await, that ended, that lag, or that wait longest."""
    late = _awaited_by(workers, awaited)
    steps = [_step_of(each) for each in workers if _step_of(each) != UNKNOWN]
    least, most = min(steps, default=0), max(steps, default=0)
    ordered = sorted(workers, key=lambda each: -each.collective_age_s)
    groups = (
        [each for each in workers if each.rank in late],
        [each for each in workers if each.state in ("ended", "lost")],
        [each for each in workers if _step_of(each) == least < most],
        [each for each in ordered if each.collective_age_s >= _LONG_S],
    )
    found = {each.worker: each for own in groups for each in own[:_MOST_OUTLIERS]}
    return list(found.values())
