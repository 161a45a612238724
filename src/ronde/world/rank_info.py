"""This process among the ranks, as values: its numbers, and where the ranks meet."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ronde.errors import WorldError


class Launcher(StrEnum):
    """Whose environment the claim was read from."""

    RONDE = "ronde"
    TORCHRUN = "torchrun"
    HOROVOD = "horovod"
    OPEN_MPI = "openmpi"
    PMI = "pmi"
    SLURM = "slurm"
    PLAIN = "plain"
    """``RANK`` and ``WORLD_SIZE`` set by hand or by a cluster's operator."""
    NONE = "none"
    """No launcher: a world of one."""


@dataclass(frozen=True, slots=True)
class World:
    """One rank's place among all ranks.

    Attributes:
        rank: This process among all, ``0 <= rank < size``.
        size: Number of processes.
        local_rank: This process among those of its host.
        local_size: Number of processes on this host.
        cross_rank: Index of this host among the hosts that have ``local_rank``.
        cross_size: Number of hosts that have ``local_rank``.
        hosts: Names of the hosts in node order; empty where nobody said.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, index, count in (
            ("rank", self.rank, self.size),
            ("local_rank", self.local_rank, self.local_size),
            ("cross_rank", self.cross_rank, self.cross_size),
        ):
            if not 0 <= index < count:
                raise WorldError(
                    f"{name} must be in 0..{name.replace('rank', 'size')}-1, "
                    f"got {name} {index} and {name.replace('rank', 'size')} {count}."
                )
        if self.local_size > self.size or self.cross_size > self.size:
            raise WorldError(
                f"size must be at least local_size and cross_size, got {self.size}, "
                f"{self.local_size} and {self.cross_size}."
            )

    @classmethod
    def from_hosts(cls, rank: int, hosts: Sequence[str]) -> "World":
        """Derive all numbers from the host of every rank.

        Args:
            rank: This process.
            hosts: The host name of each rank, in rank order; hosts may interleave.
        """
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
    """Where the ranks of a job meet, as the launcher said it.

    Attributes:
        address: Host name or address of rank 0's node.
        port: TCP port there.
        is_hosted: True when the launcher itself answers on ``port`` (torchrun's agent
            store): then every rank, 0 included, is a client.
        attempt: How often the launcher has restarted the ranks. A hosted store outlives
            them, so what a dead attempt wrote there must not be taken for this one's.
    """

    address: str
    port: int
    is_hosted: bool = False
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What one launcher's environment says of this process.

    MPI's and PMI's environments do not say which node this is; ``cross_rank`` and
    ``cross_size`` are None then, until the ranks have told each other their hosts
    (``World.from_hosts``).

    Attributes:
        launcher: Whose environment it is.
        rank: This process among all.
        size: Number of processes.
        local_rank: This process among those of its host.
        local_size: Number of processes on this host.
        cross_rank: As in ``World``, or None where the launcher does not tell.
        cross_size: As in ``World``, or None where the launcher does not tell.
        meeting: Where to meet, or None where the launcher does not tell.
        job_id: The launcher's name for the job; empty where it has none.
        hosts: Names of the hosts in node order; empty where nobody said.
        engine: Which engine is to move the bytes; "auto" chooses.
        algorithm: Which schedule it is to follow, where it has several; or empty.
        store: Where a launcher of ronde's answers for the ranks' store: the path of a
            socket on this host, or ``ADDRESS:PORT KEYFILE``; empty elsewhere.
        stray: Variables that were ignored, as ``NAME=value``.
    """

    launcher: Launcher
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int | None = None
    cross_size: int | None = None
    meeting: Meeting | None = None
    job_id: str = ""
    hosts: tuple[str, ...] = ()
    engine: str = "auto"
    algorithm: str = ""
    store: str = ""
    stray: tuple[str, ...] = ()

    @property
    def world(self) -> World | None:
        """The whole world, or None until the ranks have exchanged their hosts."""
        if self.cross_rank is None or self.cross_size is None:
            return None
        return World(
            self.rank,
            self.size,
            self.local_rank,
            self.local_size,
            self.cross_rank,
            self.cross_size,
            self.hosts,
        )
