"""How head and node prove to each other that they know the token.

Note [Who proves what to whom]
------------------------------
Whoever passes for the head runs what he likes on every node, and whoever passes for a
node is sent the job's program, arguments and environment. There is no authority that
certificates could be checked by. So the TLS connection is made with a certificate that
nobody vouches for, and then each side proves in it that it knows the token::

    head -> node   version, head's nonce
    node -> head   node's nonce, claim, proof as "node"
    head -> node   proof as "head"

A proof is HMAC-SHA256, with the token as key, of the role, the version, both nonces,
the SHA-256 of the certificate that this side has seen or shown, and the claim.

- *The node proves first.* All that a stranger gets out of the head is a certificate and
  random bytes: nothing there depends on the token, so nothing can be guessed at from
  it, at whatever rate. One side has to begin, though: a stranger who is taken for the
  head (nodes may be started before it, and names can be forged) gets one proof, and can
  try tokens on it at home. Therefore a token has at least 128 bits, made by a machine.
  He also learns the node's name and number of slots.
- *Before the head's proof* the node has told its agent nothing, and closes.
- *Man in the middle.* Who ends the TLS of both sides shows the node a certificate that
  is not the head's: he does not have its private key, which is made anew for each job
  and never leaves the head's memory. The proofs on the two sides then are of different
  certificates, and neither fits the other side.
- *Replay.* Each connection has two fresh nonces, one of each side, and each job a fresh
  certificate.
- *Reflection.* The role is part of what is signed: a proof as "node" sent back to a
  node is none as "head".
- *Reading before the proof.* The head reads a fixed number of bytes and a claim of
  limited length, and interprets nothing of it until the proof has been checked.
- *Versions.* The version that both sides say is signed; TLS is 1.3 or nothing.
- *Not protected:* the token opens the whole job. A node that is taken over can, as long
  as the head waits, join as further nodes, and can pass for the head to nodes that have
  not joined. Once joined, it has its own connection and cannot speak for others.
"""

import hashlib
import hmac
import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ronde.errors import LaunchError
from ronde.launch.hosts.host import SLOTS_CORES
from ronde.launch.joining.token import Token
from ronde.launch.messages import PROTOCOL, decode_message

NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_CLAIM_BYTES = 512

_PURPOSE = b"ronde joining"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")


class Role(Enum):
    """On which side of the connection a proof was made."""

    HEAD = b"head"
    NODE = b"node"


class Claim(NamedTuple):
    """What a node says of itself when it joins.

    Attributes:
        host: Its name, for messages.
        slots: Ranks that it takes, or one of the negative ones of ``Host``.
    """

    host: str
    slots: int

    def encode(self) -> bytes:
        """Return the claim as JSON, as control messages are."""
        return json.dumps({"is": "Claim", **self._asdict()}).encode()


def decode_claim(raw: bytes) -> Claim:
    """Return the claim that a node has proven.

    Raises:
        LaunchError: It is none, or its name could be mistaken for something else.
    """
    claim = decode_message(raw, (Claim,))
    if not _NAME.fullmatch(claim.host):
        raise LaunchError(f"host must be a host's name, got {claim.host!r}.")
    if claim.slots == 0 or claim.slots < SLOTS_CORES:
        raise LaunchError(f"slots must be at least 1, got {claim.slots}.")
    return claim


def host_name(nodename: str) -> str:
    """Return a machine's name of itself with only what a claim may have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", nodename).lstrip(".-")[:253] or "node"


@dataclass(frozen=True, slots=True)
class Meeting:
    """What is signed: all that makes one connection this one and no other.

    Attributes:
        certificate: The head's, as this side knows it, in DER.
        head_nonce: Random bytes of the head's.
        node_nonce: Random bytes of the node's.
        claim: The node's, as it was sent.
    """

    certificate: bytes
    head_nonce: bytes
    node_nonce: bytes
    claim: bytes

    def proof(self, token: Token, role: Role) -> bytes:
        """Return what shows that who has this role knows the token."""
        return token.sign(
            _PURPOSE,
            role.value,
            PROTOCOL.to_bytes(2, "big"),
            self.head_nonce,
            self.node_nonce,
            hashlib.sha256(self.certificate).digest(),
            self.claim,
        )

    def is_proven(self, token: Token, role: Role, proof: bytes) -> bool:
        """Say whether this is that proof, in a time that does not tell how near."""
        return hmac.compare_digest(self.proof(token, role), proof)
