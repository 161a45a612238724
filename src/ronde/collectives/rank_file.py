"""How ranks of one host find rank 0 where the launcher names no port: through a file.

Rank 0 listens on a free port of the loopback and writes port and a random token into a
file that only this user can read. The file's name comes from the process that launched
the ranks, so jobs do not mix; a file that a killed job left behind names a port where
nobody knows its token.
"""

import hashlib
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import Store

from ronde.collectives.ancestry import find_launcher
from ronde.collectives.roll_call import answer_roll, call_roll
from ronde.errors import CollectiveError, WorldError
from ronde.world.machine import boot_identity
from ronde.world.value import Claim

_HOST = "127.0.0.1"
_POLL_S = 0.02


def meet_by_file(claim: Claim, timeout_s: float) -> Store:
    """Return a store that all ranks of ``claim`` on this host share.

    Args:
        claim: This rank's place; all ranks are on this host.
        timeout_s: How long to wait for the others.

    Raises:
        CollectiveError: The others did not come in time.
        WorldError: The directory for the file belongs to somebody else.
    """
    path = _directory() / _file_name(claim)
    if claim.rank == 0:
        return _host(claim, path, timeout_s)
    return _join(claim, path, timeout_s)


def _file_name(claim: Claim) -> str:
    """Name the file after the launcher's process, which all ranks descend from."""
    launcher = find_launcher(claim)
    identity = f"{boot_identity()} {launcher.pid} {launcher.started_at} {claim.job_id}"
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def _directory() -> Path:
    """Return a directory that only this user can enter, the same in all ranks."""
    user = os.getuid()
    runtime = Path(f"/run/user/{user}")
    is_usable = runtime.is_dir() and os.access(runtime, os.W_OK)
    parent = runtime if is_usable else Path(tempfile.gettempdir())
    directory = parent / f"ronde-{user}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if found.st_uid != user or not is_private:
        raise WorldError(
            f"{directory} must be a directory of user {user} with mode 700, got owner "
            f"{found.st_uid} and mode {stat.S_IMODE(found.st_mode):o}. Remove it, or "
            "set MASTER_ADDR and MASTER_PORT on all ranks."
        )
    return directory


def _host(claim: Claim, path: Path, timeout_s: float) -> Store:
    """Listen, publish the port and wait until all others have joined."""
    token = secrets.token_hex(16)
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        port = listener.getsockname()[1]
        with _published(path, f"{port} {token}"):
            return call_roll(listener, token, claim, timeout_s)


@contextmanager
def _published(path: Path, text: str) -> Generator[None]:
    """Keep a file with ``text`` at ``path``; it appears whole or not at all."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    draft.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _join(claim: Claim, path: Path, timeout_s: float) -> Store:
    """Wait for rank 0's file and connect to the port it names."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        store = _connect(path, claim.rank, timeout_s)
        if store is not None:
            return store
        time.sleep(_POLL_S)
    raise CollectiveError(
        f"rank 0 must write {path} within {timeout_s:g} s, got no file with a port "
        f"that answers on rank {claim.rank}. See whether rank 0 started on this host; "
        "if it runs elsewhere, set MASTER_ADDR and MASTER_PORT on all ranks."
    )


def _connect(path: Path, rank: int, timeout_s: float) -> Store | None:
    """Connect to what the file names; None where it is not there, or left behind."""
    try:
        port, token = path.read_text().split()
        return answer_roll(_HOST, int(port), token, rank, timeout_s)
    except (OSError, ValueError):
        return None
