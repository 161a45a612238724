"""Which process launched this rank, read off ``/proc``."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from ronde.world.rank_info import Launcher, RankInfo

_RANK_VARIABLES = {
    Launcher.RONDE: "RANK",
    Launcher.TORCHRUN: "RANK",
    Launcher.HOROVOD: "HOROVOD_RANK",
    Launcher.OPEN_MPI: "OMPI_COMM_WORLD_RANK",
    Launcher.PMI: "PMI_RANK",
    Launcher.SLURM: "SLURM_PROCID",
    Launcher.PLAIN: "RANK",
}
_IS_EXITING = 0x4
"""``PF_EXITING`` of Linux: the environment is gone, the children are not yet."""
_EXITING_S = 3.0
"""An exiting process hands its children on within this; one whose main thread alone has
ended does not."""
_ENDING_S = 10.0
"""How long ancestors may go on ending, one after the other."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that no later one is taken for.

    Attributes:
        pid: Its number; 0 for one outside of this container.
        started_at: When it started, in clock ticks since boot.
    """

    pid: int
    started_at: int


def find_launcher(claim: RankInfo) -> Process:
    """Return the nearest ancestor that is not part of this rank.

    Shells and wrappers between launcher and rank have the rank's environment; the
    launcher has not, or it is another user's and hides its own. All ranks of a host
    that one launcher started find the same process.
    """
    begun = time.monotonic()
    while True:
        waited_s = time.monotonic() - begun
        is_late = waited_s > _EXITING_S
        try:
            return _find_launcher(claim, is_late=is_late)
        except (FileNotFoundError, ProcessLookupError):
            if waited_s > _ENDING_S:
                raise
            # An ancestor has ended. Its children have another parent now: look again.
            os.sched_yield()


def _find_launcher(claim: RankInfo, *, is_late: bool) -> Process:
    pid = os.getppid()
    while pid > 1 and _is_of_rank(pid, claim):
        pid = int(_stat(pid)[1])
    if pid == 0:
        return Process(0, 0)
    state, *fields = _stat(pid)
    if (state in "ZX" or int(fields[5]) & _IS_EXITING) and not is_late:
        raise ProcessLookupError(pid)
    return Process(pid, int(fields[18]))


def _is_of_rank(pid: int, claim: RankInfo) -> bool:
    """Say whether a process was given this rank's place in this very job."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except PermissionError:
        return False
    place = f"{_RANK_VARIABLES[claim.launcher]}={claim.rank}".encode()
    job = f"={claim.job_id}".encode()
    # A launcher that itself is a rank of another job may have the same number there.
    return place in entries and (
        not claim.job_id or any(entry.endswith(job) for entry in entries)
    )


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/pid/stat`` from the third on.

    The second is the program's name, in brackets; it may hold spaces and brackets.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
