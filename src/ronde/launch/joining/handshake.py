"""The first words of a TLS connection, on either side, as steps that wait for nothing.

Each step yields the event of ``select.poll`` that it goes on with. See
Note [Who proves what to whom] in ``proof``.
"""

import secrets
import select
import ssl
from collections.abc import Callable, Generator
from functools import partial
from struct import Struct
from typing import TypeVar

from ronde.errors import LaunchError
from ronde.launch.joining.proof import (
    MAX_CLAIM_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    Claim,
    Meeting,
    Role,
    decode_claim,
)
from ronde.launch.joining.token import Token
from ronde.launch.messages import PROTOCOL

T = TypeVar("T")

Steps = Generator[int, None, T]

_GREETING = Struct(f">8sH{NONCE_BYTES}s")
_MAGIC = b"ronde\r\n\0"
_ANSWER = Struct(f">{NONCE_BYTES}s{PROOF_BYTES}sH")


class ProofError(LaunchError):
    """The other side does not know the token."""


def admit(sock: ssl.SSLSocket, token: Token, certificate: bytes) -> Steps[Claim]:
    """Let a node prove itself to the head, and then prove the head to the node.

    Args:
        sock: Non-blocking, of the head's side, its TLS not begun.
        token: The job's.
        certificate: The head's own, in DER.

    Raises:
        ProofError: It does not know the token; it was not told so.
        LaunchError: It knows the token, and is no node of ours all the same.
        EOFError: It has gone.
        OSError: The connection broke, or does not speak TLS.
    """
    yield from _go_on(sock.do_handshake)
    head_nonce = secrets.token_bytes(NONCE_BYTES)
    yield from _send(sock, _GREETING.pack(_MAGIC, PROTOCOL, head_nonce))
    answer = yield from _receive(sock, _ANSWER.size)
    node_nonce, proof, length = _ANSWER.unpack(answer)
    if length > MAX_CLAIM_BYTES:
        raise ProofError(f"claim must have at most {MAX_CLAIM_BYTES} bytes.")
    claim = yield from _receive(sock, length)
    meeting = Meeting(certificate, head_nonce, node_nonce, claim)
    if not meeting.is_proven(token, Role.NODE, proof):
        raise ProofError("node must know the token, but it does not.")
    decoded = decode_claim(claim)
    yield from _send(sock, meeting.proof(token, Role.HEAD))
    return decoded


def introduce(sock: ssl.SSLSocket, token: Token, claim: Claim) -> Steps[None]:
    """Prove a node to the head, and let the head prove itself.

    Args:
        sock: Non-blocking, of the node's side, its TLS not begun.
        token: The job's.
        claim: What the node says of itself.

    Raises:
        ProofError: Who answers does not know the token.
        LaunchError: Who answers is no head, or one of another version of ronde.
        EOFError: The connection was ended, which is how a head refuses.
        OSError: The connection broke, or does not speak TLS.
    """
    yield from _go_on(sock.do_handshake)
    certificate = sock.getpeercert(binary_form=True) or b""
    greeting = yield from _receive(sock, _GREETING.size)
    magic, protocol, head_nonce = _GREETING.unpack(greeting)
    if magic != _MAGIC:
        raise LaunchError("what answers there must be ronde run, but it is not.")
    if protocol != PROTOCOL:
        raise LaunchError(
            f"protocol of the head must be {PROTOCOL}, got {protocol}. "
            "Run the same version of ronde on every node."
        )
    raw = claim.encode()
    node_nonce = secrets.token_bytes(NONCE_BYTES)
    meeting = Meeting(certificate, head_nonce, node_nonce, raw)
    proof = meeting.proof(token, Role.NODE)
    yield from _send(sock, _ANSWER.pack(node_nonce, proof, len(raw)) + raw)
    head_proof = yield from _receive(sock, PROOF_BYTES)
    if not meeting.is_proven(token, Role.HEAD, head_proof):
        raise ProofError(
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
    """Return so many bytes and no more: what follows is for somebody else to read."""
    received = b""
    while len(received) < size:
        data = yield from _go_on(partial(sock.recv, size - len(received)))
        if not data:
            raise EOFError("the other side has ended the connection")
        received += data
    return received
