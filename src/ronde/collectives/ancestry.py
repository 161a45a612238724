"""Which process launched this rank, read off ``/proc``."""

import os
from dataclasses import dataclass
from pathlib import Path

from ronde.world.value import Claim, Launcher

_RANK_VARIABLES = {
    Launcher.RONDE: "RANK",
    Launcher.TORCHRUN: "RANK",
    Launcher.HOROVOD: "HOROVOD_RANK",
    Launcher.OPEN_MPI: "OMPI_COMM_WORLD_RANK",
    Launcher.PMI: "PMI_RANK",
    Launcher.SLURM: "SLURM_PROCID",
    Launcher.PLAIN: "RANK",
}


@dataclass(frozen=True, slots=True)
class Process:
    """A process that no later one is taken for.

    Attributes:
        pid: Its number.
        started_at: When it started, in clock ticks since boot.
    """

    pid: int
    started_at: int


def find_launcher(claim: Claim) -> Process:
    """Return the nearest ancestor that is not part of this rank.

    Shells and wrappers between launcher and rank have the rank's environment; the
    launcher has not, or it is another user's and hides its own. All ranks of a host
    that one launcher started find the same process.
    """
    pid = _parent(os.getpid())
    while pid > 1 and _is_of_rank(pid, claim):
        pid = _parent(pid)
    return Process(pid, _started_at(pid))


def _is_of_rank(pid: int, claim: Claim) -> bool:
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


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _started_at(pid: int) -> int:
    return int(_stat(pid)[19])
