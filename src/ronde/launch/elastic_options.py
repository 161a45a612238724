"""The options of an elastic job."""

from enum import StrEnum
from typing import NamedTuple

from ronde.launch.host import SLOTS_OPEN

NO_LIMIT = 1 << 20
"""``max_ranks`` of a job that takes all slots that there are."""


class FailureDomain(StrEnum):
    """The part of a host that counts as failed with one of its ranks."""

    SLOT = "slot"  # its own slot
    HOST = "host"  # all of its host


class DiscoverySpec(NamedTuple):
    """Where to find the hosts of a job while it runs."""

    option: str  # as it is typed, for messages
    source: str  # a shell command that prints hosts, or the path of a host file
    is_file: bool
    slots: int = SLOTS_OPEN  # of a host that has no number of its own
    num_each: int | None = None  # ranks of each host; None for one a slot
    ssh_port: int = 0  # of other hosts that have none of their own
    is_local: bool = False  # hosts must be this machine


class ElasticOptions(NamedTuple):
    """The limits within which ranks come and go."""

    min_ranks: int  # with fewer the job waits, for ``elastic_timeout_s``
    max_ranks: int  # or ``NO_LIMIT``
    spares: int = 0  # further processes that wait to take a lost rank's place
    discovery: DiscoverySpec | None = None  # None where the hosts are fixed
    discover_every_s: float = 1.0
    failure_domain: FailureDomain = FailureDomain.SLOT
    awaits_joining: bool = False  # ranks stand still while others start
    # how long a slot or host that failed is left out: the first time, and at most
    cooldown_s: tuple[float, float] = (30.0, 3600.0)
    elastic_timeout_s: float = 600.0
    reform_timeout_s: float = 30.0  # what a rank has to settle when a view ends
    reset_limit: int | None = None  # how many changes may be; None for any number
    # where notice of a host's end comes from; signal always counts
    notice: tuple[str, ...] = ("signal",)

    @property
    def num_processes(self) -> int | None:
        """The most ranks and spares at a time; None for any number."""
        is_open = self.max_ranks == NO_LIMIT
        return None if is_open else self.max_ranks + self.spares
