"""How two processes prove to each other, over a network, that they know one key.

Ranks prove it to the job's store, nodes that join to their head. The store's key is one
that all ranks were given, else made of a file in the user's home, shared by all hosts.

Note [What is proven on a network]
    A peer without the key receives a random number and nothing else::

        server -> client   magic, server's nonce
        client -> server   client's nonce, claim, proof as "client"
        server -> client   proof as "server"

    A proof is HMAC-SHA256 of the role, the greeting, the client's nonce, its claim and,
    where that is TLS, the server's certificate: so it can neither be replayed nor
    reflected, and a man in the middle, whose certificate is another, fits neither side.
    The client proves first: who passes for the server gets one proof to try keys on, so
    a key has at least 128 bits. On a connection to the store every later frame ends
    with a proof of its direction, number and body: it cannot be changed, repeated,
    dropped or moved unnoticed, but nothing is encrypted: keys and values are addresses,
    no secrets. Nodes that join send all through TLS.
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


class Transcript(NamedTuple):
    """All that makes one connection this one and no other."""

    greeting: bytes  # the server's, with its nonce
    nonce: bytes  # the client's
    claim: bytes = b""  # what the client says of itself
    certificate: bytes = b""  # the server's, as this side knows it, in DER


class SharedKey:
    """What both sides know, and nothing shows: at least 128 bits."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def prove(self, role: bytes, transcript: Transcript) -> bytes:
        return hmac.digest(self._key, encode(0, (role, *transcript)), "sha256")

    def introduce(
        self, greeting: bytes, claim: bytes = b"", certificate: bytes = b""
    ) -> tuple[Transcript, bytes, bytes]:
        """Return a client's answer to a greeting, and the reply that it must get."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        transcript = Transcript(greeting, nonce, claim, certificate)
        hello = encode(0, (nonce, claim, self.prove(b"client", transcript)))
        return transcript, hello, encode(0, (self.prove(b"server", transcript),))


def user_key(job: str, directory: Path) -> SharedKey:
    """Return what only this user's processes know of a job, by a file in a directory.

    The file, made now if there is none, must be the same on all hosts.
    """
    secret = read_secret(directory / "secret")
    return SharedKey(hmac.digest(secret, b"ronde job " + job.encode(), "sha256"))


class Seal:
    """Marks what one side sends, and checks the marks, in order."""

    def __init__(self, key: SharedKey, role: bytes, transcript: Transcript) -> None:
        self._key = key.prove(b"from " + role, transcript)
        self._number = 0

    def mark(self, frame: bytes) -> bytes:
        """Return a frame with its mark."""
        length = len(frame) - 4 + _PROOF_BYTES
        return length.to_bytes(4, "big") + frame[4:] + self._next(frame[4:])

    def check(self, marked: bytes) -> bytes:
        """Return the body of a frame."""
        body = marked[:-_PROOF_BYTES]
        if not hmac.compare_digest(marked[-_PROOF_BYTES:], self._next(body)):
            raise StoreError("a message on the store's connection was changed.")
        return body

    def _next(self, body: bytes) -> bytes:
        self._number += 1
        return hmac.digest(self._key, self._number.to_bytes(8, "big") + body, "sha256")


class ServerSession:
    """The server's side of a connection.

    Without a key the kernel has named the peer, and nothing is to be proven.
    """

    def __init__(
        self,
        key: SharedKey | None = None,
        magic: bytes = MAGIC,
        certificate: bytes = b"",
    ) -> None:
        self.is_trusted = key is None  # its requests may be carried out
        self.claim = b""  # what the client, once trusted, has said of itself
        self.unsent = bytearray()
        self._key = key
        self._certificate = certificate
        self._received: Seal | None = None  # of the client's frames
        self._sent: Seal | None = None  # and of ours
        self._splitter = Splitter()
        if key is not None:
            self._splitter = Splitter(_MAX_HELLO_BYTES)
            self._greeting = magic + secrets.token_bytes(NONCE_BYTES)
            self.unsent += self._greeting

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies of the requests that have come; raise for a stranger."""
        bodies = self._splitter.feed(data)
        if bodies and self._key and not self.is_trusted:
            self._admit(self._key, bodies.pop(0))
        return [self._received.check(b) for b in bodies] if self._received else bodies

    def send(self, frame: bytes) -> None:
        self.unsent += self._sent.mark(frame) if self._sent else frame

    def _admit(self, key: SharedKey, hello: bytes) -> None:
        fields = decode(hello).fields
        if len(fields) != 3 or len(fields[0]) != NONCE_BYTES:
            raise StoreError("a peer must show a nonce, a claim and a proof.")
        nonce, claim, proof = fields
        transcript = Transcript(self._greeting, nonce, claim, self._certificate)
        if not hmac.compare_digest(proof, key.prove(b"client", transcript)):
            raise StoreError("the peer does not belong to this job.")
        self.is_trusted, self.claim = True, claim
        self._splitter = Splitter()
        self.unsent += encode(0, (key.prove(b"server", transcript),))
        self._received = Seal(key, b"client", transcript)
        self._sent = Seal(key, b"server", transcript)


class ProvenConnection(PlainConnection):
    """A rank's side of a connection."""

    def __init__(self, sock: socket.socket, key: SharedKey, timeout_s: float) -> None:
        super().__init__(sock)
        due_s = time.monotonic() + timeout_s
        greeting = receive(sock, GREETING_BYTES, due_s)
        transcript, hello, expected = key.introduce(greeting)
        is_proven = False
        if greeting.startswith(MAGIC):
            sock.sendall(hello)
            reply = receive(sock, len(expected), due_s)
            is_proven = hmac.compare_digest(reply, expected)
        if not is_proven:
            raise StoreError("the peer at this address is not the store of this job.")
        self._sent = Seal(key, b"client", transcript)
        self._received = Seal(key, b"server", transcript)

    def ask(self, frame: bytes, timeout_s: float) -> bytes:
        return self._received.check(super().ask(self._sent.mark(frame), timeout_s))


def dial_network(
    address: str, port: int, key: SharedKey, timeout_s: float
) -> ProvenConnection:
    """Dial the store; ``StoreError`` for another job's, ``OSError`` for none."""
    sock = socket.create_connection((address, port), timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        return ProvenConnection(sock, key, timeout_s)
    except BaseException:
        sock.close()
        raise


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
            f"{path} must be a file that can be made and read, but: "
            f"{error.strerror}. Set XDG_CONFIG_HOME to a directory that all hosts "
            "share, or start the ranks with ronde run."
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
