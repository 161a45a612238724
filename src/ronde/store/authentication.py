"""How a rank and the store on another host prove that they are of one job.

Note [What is proven on a network]
----------------------------------
Both sides know a key, or come to know one by the rank's credential, which only the same
user can read (``secret``). Whoever has it not is told a random number and nothing else,
and nothing that he says is obeyed::

    store -> rank   magic, store's nonce
    rank -> store   kind of credential, rank's nonce, credential, proof as "rank"
    store -> rank   proof as "store"

A proof is HMAC-SHA256 of the role and both nonces. Every frame after that ends with one
of its direction, its number and its body, with keys made of the same nonces: it cannot
be changed, repeated, dropped or moved unseen. So who poses as the store is found out
before anything is said to him, and who stands between can only cut the connection.
Nothing is encrypted: keys and values are no secrets, they are addresses.
"""

import hmac
import secrets
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from ronde.errors import StoreError
from ronde.store.client import PlainConnection
from ronde.store.protocol import MAX_FRAME_BYTES, Splitter, decode, encode

MAGIC = b"ronde store 1\r\n\0"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_MAX_HELLO_BYTES = 8 << 10
_READ_BYTES = 4096


class Offer(NamedTuple):
    """What a rank shows when it connects."""

    kind: int  # of the credential: see ``secret``
    credential: bytes  # by which the store comes to the key; may be empty
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
            raise StoreError("what came on the store's connection was changed.")
        return body

    def _next(self, body: bytes) -> bytes:
        self._number += 1
        number = self._number.to_bytes(8, "big")
        return hmac.digest(self._key, number + body, "sha256")


class LocalSession:
    """The store's side of a connection within this host, whose end the kernel named."""

    is_trusted = True  # whether the other side may have its requests carried out

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._splitter = Splitter(max_bytes)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies of the requests that have come.

        Raises:
            StoreError: The other side is a stranger, or says what makes no sense.
        """
        return self._splitter.feed(data)

    def seal(self, frame: bytes) -> bytes:
        """Return a reply as it is sent."""
        return frame

    def to_say(self) -> bytes:
        """Return what is to be sent by itself, now; it is returned once."""
        return b""


class ProvenSession(LocalSession):
    """The store's side of a connection; see ``LocalSession``.

    Args:
        find_key: Given the kind and the credential: the key, or None for a stranger.
    """

    def __init__(self, find_key: Callable[[int, bytes], bytes | None]) -> None:
        super().__init__(_MAX_HELLO_BYTES)
        self.is_trusted = False
        self._find_key = find_key
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._words = MAGIC + self._nonce
        self._sent: Seal | None = None
        self._received: Seal | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """See ``LocalSession``."""
        bodies = self._splitter.feed(data)
        if self._received is None and bodies:
            self._admit(bodies.pop(0))
        if self._received is None:
            return []
        return [self._received.check(body) for body in bodies]

    def seal(self, frame: bytes) -> bytes:
        """See ``LocalSession``."""
        if self._sent is None:
            raise AssertionError("strangers get no replies")
        return self._sent.mark(frame)

    def to_say(self) -> bytes:
        """See ``LocalSession``."""
        words, self._words = self._words, b""
        return words

    def _admit(self, hello: bytes) -> None:
        kind, fields = decode(hello)
        if len(fields) != 3 or len(fields[0]) != _NONCE_BYTES:
            raise StoreError("a rank must show a nonce, a credential and a proof.")
        nonce, credential, proof = fields
        key, nonces = self._find_key(kind, credential), self._nonce + nonce
        expected = None if key is None else _proof(key, b"rank", nonces)
        if key is None or not hmac.compare_digest(proof, expected or b""):
            raise StoreError("who connects must be of the job, but is not.")
        self.is_trusted = True
        self._splitter = Splitter()
        self._words += encode(0, [_proof(key, b"store", nonces)])
        self._received, self._sent = (Seal(key, r, nonces) for r in (b"rank", b"store"))


class ProvenConnection(PlainConnection):
    """A rank's side of a connection."""

    def __init__(self, sock: socket.socket, offer: Offer, timeout_s: float) -> None:
        super().__init__(sock)
        try:
            nonces = _prove(sock, offer, time.monotonic() + timeout_s)
        except BaseException:
            sock.close()
            raise
        self._sent, self._received = (
            Seal(offer.key, role, nonces) for role in (b"rank", b"store")
        )

    def ask(self, frame: bytes, timeout_s: float) -> bytes:
        """See ``PlainConnection``."""
        return self._received.check(super().ask(self._sent.mark(frame), timeout_s))


def _prove(sock: socket.socket, offer: Offer, due_s: float) -> bytes:
    """Show an offer and check that the store knows the key; return the nonces."""
    greeting = _receive(sock, len(MAGIC) + _NONCE_BYTES, due_s)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    nonces = greeting[len(MAGIC) :] + nonce
    if greeting.startswith(MAGIC):
        proof = _proof(offer.key, b"rank", nonces)
        sock.sendall(encode(offer.kind, [nonce, offer.credential, proof]))
        expected = encode(0, [_proof(offer.key, b"store", nonces)])
        if hmac.compare_digest(_receive(sock, len(expected), due_s), expected):
            return nonces
    raise StoreError("who answers must be the store of this job, but is not.")


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, b"ronde store " + role + b"\0" + nonces, "sha256")


def _receive(sock: socket.socket, size: int, due_s: float) -> bytes:
    """Return so many bytes; what follows them is nobody's."""
    received = b""
    while len(received) < size:
        left_s = due_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        sock.settimeout(left_s)
        data = sock.recv(size - len(received))
        if not data:
            raise ConnectionResetError("its other end is gone")
        received += data
    return received
