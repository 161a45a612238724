"""What an engine is asked for, and where its ranks meet."""

from dataclasses import dataclass, replace

from torch.distributed import PrefixStore, Store

from ronde.collectives.rendezvous import meet
from ronde.world.value import RankInfo

_MEETING_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What an engine is asked for.

    Attributes:
        claim: This rank's place; ``size`` is at least 2.
        timeout_s: How long a collective may wait for another rank.
        algorithm: Name of a schedule, or empty.
        store: Where the ranks meet; None for the place that the claim names.
        ranks: Which of the job's ranks they are; empty for all.
    """

    claim: RankInfo
    timeout_s: float
    algorithm: str = ""
    store: Store | None = None
    ranks: tuple[int, ...] = ()

    def meet(self) -> Store:
        """Return a store that all ranks share, empty under the keys used here."""
        if self.store is not None:
            return self.store
        return meet(self.claim, min(self.timeout_s, _MEETING_TIMEOUT_S))

    def at(self, store: Store, name: str) -> "Asked":
        """Return the same, to meet under a name in a store."""
        return replace(self, store=PrefixStore(name, store))
