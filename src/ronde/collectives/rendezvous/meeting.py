"""Where the ranks of a claim meet: in the launcher's store, rank 0's, or torch's."""

import functools
import itertools
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore

from ronde.collectives.error_context import ErrorContext
from ronde.collectives.rendezvous.local import meet_on_host
from ronde.collectives.rendezvous.mpi import meet_by_mpi
from ronde.collectives.rendezvous.slurm import meet_in_step
from ronde.collectives.store import store_at, store_beyond
from ronde.errors import CollectiveError, WorldError
from ronde.store.authentication import SharedKey
from ronde.world.rank_info import Launcher, Meeting, RankInfo

_calls = itertools.count()


def meet(claim: RankInfo, timeout_s: float) -> Store:
    """Return a store that all ranks of ``claim`` share, empty under the keys used here.

    Collective: the n-th call of one rank meets the n-th call of all others.

    Args:
        claim: This rank's place; ``size`` is at least 2.
        timeout_s: How long to wait for the others.

    Raises:
        WorldError: The ranks are on several hosts, and nobody said where to meet nor
            helps to find it out.
        CollectiveError: The others did not come in time, or the port is in use.
    """
    with ErrorContext("meeting", claim.rank, claim.size, timeout_s).guard():
        store = _store_of(claim, timeout_s)
    attempt = claim.meeting.attempt if claim.meeting else 0
    return PrefixStore(f"ronde/{claim.job_id}/{attempt}/{next(_calls)}", store)


@functools.cache
def _store_of(claim: RankInfo, timeout_s: float) -> Store:
    """Open the store of a claim, once in a process.

    It stays open: a rank that meets again must not find the last server still closing.
    """
    if claim.store:
        return _open_launchers(claim, timeout_s)
    if claim.meeting is not None:
        return _open_at(claim.meeting, claim.rank, timeout_s)
    if claim.local_size == claim.size:
        return meet_on_host(claim, timeout_s)
    if claim.launcher is Launcher.SLURM:
        return meet_in_step(claim, timeout_s)
    if claim.launcher in (Launcher.OPEN_MPI, Launcher.PMI):
        return meet_by_mpi(claim, timeout_s)
    raise WorldError(
        f"MASTER_ADDR and MASTER_PORT must be set where {claim.size} ranks run on "
        f"several hosts, got neither from {claim.launcher}. Set them on all ranks, to "
        "rank 0's host and to a free port there."
    )


def _open_launchers(claim: RankInfo, timeout_s: float) -> Store:
    """Open what the launcher answers for: a socket here, or a port that wants a key."""
    place, _, key_file = claim.store.partition(" ")
    if not key_file:
        is_spread = claim.local_size < claim.size
        address = claim.meeting.address if is_spread and claim.meeting else ""
        return store_at(place, timeout_s, address)
    host, _, port = place.rpartition(":")
    trust = SharedKey(Path(key_file).read_bytes())
    return store_beyond(host, int(port), trust, timeout_s)


def _open_at(meeting: Meeting, rank: int, timeout_s: float) -> Store:
    is_master = rank == 0 and not meeting.is_hosted
    try:
        return TCPStore(
            meeting.address,
            meeting.port,
            is_master=is_master,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            # The program's own init_process_group() may share the server.
            multi_tenant=True,
        )
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise CollectiveError(
            f"MASTER_PORT must be free on rank 0's host, got {meeting.port}, which "
            "another process listens on. Choose another port for all ranks."
        ) from error
