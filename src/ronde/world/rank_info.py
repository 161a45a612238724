"""This process among the ranks, as values: its numbers, and where the ranks meet."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ronde.errors import WorldError


class Launcher(StrEnum):
    """Whose environment the numbers were read from."""

    RONDE = "ronde"
    TORCHRUN = "torchrun"
    HOROVOD = "horovod"
    OPEN_MPI = "openmpi"
    PMI = "pmi"
    SLURM = "slurm"
    PLAIN = "plain"  # RANK and WORLD_SIZE set by hand or by a cluster's operator
    NONE = "none"  # no launcher: a world of one


@dataclass(frozen=True, slots=True)
class World:
    """One rank's place among all ranks."""

    rank: int  # this process among all
    size: int
    local_rank: int  # this process among those of its host
    local_size: int
    cross_rank: int  # this host among the hosts that have ``local_rank``
    cross_size: int
    hosts: tuple[str, ...] = ()  # in node order; empty where they are unknown

    def __post_init__(self) -> None:
        for name in ("rank", "local_rank", "cross_rank"):
            count = name.replace("rank", "size")
            if not 0 <= getattr(self, name) < getattr(self, count):
                raise WorldError(
                    f"{name} must be in 0..{count}-1, got {name} "
                    f"{getattr(self, name)} and {count} {getattr(self, count)}."
                )
        if self.local_size > self.size or self.cross_size > self.size:
            raise WorldError(
                f"size must be at least local_size and cross_size, got {self.size}, "
                f"{self.local_size} and {self.cross_size}."
            )

    @classmethod
    def from_hosts(cls, rank: int, hosts: Sequence[str]) -> "World":
        """Derive all numbers from the host of every rank; hosts may interleave."""
        counts = Counter(hosts)
        mine = hosts[rank]
        local_rank = hosts[:rank].count(mine)
        peers = [name for name, count in counts.items() if count > local_rank]
        return cls(
            rank=rank,
            size=len(hosts),
            local_rank=local_rank,
            local_size=counts[mine],
            cross_rank=peers.index(mine),
            cross_size=len(peers),
            hosts=tuple(counts),
        )


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a job meet, according to the launcher."""

    address: str  # of rank 0's node
    port: int
    # The launcher itself answers there (torchrun's agent store): every rank, 0
    # included, is a client.
    is_hosted: bool = False
    # How often the launcher has restarted the ranks. A hosted store outlives them, so
    # what a dead attempt wrote there must not be taken for this one's.
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What the environment reports of this process; the numbers are as in ``World``.

    MPI's and PMI's environments do not name the node; ``cross_rank`` and ``cross_size``
    are None then, until the ranks have exchanged their hosts (``World.from_hosts``).
    """

    launcher: Launcher
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int | None = None
    cross_size: int | None = None
    meeting: Meeting | None = None
    job_id: str = ""  # the launcher's name for the job
    hosts: tuple[str, ...] = ()
    engine: str = "auto"  # which engine moves the bytes
    algorithm: str = ""  # which schedule it follows, where it has several
    # Where a launcher of ronde's answers for the ranks' store: the path of a socket on
    # this host, or ``ADDRESS:PORT KEYFILE``.
    store: str = ""
    stray: tuple[str, ...] = ()  # variables that were ignored, as ``NAME=value``

    @property
    def world(self) -> World | None:
        """The whole world, or None until the ranks have exchanged their hosts."""
        if self.cross_rank is None or self.cross_size is None:
            return None
        local = (self.local_rank, self.local_size)
        cross = (self.cross_rank, self.cross_size)
        return World(self.rank, self.size, *local, *cross, self.hosts)
