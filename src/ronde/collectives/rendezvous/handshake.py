"""How ranks that have to find rank 0 by trying make sure that all are of one start."""

import secrets
from datetime import timedelta

from ronde.collectives.store import JobStore
from ronde.errors import CollectiveError, StoreError
from ronde.world.rank_info import RankInfo

_NUM_NAMED = 8


def join(store: JobStore, claim: RankInfo) -> bool:
    """Take this rank's place in a store; False if another process has it.

    That is then the store of a program that the same launcher has started before, and
    whose rank 0 has not ended yet.
    """
    own = secrets.token_hex(8).encode()
    return store.compare_set(_place(claim.rank), b"", own) == own


def await_all(store: JobStore, claim: RankInfo, timeout_s: float) -> None:
    """Wait until all ranks have taken their places; on rank 0.

    Raises:
        CollectiveError: They did not come in time; those that are absent are named.
    """
    places = [_place(rank) for rank in range(claim.size)]
    try:
        store.wait(places, timedelta(seconds=timeout_s))
    except StoreError as error:
        absent = [rank for rank, key in enumerate(places) if not store.check([key])]
        raise CollectiveError(
            f"{claim.size} ranks must meet within {timeout_s:g} s, got no word from "
            f"ranks {absent[:_NUM_NAMED]} ({len(absent)} in all). See whether they "
            "started; if they run elsewhere, set MASTER_ADDR and MASTER_PORT."
        ) from error


def _place(rank: int) -> str:
    return f"ronde/place/{rank}"
