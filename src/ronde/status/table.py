"""The status table of a job: its workers, and the ranks that collectives wait for."""

from pathlib import Path
from typing import NamedTuple

from ronde.status.values import UNKNOWN, PendingCollective, RankStatus

_SILENCE_S = 2.5


class JobInfo(NamedTuple):
    """The constant facts of a job, and the number of its restarts."""

    job_id: str
    command: tuple[str, ...]
    started_at: float  # Unix time
    head: str  # the host of ``ronde run``
    head_pid: int  # its process there
    restarts: int  # number of restarts of all ranks


class WorkerInfo(NamedTuple):
    """The row of one worker in the table."""

    worker: int  # its id, which never changes
    rank: int | None  # None outside the view of an elastic job
    host: str
    pid: int  # 0 until it has started
    state: str  # starting, running, ended or lost (with its host)
    exit_code: int | None  # minus a signal's number; None until it has ended
    status_age_s: float
    status: RankStatus | None  # None if the program reports nothing

    @property
    def collective(self) -> PendingCollective | None:
        """The oldest pending collective of this worker; None if none is known."""
        if self.status is None or self.state != "running":
            return None
        return next(iter(self.status.collectives), None)

    @property
    def collective_age_s(self) -> float:
        """The minimum time since the rank entered ``collective``; 0 if that is None."""
        if self.collective is None:
            return 0.0
        # A rank reports each second. One that is silent does not run, so it is still
        # in; another may have left.
        is_still_in = self.status_age_s > _SILENCE_S
        return self.collective.age_s + (self.status_age_s if is_still_in else 0.0)

    def is_absent(self, collective: PendingCollective, begun_s: float) -> bool:
        """Return True if this worker is known not to be in ``collective``.

        ``begun_s`` is the time since other ranks entered the collective.
        """
        if self.status is None or self.state != "running":
            return self.state in ("ended", "lost")
        status = self.status
        is_all = len(status.collectives) == status.num_collectives
        is_in = any(map(collective.is_same, status.collectives))
        return is_all and not is_in and self.status_age_s < begun_s


class JobStatus(NamedTuple):
    """One version of the status table of a job."""

    socket: Path
    version: int  # grows, also by more than one
    job: JobInfo
    workers: tuple[WorkerInfo, ...]

    def find_awaited(self) -> dict[int, tuple[int, ...]]:
        """Return, for each worker, the ranks that its oldest collective waits for.

        These are ranks of its group that have ended, or that have reported since the
        collective began and are not in it. Ranks that report nothing are left out.
        """
        by_rank = {row.rank: row for row in self.workers if row.rank is not None}
        waiting: dict[PendingCollective, list[WorkerInfo]] = {}
        for row in self.workers:
            if (own := row.collective) is not None and UNKNOWN not in own.ranks:
                call = own._replace(age_s=0.0, num_bytes=0)
                waiting.setdefault(call, []).append(row)
        found: dict[int, tuple[int, ...]] = {}
        for call, rows in waiting.items():
            begun_s = max(row.collective_age_s for row in rows)
            group = call.ranks or tuple(by_rank)
            members = [by_rank.get(rank) for rank in group]
            awaited = tuple(
                rank
                for rank, member in zip(group, members, strict=True)
                if member is None or member.is_absent(call, begun_s)
            )
            found |= {row.worker: awaited for row in rows}
        return found
