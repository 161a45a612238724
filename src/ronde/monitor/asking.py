"""Questions to the observers of a running job."""

import time
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.launch.status import HostAnswer, JobConnection, list_jobs
from ronde.monitor.inspection import HostInspection, Inspection, KernelLine
from ronde.plain_values import from_plain
from ronde.status.table import JobStatus

_ANSWER_S = 3.0
_REPORTED_S = 2.0  # one for a rank to report a change, and one for its agent


class InspectedJob(NamedTuple):
    """The status table of a job, and the state of its workers' processes."""

    status: JobStatus
    inspections: dict[int, Inspection]  # by worker
    kernel_lines: dict[str, tuple[KernelLine, ...]]  # by host
    silent: tuple[str, ...]  # hosts whose observer did not answer in time


def choose_job(jobs: Sequence[JobStatus], name: str | None) -> JobStatus:
    """Return the one job with ``name`` in its id or command, or the only job.

    Raises:
        UsageError: There is none, or there are several.
    """
    found = [job for job in jobs if name is None or name in _names_of(job)]
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


def _names_of(job: JobStatus) -> str:
    return " ".join((job.job.job_id, *job.job.command))


def inspect_job(name: str | None = None) -> InspectedJob:
    """Inspect the workers of the job that ``choose_job`` returns.

    Raises:
        UsageError: As ``choose_job``.
        OSError: The job ended meanwhile.
    """
    return inspect_workers(choose_job(list_jobs(), name))


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
    now_s = time.monotonic()
    answers_by_s = now_s + _ANSWER_S
    ends_s = inf
    with JobConnection(status.socket) as job:
        job.send({"ask": "inspect"})
        for news in job:
            now_s = time.monotonic()
            if isinstance(news, HostAnswer):
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
    return InspectedJob(status, inspections, kernel_lines, tuple(sorted(hosts)))
