"""Questions to a running job: its table, and looks at its processes."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.launch.status import HostAnswer, ask, list_jobs
from ronde.monitor.looks import HostLook, Look
from ronde.plain_values import from_plain
from ronde.status.table import JobStatus

_ANSWER_S = 3.0


class Picture(NamedTuple):
    """A job's table, and the looks at its workers."""

    status: JobStatus
    looks: dict[int, Look]  # by worker
    silent: tuple[str, ...]  # hosts whose observer did not answer in time


def choose_job(jobs: Sequence[JobStatus], name: str | None) -> JobStatus:
    """Return the one job whose id contains ``name``, or the only job.

    Raises:
        UsageError: There is none, or there are several.
    """
    found = [job for job in jobs if name is None or name in job.job.job_id]
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
    raise UsageError(f"several jobs run, so JOB must be given: one of {ids}.")


def take_picture(name: str | None = None) -> Picture:
    """Look at every worker of a job once; a host that is silent takes 3 s.

    Raises:
        UsageError: As ``choose_job``.
        OSError: The job ended meanwhile.
    """
    status = choose_job(list_jobs(), name)
    hosts = {row.host for row in status.workers if row.state == "running"}
    looks: dict[int, Look] = {}
    due_s = time.monotonic() + _ANSWER_S
    for news in ask(status.socket, {"ask": "look"}):
        if isinstance(news, HostAnswer):
            plain = {k: v for k, v in news.answer.items() if k != "reader"}
            found = from_plain(HostLook, plain)
            looks |= {look.worker: look for look in found.looks}
            hosts.discard(news.host)
        else:
            status = news
        # A version comes each second, so this is checked in time.
        if not hosts or time.monotonic() > due_s:
            break
    return Picture(status, looks, tuple(sorted(hosts)))
