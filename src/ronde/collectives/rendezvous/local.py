"""How ranks of one host find rank 0 where no launcher of ours answers for a store.

Rank 0 answers on a unix socket in a directory that only this user can enter. The
socket's name comes from the process that launched the ranks, so jobs do not mix.
"""

import atexit
import errno
import hashlib
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ronde.collectives.ancestry import find_launcher
from ronde.collectives.rendezvous.handshake import await_all, join
from ronde.collectives.store import JobStore, store_at
from ronde.errors import CollectiveError
from ronde.store.local_socket import dial, listen, temporary_directory
from ronde.store.protocol import max_connections
from ronde.store.server import StoreServer, serve_locally
from ronde.world.machine import boot_identity
from ronde.world.value import Claim

_POLL_S = 0.02
_SOCKET = "ronde/socket"


def meet_on_host(claim: Claim, timeout_s: float) -> JobStore:
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
        for directory in private_directories():
            store = _enter(str(directory / name), claim, timeout_s)
            if store is not None:
                return store
        time.sleep(_POLL_S)
    raise CollectiveError(
        f"rank 0 must answer on this host within {timeout_s:g} s, but did not answer "
        f"rank {claim.rank} in {temporary_directory()}. See whether it started on this "
        "host; if it runs elsewhere, set MASTER_ADDR and MASTER_PORT on all ranks."
    )


def meeting_name(claim: Claim) -> str:
    """Name the socket after the launcher's process, which all ranks descend from."""
    launcher = find_launcher(claim)
    identity = f"{boot_identity()} {launcher.pid} {launcher.started_at} {claim.job_id}"
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def private_directories() -> Iterator[Path]:
    """Yield this user's directories for sockets.

    Others may have taken the first name, and any further one that can be guessed. So
    there may be one with a random end, and all ranks look into all that are their own.
    """
    prefix = f"ronde-{os.geteuid()}"
    for entry in os.scandir(temporary_directory()):
        if entry.name == prefix or entry.name.startswith(f"{prefix}."):
            found = entry.stat(follow_symlinks=False)
            is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
            if is_private and found.st_uid == os.geteuid():
                yield Path(entry.path)


def _enter(path: str, claim: Claim, timeout_s: float) -> JobStore | None:
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


def _host(claim: Claim, name: str, timeout_s: float) -> JobStore:
    """Answer for a store until this process ends; wait until all have joined."""
    directory = next(private_directories(), None) or _make_directory()
    _remove_stale(directory)
    draft, own = directory / f".{secrets.token_hex(8)}", secrets.token_hex(16)
    server = serve_locally(listen(draft), max_connections(claim.size))
    atexit.register(_end, os.getpid(), server, directory / own)
    # It listens already when it appears; the second name is for ranks to find.
    draft.rename(directory / own)
    store = store_at(str(directory / own), timeout_s)
    store.set(_SOCKET, str(directory / own))
    join(store, claim)
    draft.hardlink_to(directory / own)
    draft.rename(directory / name)
    try:
        await_all(store, claim, timeout_s)
    finally:
        (directory / name).unlink(missing_ok=True)
    return store


def _make_directory() -> Path:
    first = temporary_directory() / f"ronde-{os.geteuid()}"
    try:
        first.mkdir(mode=0o700)
    except FileExistsError:
        other = first.with_name(f"{first.name}.{secrets.token_hex(8)}")
        other.mkdir(mode=0o700)
        return other
    return first


def _remove_stale(directory: Path) -> None:
    """Remove the sockets of jobs that were killed: nobody listens there."""
    for path in directory.glob("[!.]*"):
        with socket.socket(socket.AF_UNIX) as sock, suppress(OSError):
            sock.setblocking(False)  # noqa: FBT003  the socket's own method
            if sock.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()


def _end(pid: int, server: StoreServer, path: Path) -> None:
    """Take the socket away at the end of rank 0, and not of a process it has forked."""
    if os.getpid() == pid:
        path.unlink(missing_ok=True)
        server.close()
