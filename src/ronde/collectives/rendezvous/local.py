"""How ranks of one host find rank 0 where no launcher of ours answers for a store.

Rank 0 answers on a unix socket in a directory that only this user can enter. The
socket's name comes from the process that launched the ranks, so jobs do not mix.
"""

import atexit
import hashlib
import os
import secrets
import time
from pathlib import Path

from ronde.collectives.rendezvous.handshake import await_all, join
from ronde.collectives.rendezvous.launcher_process import find_launcher
from ronde.collectives.store import JobStore, store_at
from ronde.errors import CollectiveError
from ronde.store.local_socket import (
    dial,
    listen,
    own_directories,
    remove,
    remove_stale,
    temporary_directory,
)
from ronde.store.protocol import max_connections
from ronde.store.server import StoreServer, serve_locally
from ronde.world.environment import boot_identity
from ronde.world.rank_info import RankInfo

_POLL_S = 0.02
_SOCKET = "ronde/socket"


def meet_on_host(claim: RankInfo, timeout_s: float) -> JobStore:
    """Return a store that all ranks of ``claim`` on this host share.

    Args:
        claim: This rank's place; all ranks are on this host.
        timeout_s: How long to wait for the others.

    Raises:
        CollectiveError: The others did not come in time.
    """
    name = meeting_name(claim)
    if claim.rank == 0:
        return _host(claim, name, timeout_s)
    ends_at = time.monotonic() + timeout_s
    while time.monotonic() < ends_at:
        for directory in own_directories(_prefix()):
            store = _enter(str(directory / name), claim, timeout_s)
            if store is not None:
                return store
        time.sleep(_POLL_S)
    raise CollectiveError(
        f"rank 0 must answer on this host within {timeout_s:g} s, but did not answer "
        f"rank {claim.rank} in {temporary_directory()}. See whether it started on this "
        "host; if it runs elsewhere, set MASTER_ADDR and MASTER_PORT on all ranks."
    )


def meeting_name(claim: RankInfo) -> str:
    """Name the socket after the launcher's process, which all ranks descend from."""
    launcher = find_launcher(claim)
    identity = f"{boot_identity()} {launcher.pid} {launcher.started_at} {claim.job_id}"
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def _prefix() -> str:
    """Return how directories begin that rank 0 may have made.

    Others may have taken any name that can be guessed. So all have a random end, and
    ranks look into all that are their user's.
    """
    return f"ronde-ranks-{os.geteuid()}-"


def _enter(path: str, claim: RankInfo, timeout_s: float) -> JobStore | None:
    """Join the store behind a socket; None where there is none, or another's."""
    try:
        dial(path, timeout_s).close()
    except OSError:
        return None
    store = store_at(path, timeout_s)
    if not join(store, claim):
        return None
    # The name that ranks look for may soon be another start's.
    return store_at(store.get(_SOCKET).decode(), timeout_s)


def _host(claim: RankInfo, name: str, timeout_s: float) -> JobStore:
    """Answer for a store until this process ends; wait until all have joined."""
    for stale in own_directories(_prefix()):
        if remove_stale(stale):
            remove(stale)
    end = secrets.token_hex(8)
    directory = temporary_directory() / f"{_prefix()}{end}"
    directory.mkdir(mode=0o700)
    server = serve_locally(listen(directory / end), max_connections(claim.size))
    atexit.register(_end, os.getpid(), server, directory)
    store = store_at(str(directory / end), timeout_s)
    store.set(_SOCKET, str(directory / end))
    join(store, claim)
    # For ranks to find, until all have come.
    (directory / name).hardlink_to(directory / end)
    try:
        await_all(store, claim, timeout_s)
    finally:
        (directory / name).unlink(missing_ok=True)
    return store


def _end(pid: int, server: StoreServer, directory: Path) -> None:
    """Take the socket away at the end of rank 0, and not of a process it has forked."""
    if os.getpid() == pid:
        remove(directory)
        server.close()
