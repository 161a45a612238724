"""Options of elastic jobs: sizes, time limits and sources of hosts."""

from enum import StrEnum
from typing import NamedTuple

from ronde.launch.host import SLOTS_OPEN

NO_LIMIT = 1 << 20
"""``max_ranks`` of a job that takes all slots."""


class FailureDomain(StrEnum):
    """The slots that count as failed with a rank: only its own, or all of its host."""

    SLOT = "slot"
    HOST = "host"


class DiscoverySpec(NamedTuple):
    """The command or file that names the hosts of a running job."""

    option: str  # as typed, for messages
    source: str  # a shell command that prints hosts, or the path of a host file
    is_file: bool
    slots: int = SLOTS_OPEN  # slots of a host without a number
    num_each: int | None = None  # ranks of each host; None for one per slot
    ssh_port: int = 0  # of other hosts without one
    is_local: bool = False  # hosts must be this machine


class ElasticOptions(NamedTuple):
    """Sizes, time limits and host sources of an elastic job."""

    min_ranks: int  # with fewer ranks the job waits for ``elastic_timeout_s``
    max_ranks: int  # or ``NO_LIMIT``
    spares: int = 0  # further processes, ready to replace a lost one
    discovery: DiscoverySpec | None = None  # None where the hosts are fixed
    discover_every_s: float = 1.0
    failure_domain: FailureDomain = FailureDomain.SLOT
    awaits_joining: bool = False  # ranks pause while others start
    # for which a failed slot or host is not used: the first time, and at most
    cooldown_s: tuple[float, float] = (30.0, 3600.0)
    elastic_timeout_s: float = 600.0
    reform_timeout_s: float = 30.0  # for a rank to answer when a view ends
    reset_limit: int | None = None  # most changes of the view; None for any number
    notice: tuple[str, ...] = ("signal",)  # sources of --notice

    @property
    def num_processes(self) -> int | None:
        """The largest number of ranks and spares; None if there is no limit."""
        is_open = self.max_ranks == NO_LIMIT
        return None if is_open else self.max_ranks + self.spares
