"""How head and node prove to each other that they know the token.

Note [Who proves what to whom]: no authority vouches for the certificate of the TLS
connection, so each side proves in it that it knows the token::

    head -> node   version, head's nonce
    node -> head   node's nonce, NodeInfo, proof as "node"
    head -> node   proof as "head"

A proof is HMAC-SHA256, with the token as key, of the role, the version, both fresh
nonces, the SHA-256 of the certificate that this side has seen or shown, and the
NodeInfo: so it can neither be replayed nor reflected, and a man in the middle, whose
certificate is another, fits neither side. The node proves first: a stranger gets random
bytes out of the head; who passes for the head gets one proof to try tokens on, so a
token has at least 128 bits. Before the proof the head interprets nothing, and the node
has sent nothing of its agent's. Not protected: the token opens the whole job.

The steps wait for nothing: each yields the event of ``select.poll`` that it goes on
with.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import select
import ssl
import stat
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from struct import Struct
from typing import NamedTuple, TypeVar

from ronde.errors import LaunchError, UsageError
from ronde.launch.hosts.host import SLOTS_CORES
from ronde.launch.messages import PROTOCOL, decode_message

MIN_CHARACTERS = 32  # with fewer it could be guessed by who has seen one proof
_MAX_BYTES = 4096
_FOR_OTHERS = stat.S_IROTH | stat.S_IWOTH
_MAKE_ONE = "Make one: (umask 077; openssl rand -hex 32 > token)"
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_INFO_BYTES = 512
_PURPOSE = b"ronde joining"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
T = TypeVar("T")
Steps = Generator[int, None, T]
_GREETING = Struct(f">8sH{NONCE_BYTES}s")
_MAGIC = b"ronde\r\n\0"
_ANSWER = Struct(f">{NONCE_BYTES}s{PROOF_BYTES}sH")


class Token:
    """A shared secret that signs, and that nothing else can be done with."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, *parts: bytes) -> bytes:
        framed = (len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._key, b"".join(framed), "sha256")


def read_token(path: str) -> Token:
    """Read the token from a file, or from standard input where the path is ``-``."""
    try:
        with open(0 if path == "-" else path, "rb", closefd=path != "-") as file:
            status = os.fstat(file.fileno())
            is_file = path != "-" and stat.S_ISREG(status.st_mode)
            if is_file and status.st_mode & _FOR_OTHERS:
                raise UsageError(
                    f"--token-file must not be open to every user, got {path!r} with "
                    f"mode {stat.S_IMODE(status.st_mode):04o}. Type: chmod 600 {path} "
                    "(for a secret of Kubernetes: defaultMode: 0440)"
                )
            # To the end, or so much that it can be no token.
            text = file.read(2 * _MAX_BYTES).strip()
    except OSError as error:
        raise UsageError(
            f"--token-file must be a file that can be read, got {path!r}: "
            f"{error.strerror}. {_MAKE_ONE}"
        ) from None
    if len(text) < MIN_CHARACTERS:
        raise UsageError(
            f"token in {path!r} must have at least {MIN_CHARACTERS} characters, "
            f"got {len(text)}. {_MAKE_ONE}"
        )
    if len(text) > _MAX_BYTES or any(not 33 <= byte <= 126 for byte in text):
        raise UsageError(
            f"token in {path!r} must be one word of at most {_MAX_BYTES} ASCII "
            f"characters, got something else. {_MAKE_ONE}"
        )
    return Token(text)


class Role(Enum):
    """On which side of the connection a proof was made."""

    HEAD = b"head"
    NODE = b"node"


class NodeInfo(NamedTuple):
    """What a node says of itself when it joins."""

    host: str  # its name, for messages
    slots: int  # ranks that it takes, or one of the negative ones of ``Host``

    def encode(self) -> bytes:
        return json.dumps({"is": "NodeInfo", **self._asdict()}).encode()


def decode_node_info(raw: bytes) -> NodeInfo:
    node_info = decode_message(raw, (NodeInfo,))
    if not _NAME.fullmatch(node_info.host):
        raise LaunchError(f"host must be a host's name, got {node_info.host!r}.")
    if node_info.slots == 0 or node_info.slots < SLOTS_CORES:
        raise LaunchError(f"slots must be at least 1, got {node_info.slots}.")
    return node_info


def host_name(nodename: str) -> str:
    """Return a machine's name of itself with only what ``NodeInfo`` may have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", nodename).lstrip(".-")[:253] or "node"


@dataclass(frozen=True, slots=True)
class Transcript:
    """What is signed: all that makes one connection this one and no other."""

    certificate: bytes  # the head's, as this side knows it, in DER
    head_nonce: bytes  # random bytes of the head's
    node_nonce: bytes  # random bytes of the node's
    node_info: bytes  # the node's, as it was sent

    def sign(self, token: Token, role: Role) -> bytes:
        return token.sign(
            _PURPOSE,
            role.value,
            PROTOCOL.to_bytes(2, "big"),
            self.head_nonce,
            self.node_nonce,
            hashlib.sha256(self.certificate).digest(),
            self.node_info,
        )

    def verify(self, token: Token, role: Role, proof: bytes) -> bool:
        return hmac.compare_digest(self.sign(token, role), proof)


class AuthenticationError(LaunchError):
    """The other side does not know the token."""


def authenticate_node(
    sock: ssl.SSLSocket, token: Token, certificate: bytes
) -> Steps[NodeInfo]:
    """Let a node prove itself to the head, and then prove the head to the node."""
    yield from _go_on(sock.do_handshake)
    head_nonce = secrets.token_bytes(NONCE_BYTES)
    yield from _send(sock, _GREETING.pack(_MAGIC, PROTOCOL, head_nonce))
    answer = yield from _receive(sock, _ANSWER.size)
    node_nonce, proof, length = _ANSWER.unpack(answer)
    if length > MAX_INFO_BYTES:
        raise AuthenticationError(f"claim must have at most {MAX_INFO_BYTES} bytes.")
    node_info = yield from _receive(sock, length)
    transcript = Transcript(certificate, head_nonce, node_nonce, node_info)
    if not transcript.verify(token, Role.NODE, proof):
        raise AuthenticationError("node must know the token, but it does not.")
    decoded = decode_node_info(node_info)
    yield from _send(sock, transcript.sign(token, Role.HEAD))
    return decoded


def authenticate_head(
    sock: ssl.SSLSocket, token: Token, node_info: NodeInfo
) -> Steps[None]:
    """Prove a node to the head, and let the head prove itself."""
    yield from _go_on(sock.do_handshake)
    certificate = sock.getpeercert(binary_form=True) or b""
    hello = yield from _receive(sock, _GREETING.size)
    magic, protocol, head_nonce = _GREETING.unpack(hello)
    if magic != _MAGIC:
        raise LaunchError("what answers there must be ronde run, but it is not.")
    if protocol != PROTOCOL:
        raise LaunchError(
            f"protocol of the head must be {PROTOCOL}, got {protocol}. "
            "Run the same version of ronde on every node."
        )
    raw = node_info.encode()
    node_nonce = secrets.token_bytes(NONCE_BYTES)
    transcript = Transcript(certificate, head_nonce, node_nonce, raw)
    proof = transcript.sign(token, Role.NODE)
    yield from _send(sock, _ANSWER.pack(node_nonce, proof, len(raw)) + raw)
    head_proof = yield from _receive(sock, PROOF_BYTES)
    if not transcript.verify(token, Role.HEAD, head_proof):
        raise AuthenticationError(
            "what answers there must know the token, but it does not: it is not the "
            "head, or stands between here and the head."
        )


def _go_on(call: Callable[[], T]) -> Steps[T]:
    while True:
        try:
            return call()
        except ssl.SSLWantReadError:
            yield select.POLLIN
        except ssl.SSLWantWriteError:
            yield select.POLLOUT


def _send(sock: ssl.SSLSocket, data: bytes) -> Steps[None]:
    # Less than one TLS record: taken whole or not at all.
    yield from _go_on(partial(sock.send, data))


def _receive(sock: ssl.SSLSocket, size: int) -> Steps[bytes]:
    received = b""
    while len(received) < size:
        data = yield from _go_on(partial(sock.recv, size - len(received)))
        if not data:
            raise EOFError("the other side has ended the connection")
        received += data
    return received
