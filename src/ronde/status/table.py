"""What a job and each of its workers does now, and whom collectives wait for."""

from pathlib import Path
from typing import NamedTuple, cast

from ronde.status.values import UNKNOWN, PendingCollective, RankStatus

_SILENCE_S = 2.5


class JobInfo(NamedTuple):
    """What does not change while a job runs, but for its restarts."""

    job_id: str
    command: tuple[str, ...]
    started_at: float  # Unix time
    head: str  # the host of ``ronde run``
    head_pid: int  # its process there
    restarts: int  # how often all ranks were started again


class WorkerInfo(NamedTuple):
    """One worker: a process by an id that it keeps."""

    worker: int
    rank: int | None  # None outside the view of an elastic job
    host: str
    pid: int  # 0 until it has started
    state: str  # starting, running, ended or lost (with its host)
    exit_code: int | None  # minus a signal's number; None until it has ended
    status_age_s: float
    status: RankStatus | None  # None from a program that reports nothing

    @property
    def collective(self) -> PendingCollective | None:
        """The oldest collective that it is in, if it is known to be in one."""
        if self.status is None or self.state != "running":
            return None
        return next(iter(self.status.collectives), None)

    @property
    def collective_age_s(self) -> float:
        """For how long it has been in that at least; 0 outside of one."""
        if self.collective is None:
            return 0.0
        # A rank reports a change within two seconds: its silence means there is none.
        is_still_in = self.status_age_s > _SILENCE_S
        return self.collective.age_s + (self.status_age_s if is_still_in else 0.0)

    def is_absent(self, key: object, begun_s: float) -> bool:
        """Return whether it is known not to be in a collective that others are in.

        They have been in it for ``begun_s``.
        """
        if self.status is None or self.state != "running":
            return self.state in ("ended", "lost")
        status = self.status
        is_all = len(status.collectives) == status.num_collectives
        is_in = any(each.key == key for each in status.collectives)
        return is_all and not is_in and self.status_age_s < begun_s


class JobStatus(NamedTuple):
    """One version of a job's table."""

    socket: Path
    version: int  # grows; a reader may miss some
    job: JobInfo
    workers: tuple[WorkerInfo, ...]

    def find_awaited(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks that each worker's oldest collective waits for.

        They are the ranks of its group that have ended, or have reported since it began
        and are not in it. Of ranks that report nothing it is not known.
        """
        by_rank = {row.rank: row for row in self.workers if row.rank is not None}
        waiting: dict[tuple[object, ...], list[WorkerInfo]] = {}
        for row in self.workers:
            if (own := row.collective) is not None and UNKNOWN not in own.ranks:
                waiting.setdefault((own.key, own.ranks), []).append(row)
        found: dict[int, tuple[int, ...]] = {}
        for (key, ranks), rows in waiting.items():
            begun_s = max(row.collective_age_s for row in rows)
            group = cast("tuple[int, ...]", ranks) or tuple(by_rank)
            members = [by_rank.get(rank) for rank in group]
            awaited = tuple(
                rank
                for rank, member in zip(group, members, strict=True)
                if member is None or member.is_absent(key, begun_s)
            )
            found |= {row.worker: awaited for row in rows}
        return found
