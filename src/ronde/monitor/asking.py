"""Questions to the observers of a running job."""

import time
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.launch.status import HostAnswer, JobConnection
from ronde.monitor.inspection import HostInspection, Inspection, KernelLine
from ronde.monitor.send_queues import SendQueue
from ronde.monitor.usage import HostUsage
from ronde.monitor.view import JobWatcher, WatchedJob
from ronde.plain_values import PlainValueError, from_plain
from ronde.status.table import JobStatus
from ronde.units import grouped

_ANSWER_S = 3.0
_OBSERVED_S = 4.0
_MOST_ANSWERS = 64  # with stacks
_REPORTED_S = 2.0  # one for a rank to report a change, and one for its agent


class InspectedJob(NamedTuple):
    """The status table of a job, and the state of its workers' processes."""

    status: JobStatus
    inspections: dict[int, Inspection]  # by worker
    kernel_lines: dict[str, tuple[KernelLine, ...]]  # by host
    silent: tuple[str, ...]  # hosts whose observer did not answer in time
    usages: dict[str, HostUsage]  # by host


def choose_job(jobs: Sequence[JobStatus], name: str | None) -> JobStatus:
    """Return the one job with ``name`` in its id or command, or the only job.

    Raises:
        UsageError: There is none, or there are several.
    """
    found = [
        job
        for job in jobs
        if name is None or name in " ".join((job.job.job_id, *job.job.command))
    ]
    if len(found) == 1:
        return found[0]
    ids = ", ".join(job.job.job_id for job in jobs)
    if not jobs:
        raise UsageError(
            "no job of yours runs on this host. Type the command on the host of "
            "ronde run, as the same user."
        )
    if not found:
        raise UsageError(f"JOB must be one of {ids}, got {name!r}.")
    raise UsageError(f"several jobs are running, so JOB must be given: one of {ids}.")


def inspect_workers(status: JobStatus) -> InspectedJob:
    """Inspect each worker of a job once.

    Hosts that do not answer within 3 s are left out. If ranks report their collectives,
    the call waits 2 s more, for their reports from before the inspections.

    Raises:
        OSError: The job ended meanwhile.
    """
    hosts = {row.host for row in status.workers if row.state == "running"}
    inspections: dict[int, Inspection] = {}
    kernel_lines: dict[str, tuple[KernelLine, ...]] = {}
    usages: dict[str, HostUsage] = {}
    now_s = time.monotonic()
    answers_by_s = now_s + _ANSWER_S
    ends_s = inf
    with JobConnection(status.socket) as job:
        job.send({"ask": "inspect"})
        job.send({"ask": "usage"})
        for news in job:
            now_s = time.monotonic()
            if isinstance(news, HostAnswer) and "inspections" not in news.answer:
                usages[news.host] = from_plain(HostUsage, news.answer)
            elif isinstance(news, HostAnswer):
                found = from_plain(HostInspection, news.answer)
                inspections |= {each.worker: each for each in found.inspections}
                kernel_lines[news.host] = found.kernel_lines
                hosts.discard(news.host)
            else:
                status = news
            # A version comes each second, so the limits hold.
            if ends_s == inf and (not hosts or now_s >= answers_by_s):
                is_reported = any(row.status for row in status.workers)
                ends_s = now_s + (_REPORTED_S if is_reported else 0.0)
            if now_s >= ends_s:
                break
    silent = tuple(sorted(hosts))
    return InspectedJob(status, inspections, kernel_lines, silent, usages)


class ObservedJob(NamedTuple):
    """A job as it was over some seconds."""

    before: WatchedJob  # at the first table
    view: WatchedJob  # at the last one
    inspections: dict[int, list[Inspection]]  # by worker, one or more
    queues: dict[str, list[SendQueue]]  # by host, of all inspections


def observe_job(status: JobStatus) -> ObservedJob:
    """Observe a job for about 4 s.

    Raises:
        OSError: The job ended meanwhile.
    """
    watcher = JobWatcher(status)
    before = watcher.view()
    num_hosts = len({row.host for row in status.workers})
    found: list[tuple[str, HostInspection]] = []
    ends_s = time.monotonic() + _OBSERVED_S
    with JobConnection(status.socket) as job:
        job.send({"ask": "inspect"})
        for news in job:
            watcher.add(news)
            if not isinstance(news, HostAnswer):
                if time.monotonic() >= ends_s:
                    break
                job.send({"ask": "usage"})  # about once a second
                continue
            with suppress(PlainValueError):  # the answer to another question
                found.append((news.host, from_plain(HostInspection, news.answer)))
                is_first = news.host == found[0][0]
                if is_first and len(found) + num_hosts <= _MOST_ANSWERS:
                    job.send({"ask": "inspect"})
    inspections = [each for _, answer in found for each in answer.inspections]
    queues = [(host, each) for host, answer in found for each in answer.queues]
    return ObservedJob(
        before,
        watcher.view(),
        grouped((each.worker, each) for each in inspections),
        grouped(queues),
    )
