"""What one user's processes on several hosts know, and no other user does.

Where MUNGE runs, as with Slurm, a rank makes a random key and has MUNGE write it so
that only processes of its own user can read it. Else all use a file in the user's home,
which must be the same on all hosts then.
"""

import ctypes
import hmac
import os
import secrets
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ronde.errors import StoreError, UsageError
from ronde.store.authentication import Offer, ProvenConnection

_GIVEN, _MUNGE, _FILE = 1, 2, 3
_KEY_BYTES = 32
_UID_RESTRICTION = 9  # source: munge.h, ``MUNGE_OPT_UID_RESTRICTION``


class Trust(Protocol):
    """Both sides' view of who is of a job."""

    def offers(self) -> list[Offer]:
        """Return what a rank may show, the best first."""
        ...

    def find_key(self, kind: int, credential: bytes) -> bytes | None:
        """Return the key that an offer stands for, or None."""
        ...


class SharedKey:
    """Trusts whoever has a key that all ranks were given."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def offers(self) -> list[Offer]:
        """See ``Trust``."""
        return [Offer(_GIVEN, b"", self._key)]

    def find_key(self, kind: int, credential: bytes) -> bytes | None:
        """See ``Trust``."""
        return self._key if kind == _GIVEN and not credential else None


class SameUser:
    """Trusts this user's processes on all hosts of a job.

    Args:
        directory: The user's, for the secret file; made where it is needed.
    """

    def __init__(self, job: str, directory: Path) -> None:
        self._job = job.encode()
        self._directory = directory
        self._munge = _Munge.load()

    def offers(self) -> list[Offer]:
        """See ``Trust``.

        Raises:
            UsageError: There is no MUNGE, and the file cannot be used.
        """
        key = secrets.token_bytes(_KEY_BYTES)
        # One that was read once on a host is not read again: each is for one try.
        credential = self._munge.encode(key + self._job) if self._munge else None
        if credential is None:
            return [Offer(_FILE, b"", self._file_key())]
        offers = [Offer(_MUNGE, credential, key)]
        with suppress(UsageError):
            offers.append(Offer(_FILE, b"", self._file_key()))
        return offers

    def find_key(self, kind: int, credential: bytes) -> bytes | None:
        """See ``Trust``."""
        if kind == _FILE:
            with suppress(UsageError):
                return self._file_key()
        if kind != _MUNGE or self._munge is None:
            return None
        said = self._munge.decode(credential) or b""
        is_ours = hmac.compare_digest(said[_KEY_BYTES:], self._job)
        return said[:_KEY_BYTES] if is_ours else None

    def _file_key(self) -> bytes:
        secret = read_secret(self._directory / "secret")
        return hmac.digest(secret, b"ronde job " + self._job, "sha256")


def dial_network(
    address: str, port: int, trust: Trust, timeout_s: float
) -> ProvenConnection:
    """Return a connection to the store at an address, if it is of this job.

    Raises:
        StoreError: Who answers there is not.
        OSError: Nobody answers.
        UsageError: There is nothing to show.
    """
    problem: OSError | StoreError | None = None
    sock: socket.socket | None = socket.create_connection((address, port), timeout_s)
    for offer in trust.offers():
        sock = sock or socket.create_connection((address, port), timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            return ProvenConnection(sock, offer, timeout_s)
        except (OSError, StoreError) as error:
            problem, sock = error, None
    raise problem or StoreError("a job must have something to be known by.")


def read_secret(path: Path) -> bytes:
    """Return the user's secret, made now if there is none."""
    try:
        if not path.exists():
            _make_secret(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(
            f"{path} must be a file that can be made and read, as MUNGE does not "
            f"answer, but: {error.strerror}. Set XDG_CONFIG_HOME to a directory that "
            "all hosts share, or start the ranks with ronde run."
        ) from error
    try:
        found = os.fstat(descriptor)
        is_file = stat.S_ISREG(found.st_mode)
        content = os.read(descriptor, 4096).strip() if is_file else b""
    finally:
        os.close(descriptor)
    is_private = is_file and not found.st_mode & 0o077
    if not is_private or found.st_uid != os.geteuid() or len(content) < _KEY_BYTES:
        raise UsageError(
            f"{path} must be a file of user {os.geteuid()} with mode 600 and at least "
            f"{_KEY_BYTES} characters, got owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):o} and {len(content)}. Remove it: a new one "
            "is made."
        )
    return content


def _make_secret(path: Path) -> None:
    """Make the file, whole; another process that is quicker wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(draft, flags, 0o600), "w") as file:
        file.write(secrets.token_hex(_KEY_BYTES) + "\n")
    try:
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


class _Munge:
    """MUNGE's library, as far as it is needed here."""

    def __init__(self, library: Any) -> None:  # noqa: ANN401  ctypes'
        library.munge_ctx_create.restype = ctypes.c_void_p
        self._library = library
        self._free: Any = ctypes.CDLL(None).free

    @classmethod
    def load(cls) -> "_Munge | None":
        """Return it where it is installed."""
        try:
            return cls(ctypes.CDLL("libmunge.so.2"))
        except OSError:
            return None

    def encode(self, payload: bytes) -> bytes | None:
        """Return a credential that only this user's processes can read, or None."""
        credential = ctypes.c_void_p()
        context = ctypes.c_void_p(self._library.munge_ctx_create())
        user = ctypes.c_int(os.geteuid())
        self._library.munge_ctx_set(context, _UID_RESTRICTION, user)
        code = self._library.munge_encode(
            ctypes.byref(credential), context, payload, len(payload)
        )
        try:
            return ctypes.string_at(credential.value or 0) if code == 0 else None
        finally:
            self._free(credential)
            self._library.munge_ctx_destroy(context)

    def decode(self, credential: bytes) -> bytes | None:
        """Return what a process of this user's has encoded, once; else None."""
        payload, length = ctypes.c_void_p(), ctypes.c_int()
        user, group = ctypes.c_uint(), ctypes.c_uint()
        code = self._library.munge_decode(
            credential,
            None,
            ctypes.byref(payload),
            ctypes.byref(length),
            ctypes.byref(user),
            ctypes.byref(group),
        )
        try:
            if code != 0 or user.value != os.geteuid() or not payload.value:
                return None
            return ctypes.string_at(payload.value, length.value)
        finally:
            self._free(payload)
