"""What a rank needs to connect with some of the others of its job, again and again."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from torch.distributed import PrefixStore, Store

from ronde.collectives.asked import Asked
from ronde.collectives.communicator import Communicator
from ronde.collectives.connection import DEFAULT_TIMEOUT_S, ENGINES, ask
from ronde.collectives.engines.solo import SoloCommunicator
from ronde.world.value import RankInfo


class Connections:
    """Makes communicators of all ranks of a job, and of some of them.

    Attributes:
        claim: This rank's place among all.
    """

    def __init__(
        self,
        claim: RankInfo,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        engine: str = "",
        algorithm: str = "",
    ) -> None:
        """Meet the other ranks; collective.

        Args:
            claim: This rank's place among all.
            timeout_s: How long any collective may wait for another rank.
            engine: See ``connect``.
            algorithm: See ``connect``.
        """
        self.claim = claim
        self._engine, asked = ask(
            claim, timeout_s=timeout_s, engine=engine, algorithm=algorithm
        )
        self._store = asked.meet() if claim.size > 1 else None
        self._asked = asked

    def connect(
        self, name: str, ranks: Sequence[int], hosts: Sequence[str] = ()
    ) -> Communicator:
        """Connect these ranks; collective over them.

        Args:
            name: Equal on all of them and used once.
            ranks: Ascending; this one is among them.
            hosts: The host of every rank of the job, where it is known.

        Returns:
            A communicator in which ``ranks[i]`` is rank i.
        """
        if len(ranks) == 1:
            return SoloCommunicator()
        return ENGINES[self._engine](self._asked_for(name, ranks, hosts))

    def apart(self) -> "Connections":
        """Return the same with a connection to the store of its own.

        Whoever waits in a store keeps all others off it that have the same connection:
        this is for threads that connect different ranks at the same time.
        """
        other = copy(self)
        if self._store is not None:
            store: Any = self._store  # torch's stub does not know clone()
            other._store = store.clone()  # noqa: SLF001  another of this class
        return other

    def store(self, name: str) -> Store | None:
        """Return a store that all ranks share under a name; None for a world of one."""
        return None if self._store is None else PrefixStore(name, self._store)

    def _asked_for(
        self, name: str, ranks: Sequence[int], hosts: Sequence[str]
    ) -> Asked:
        claim = self.claim
        is_part = len(ranks) < claim.size
        if is_part:
            here = {hosts[claim.rank]} if hosts else set[str]()
            local = [r for r in ranks if hosts and hosts[r] in here]
            is_one_host = claim.local_size == claim.size or len(local) == len(ranks)
            claim = replace(
                claim,
                rank=list(ranks).index(claim.rank),
                size=len(ranks),
                local_size=len(ranks) if is_one_host else max(len(local), 1),
            )
        some = tuple(ranks) if is_part else ()
        return replace(self._asked, claim=claim, store=self.store(name), ranks=some)
