"""How a rank and the store on another host prove that they are of one job.

The key is one that all ranks were given. Without one, where MUNGE runs, as with Slurm,
a rank makes a random key and MUNGE encodes it so that only processes of its own user
can read it. Else the key is in a file in the user's home, shared by all hosts.

Note [What is proven on a network]
    A peer without the key receives a random number and nothing else::

        store -> rank   magic, store's nonce
        rank -> store   rank's nonce, credential or nothing, proof as "rank"
        store -> rank   proof as "store"

    A proof is HMAC-SHA256 of the role and both nonces. Every later frame ends with one
    of its direction, number and body, with keys made of the same nonces: it cannot be
    changed, repeated, dropped or moved unnoticed. A man in the middle can only cut the
    connection. Nothing is encrypted: keys and values are addresses, no secrets.
"""

import ctypes
import hmac
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ronde.errors import StoreError, UsageError
from ronde.store.client import PlainConnection, receive
from ronde.store.protocol import Splitter, decode, encode

MAGIC = b"ronde store 1\r\n\0"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_KEY_BYTES = 32
_MAX_HELLO_BYTES = 8 << 10
_UID_RESTRICTION = 9  # source: munge.h, ``MUNGE_OPT_UID_RESTRICTION``


class Offer(NamedTuple):
    """What a rank shows when it connects."""

    credential: bytes  # MUNGE's, which holds the key; empty where the store has it
    key: bytes  # at least 128 bits that no other user knows


class Seal:
    """Marks what one side sends, and checks the marks, in order."""

    def __init__(self, key: bytes, role: bytes, nonces: bytes) -> None:
        self._key = _proof(key, b"from " + role, nonces)
        self._number = 0

    def mark(self, frame: bytes) -> bytes:
        """Return a frame with its mark."""
        body = frame[4:]
        length = len(body) + _PROOF_BYTES
        return length.to_bytes(4, "big") + body + self._next(body)

    def check(self, marked: bytes) -> bytes:
        """Return the body of a frame."""
        body, mark = marked[:-_PROOF_BYTES], marked[-_PROOF_BYTES:]
        if not hmac.compare_digest(mark, self._next(body)):
            raise StoreError("a message on the store's connection was changed.")
        return body

    def _next(self, body: bytes) -> bytes:
        self._number += 1
        number = self._number.to_bytes(8, "big")
        return hmac.digest(self._key, number + body, "sha256")


class ServerSession:
    """The store's side of a connection.

    ``find_key`` returns the key that a credential stands for, or None; without it the
    kernel has named the peer, and nothing is to be proven.
    """

    def __init__(self, find_key: Callable[[bytes], bytes | None] | None = None) -> None:
        self.is_trusted = find_key is None  # its requests may be carried out
        self.unsent = bytearray()
        self._find_key = find_key
        self._seals: tuple[Seal, Seal] | None = None
        self._splitter = Splitter()
        if find_key is not None:
            self._splitter = Splitter(_MAX_HELLO_BYTES)
            self._nonce = secrets.token_bytes(_NONCE_BYTES)
            self.unsent += MAGIC + self._nonce

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies of the requests that have come; raise for a stranger."""
        bodies = self._splitter.feed(data)
        if bodies and not self.is_trusted:
            self._admit(bodies.pop(0))
        return [self._seals[0].check(b) for b in bodies] if self._seals else bodies

    def send(self, frame: bytes) -> None:
        self.unsent += self._seals[1].mark(frame) if self._seals else frame

    def _admit(self, hello: bytes) -> None:
        fields = decode(hello).fields
        if len(fields) != 3 or len(fields[0]) != _NONCE_BYTES:
            raise StoreError("a rank must show a nonce, a credential and a proof.")
        nonce, credential, proof = fields
        key = self._find_key and self._find_key(credential)
        nonces = self._nonce + nonce
        if not key or not hmac.compare_digest(proof, _proof(key, b"rank", nonces)):
            raise StoreError("the peer does not belong to this job.")
        self.is_trusted = True
        self._splitter = Splitter()
        self.unsent += encode(0, [_proof(key, b"store", nonces)])
        self._seals = Seal(key, b"rank", nonces), Seal(key, b"store", nonces)


class ProvenConnection(PlainConnection):
    """A rank's side of a connection."""

    def __init__(self, sock: socket.socket, offer: Offer, timeout_s: float) -> None:
        super().__init__(sock)
        nonces = _prove(sock, offer, time.monotonic() + timeout_s)
        self._sent = Seal(offer.key, b"rank", nonces)
        self._received = Seal(offer.key, b"store", nonces)

    def ask(self, frame: bytes, timeout_s: float) -> bytes:
        return self._received.check(super().ask(self._sent.mark(frame), timeout_s))


def _prove(sock: socket.socket, offer: Offer, due_s: float) -> bytes:
    """Send an offer and check that the store knows the key; return the nonces."""
    greeting = receive(sock, len(MAGIC) + _NONCE_BYTES, due_s)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    nonces = greeting[len(MAGIC) :] + nonce
    if greeting.startswith(MAGIC):
        proof = _proof(offer.key, b"rank", nonces)
        sock.sendall(encode(0, [nonce, offer.credential, proof]))
        expected = encode(0, [_proof(offer.key, b"store", nonces)])
        if hmac.compare_digest(receive(sock, len(expected), due_s), expected):
            return nonces
    raise StoreError("the peer at this address is not the store of this job.")


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, b"ronde store " + role + b"\0" + nonces, "sha256")


class SharedKey:
    """Trusts every peer that has a key which all ranks were given."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def offers(self) -> list[Offer]:
        return [Offer(b"", self._key)]

    def find_key(self, credential: bytes) -> bytes | None:
        return None if credential else self._key


class SameUser:
    """Trusts this user's processes on all hosts of a job, by a file in a directory."""

    def __init__(self, job: str, directory: Path) -> None:
        self._job = job.encode()
        self._directory = directory
        self._munge: _Munge | None = None
        with suppress(OSError):  # it is not installed
            self._munge = _Munge()

    def offers(self) -> list[Offer]:
        """Return what a rank may show, the best first."""
        key = secrets.token_bytes(_KEY_BYTES)
        # One that was read once on a host is not read again: each is for one try.
        credential = self._munge and self._munge.encode(key + self._job)
        if credential is None:
            return [Offer(b"", self._file_key())]
        offers = [Offer(credential, key)]
        with suppress(UsageError):
            offers.append(Offer(b"", self._file_key()))
        return offers

    def find_key(self, credential: bytes) -> bytes | None:
        if not credential:
            with suppress(UsageError):
                return self._file_key()
        payload = self._munge.decode(credential) if self._munge else b""
        is_ours = hmac.compare_digest(payload[_KEY_BYTES:], self._job)
        return payload[:_KEY_BYTES] if is_ours else None

    def _file_key(self) -> bytes:
        secret = read_secret(self._directory / "secret")
        return hmac.digest(secret, b"ronde job " + self._job, "sha256")


Trust = SharedKey | SameUser


def dial_network(
    address: str, port: int, trust: Trust, timeout_s: float
) -> ProvenConnection:
    """Dial the store; ``StoreError`` for another job's, ``OSError`` for none."""
    problem: OSError | StoreError | None = None
    sock: socket.socket | None = socket.create_connection((address, port), timeout_s)
    for offer in trust.offers():
        sock = sock or socket.create_connection((address, port), timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            return ProvenConnection(sock, offer, timeout_s)
        except (OSError, StoreError) as error:
            sock.close()
            problem, sock = error, None
    raise problem or AssertionError("there is always an offer")


def read_secret(path: Path) -> bytes:
    """Return the user's secret, made now if there is none."""
    try:
        if not path.exists():
            _make_secret(path)
        with open(path, "rb", opener=_open_own) as file:
            found = os.fstat(file.fileno())
            is_file = stat.S_ISREG(found.st_mode)
            content = file.read(4096).strip() if is_file else b""
    except OSError as error:
        raise UsageError(
            f"{path} must be a file that can be made and read, as MUNGE does not "
            f"answer, but: {error.strerror}. Set XDG_CONFIG_HOME to a directory that "
            "all hosts share, or start the ranks with ronde run."
        ) from error
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
    with open(draft, "x", opener=_open_own) as file:
        file.write(secrets.token_hex(_KEY_BYTES) + "\n")
    try:
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _open_own(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


class _Munge:
    """MUNGE's library, as far as it is needed here."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL("libmunge.so.2")
        self._library.munge_ctx_create.restype = ctypes.c_void_p
        self._free: Any = ctypes.CDLL(None).free

    def encode(self, payload: bytes) -> bytes | None:
        """Return a credential that only this user's processes can read, or None."""
        library, found = self._library, ctypes.c_void_p()
        context = ctypes.c_void_p(library.munge_ctx_create())
        library.munge_ctx_set(context, _UID_RESTRICTION, ctypes.c_int(os.geteuid()))
        library.munge_encode(ctypes.byref(found), context, payload, len(payload))
        library.munge_ctx_destroy(context)
        credential = ctypes.string_at(found.value) if found.value else None
        self._free(found)
        return credential

    def decode(self, credential: bytes) -> bytes:
        """Return what a process of this user's has encoded, once; else nothing."""
        payload, length = ctypes.c_void_p(), ctypes.c_int()
        user, group = ctypes.c_uint(), ctypes.c_uint()
        places = map(ctypes.byref, (payload, length, user, group))
        code = self._library.munge_decode(credential, None, *places)
        is_own = code == 0 and user.value == os.geteuid() and payload.value
        content = ctypes.string_at(payload.value or 0, length.value) if is_own else b""
        self._free(payload)
        return content
