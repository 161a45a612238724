"""Mutual authentication of two processes over a network, by a shared key.

Ranks authenticate to the job's store, and joining nodes to the head node. The store's
key is passed to all ranks, or derived from a file in the user's home, which must be the
same on all hosts.

Note [Mutual authentication]
    A peer without the key receives only a random number::

        server -> client   magic, server's nonce
        client -> server   client's nonce, claim, proof as "client"
        server -> client   proof as "server"

    A proof is HMAC-SHA256 of the role, the greeting, the client's nonce, its claim and,
    with TLS, the server's certificate. So it can be neither replayed nor reflected, and
    a man in the middle has another certificate. Since the client proves first, a false
    server gets a proof on which it can try keys; so a key has at least 128 bits. On a
    connection to the store every later frame ends with a MAC of its direction, number
    and body. So no frame can be changed, repeated, dropped or reordered unnoticed.
    Nothing is encrypted, as keys and values are addresses, not secrets. Joining nodes
    use TLS.
"""

import hmac
import os
import secrets
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ronde.errors import StoreError, UsageError
from ronde.store.client import PlainConnection, receive
from ronde.store.protocol import Splitter, decode, encode

MAGIC = b"ronde store 2\r\n\0"
NONCE_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
_PROOF_BYTES = 32
_KEY_BYTES = 32
_MAX_HELLO_BYTES = 8 << 10


class HandshakeData(NamedTuple):
    """The values that a proof covers, unique to one connection."""

    greeting: bytes  # the server's, with its nonce
    nonce: bytes  # the client's
    claim: bytes = b""  # the client's data
    certificate: bytes = b""  # the server's, as this side knows it, in DER


class SharedKey:
    """A secret of at least 128 bits, which does not appear in ``repr``."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def prove(self, role: bytes, handshake: HandshakeData) -> bytes:
        return hmac.digest(self._key, encode(0, (role, *handshake)), "sha256")

    def answer(
        self, greeting: bytes, claim: bytes = b"", certificate: bytes = b""
    ) -> tuple[HandshakeData, bytes, bytes]:
        """Return the handshake, the client's message, and the expected reply."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        handshake = HandshakeData(greeting, nonce, claim, certificate)
        hello = encode(0, (nonce, claim, self.prove(b"client", handshake)))
        return handshake, hello, encode(0, (self.prove(b"server", handshake),))


def user_key(job: str, directory: Path) -> SharedKey:
    """Return the key of a job, derived from this user's secret.

    The secret is in a file in ``directory``, which is created if it is missing. The
    secret must be the same on all hosts. Only this user's processes can read it.
    """
    secret = read_secret(directory / "secret")
    return SharedKey(hmac.digest(secret, b"ronde job " + job.encode(), "sha256"))


class FrameMac:
    """Authenticate the frames that are sent in one direction, in their order."""

    def __init__(self, key: SharedKey, role: bytes, handshake: HandshakeData) -> None:
        self._key = key.prove(b"from " + role, handshake)
        self._number = 0

    def sign(self, frame: bytes) -> bytes:
        length = len(frame) - 4 + _PROOF_BYTES
        return length.to_bytes(4, "big") + frame[4:] + self._next(frame[4:])

    def verify(self, signed: bytes) -> bytes:
        """Return the body of a frame; raise ``StoreError`` if it was changed."""
        body = signed[:-_PROOF_BYTES]
        if not hmac.compare_digest(signed[-_PROOF_BYTES:], self._next(body)):
            raise StoreError(
                "a message on a connection to the store was changed in transit."
            )
        return body

    def _next(self, body: bytes) -> bytes:
        self._number += 1
        return hmac.digest(self._key, self._number.to_bytes(8, "big") + body, "sha256")


class ServerSession:
    """The server's side of a connection to the store.

    Without a key, the kernel has already authenticated the peer.
    """

    def __init__(
        self,
        key: SharedKey | None = None,
        magic: bytes = MAGIC,
        certificate: bytes = b"",
    ) -> None:
        self.is_trusted = key is None
        self.claim = b""  # the client's data, once it is trusted
        self.unsent = bytearray()
        self._key = key
        self._certificate = certificate
        self._received: FrameMac | None = None
        self._sent: FrameMac | None = None
        self._splitter = Splitter()
        if key is not None:
            self._splitter = Splitter(_MAX_HELLO_BYTES)
            self._greeting = magic + secrets.token_bytes(NONCE_BYTES)
            self.unsent += self._greeting

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies of requests; raise ``StoreError`` for a wrong proof."""
        bodies = self._splitter.feed(data)
        if bodies and self._key and not self.is_trusted:
            self._authenticate(self._key, bodies.pop(0))
        return [self._received.verify(b) for b in bodies] if self._received else bodies

    def send(self, frame: bytes) -> None:
        self.unsent += self._sent.sign(frame) if self._sent else frame

    def _authenticate(self, key: SharedKey, hello: bytes) -> None:
        fields = decode(hello).fields
        if len(fields) != 3 or len(fields[0]) != NONCE_BYTES:
            raise StoreError("a peer sent a handshake without nonce, claim or proof.")
        nonce, claim, proof = fields
        handshake = HandshakeData(self._greeting, nonce, claim, self._certificate)
        if not hmac.compare_digest(proof, key.prove(b"client", handshake)):
            raise StoreError("the peer does not know the key of this job.")
        self.is_trusted, self.claim = True, claim
        self._splitter = Splitter()
        self.unsent += encode(0, (key.prove(b"server", handshake),))
        self._received = FrameMac(key, b"client", handshake)
        self._sent = FrameMac(key, b"server", handshake)


class ProvenConnection(PlainConnection):
    """The client's side of an authenticated connection to the store."""

    def __init__(self, sock: socket.socket, key: SharedKey, timeout_s: float) -> None:
        super().__init__(sock)
        due_s = time.monotonic() + timeout_s
        greeting = receive(sock, GREETING_BYTES, due_s)
        handshake, hello, expected = key.answer(greeting)
        is_proven = False
        if greeting.startswith(MAGIC):
            sock.sendall(hello)
            reply = receive(sock, len(expected), due_s)
            is_proven = hmac.compare_digest(reply, expected)
        if not is_proven:
            raise StoreError("the server at this address is not the store of this job.")
        self._sent = FrameMac(key, b"client", handshake)
        self._received = FrameMac(key, b"server", handshake)

    def ask(self, frame: bytes, timeout_s: float) -> bytes:
        return self._received.verify(super().ask(self._sent.sign(frame), timeout_s))


def dial_network(
    address: str, port: int, key: SharedKey, timeout_s: float
) -> ProvenConnection:
    """Connect to the store over TCP, and authenticate.

    Raises:
        StoreError: The server at this address is not the store of this job.
        OSError: No connection is possible.
    """
    sock = socket.create_connection((address, port), timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        return ProvenConnection(sock, key, timeout_s)
    except BaseException:
        sock.close()
        raise


def read_secret(path: Path) -> bytes:
    try:
        if not path.exists():
            _make_secret(path)
        with open(path, "rb", opener=_open_own) as file:
            found = os.fstat(file.fileno())
            is_file = stat.S_ISREG(found.st_mode)
            content = file.read(4096).strip() if is_file else b""
    except OSError as error:
        raise UsageError(
            f"cannot create or read {path}: {error.strerror}. Set XDG_CONFIG_HOME to "
            "a directory that all hosts share, or start the ranks with ronde run."
        ) from error
    is_private = is_file and not found.st_mode & 0o077
    if not is_private or found.st_uid != os.geteuid() or len(content) < _KEY_BYTES:
        raise UsageError(
            f"{path} must belong to user {os.geteuid()} and have mode 600 and at least "
            f"{_KEY_BYTES} characters, got owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):o} and {len(content)} characters. Remove "
            "it: ronde creates a new one."
        )
    return content


def _make_secret(path: Path) -> None:
    """Create the file atomically; if another process is faster, keep its file."""
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
