"""Wait for other ranks: civilly, and not for ones that are gone."""

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ronde.collectives.engine import Look
from ronde.collectives.engines.shared_memory.contention import CONTENTION
from ronde.collectives.engines.shared_memory.futex import sleep_while
from ronde.collectives.engines.shared_memory.peers import Peers
from ronde.collectives.engines.shared_memory.words import Header, Places
from ronde.errors import CollectiveError, PeerLostError

_NUM_YIELDS = 100
_FIRST_NAP_S = 0.001
_LAST_NAP_S = 0.05
_LOOK_EVERY_S = 0.25
"""Between two looks at whether the ranks that are waited for still live."""


STOPPED = CollectiveError("stopped")
"""What ``Patience.wait`` returns where nothing failed, but ``look`` said to stop."""


class Lag(NamedTuple):
    """A word that must change before this rank can go on.

    Attributes:
        rank: Whose word it is.
        place: Which one.
        value: What it holds.
        wanted: What it must be at least.
    """

    rank: int
    place: int
    value: int
    wanted: int


class Waited(Protocol):
    """What a thread can wait for."""

    name: str
    is_over: bool

    def find_lag(self) -> Lag | None:
        """Return a word that must change first, or None."""
        ...


class Patience:
    """How one rank waits for the others.

    Args:
        headers: All ranks' words.
        rank: This process.
        peers: All ranks' processes.
        timeout_s: How long to wait for any of them.
    """

    def __init__(
        self, headers: Sequence[Header], rank: int, peers: Peers, timeout_s: float
    ) -> None:
        self._headers = headers
        self._rank = rank
        self._peers = peers
        self._timeout_s = timeout_s

    def wait(self, waited: Waited, look: Look | None = None) -> CollectiveError | None:
        """Return when something may have changed for ``waited``.

        Let others run for a while, then sleep.

        Args:
            waited: What this thread waits for.
            look: Called from time to time; may say to stop.

        Returns:
            What to give up with; STOPPED; None where there is no reason to.
        """
        for _ in range(CONTENTION.num_looks(_NUM_YIELDS)):
            if waited.is_over or waited.find_lag() is None:
                return None
            if not CONTENTION.pause():
                break
        return self._sleep(waited, look)

    def _sleep(self, waited: Waited, look: Look | None) -> CollectiveError | None:
        now = time.monotonic()
        deadline, look_at = now + self._timeout_s, now + _LOOK_EVERY_S
        nap_s = _FIRST_NAP_S
        error = None
        while not waited.is_over and error is None:
            lag = waited.find_lag()
            if lag is None:
                break
            pause_s = nap_s if look is None else look()
            if pause_s is None:
                return STOPPED
            self._nap(lag, min(nap_s, pause_s))
            nap_s = min(2 * nap_s, _LAST_NAP_S)
            now = time.monotonic()
            if now >= look_at or self._headers[lag.rank].words[Places.is_closed]:
                look_at = now + _LOOK_EVERY_S
                error = self._look(waited, is_late=now >= deadline)
        return error

    def _nap(self, lag: Lag, nap_s: float) -> None:
        """Sleep until a word changes; if it does not, have its rank look."""
        header = self._headers[lag.rank]
        header.fall_asleep(self._rank)
        # The kernel looks at the word once more: see Note [Memory order].
        sleep_while(header.address + 8 * lag.place, lag.value, nap_s)
        header.wake_up(self._rank)
        if header.words[lag.place] == lag.value:
            header.ring()

    def _look(self, waited: Waited, *, is_late: bool) -> CollectiveError | None:
        """Return an error where a rank that is waited for is gone, or late."""
        lag = waited.find_lag()
        if lag is None:
            return None
        absent = self._absent(lag)
        losses = [loss for rank in absent if (loss := self._find_loss(rank))]
        # What a rank did just before it went may be all that was waited for.
        if (losses or is_late) and waited.find_lag() is None:
            return None
        place = f"{waited.name} on rank {self._rank} of {len(self._headers)}"
        if losses:
            return PeerLostError(
                f"{place} needs every rank, but one is gone ({losses[0]}). Its own "
                "error says why."
            )
        if is_late:
            return CollectiveError(
                f"{place} must complete within timeout_s, got no answer for "
                f"{self._timeout_s:g} s from ranks {absent[:8]}. See which rank hangs "
                "or makes other calls, or give a longer timeout_s."
            )
        return None

    def _absent(self, lag: Lag) -> list[int]:
        """Return all ranks that are waited for."""
        if lag.place != Places.progress:
            return [lag.rank]
        return [
            rank
            for rank, header in enumerate(self._headers)
            if header.words[Places.progress] < lag.wanted
        ]

    def _find_loss(self, rank: int) -> str:
        if self._headers[rank].words[Places.is_closed]:
            return f"rank {rank} closed its communicator"
        return self._peers.find_loss(rank)
