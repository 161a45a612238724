"""The tree of coordinators and the messages between them.

The message of a repeated step is short: an epoch and bits (``encode_numbers``). Sent
to a parent, the bits mean that the sender and all ranks below it are ready for these
cached requests; sent by the root, that these requests run now. Any other message is a
JSON list of verbs with their values. These events are sent towards the root:

=========  =======================================================================
request    text, ranks: these ranks have made that request
absent     all ranks of the sender's subtree have joined
changed    number: a cached request no longer fits
joined     rank
lost       rank, reason, is_orderly: the rank is lost; True if it had closed
ask        kind: a rank wants an inquiry of all ranks: see ``waits``
answer     kind, number, rank, values: the answer to an inquiry
=========  =======================================================================

The root's commands are sent down the tree: see ``Command``.

Note [Cached requests are bits]
    The root numbers each request that may come again, and all ranks cache it. A number
    is not reused until a reset drops all numbers and begins a new epoch. Bits carry
    their epoch, so that bits sent before a reset are recognised and ignored. Their
    sender also receives the reset and submits its requests again.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_ARITY = 16
"""Maximum number of hosts that report to one host."""
_NUMBERS = struct.Struct("<xHI")  # a zero byte, unlike JSON; epoch; first bit


@dataclass(frozen=True, slots=True)
class Tree:
    """One rank's neighbours in a tree rooted at rank 0."""

    rank: int
    size: int
    parent: int | None
    children: tuple[int, ...]  # ascending

    @classmethod
    def of_hosts(cls, hosts: Sequence[str], arity: int = _ARITY) -> list["Tree"]:
        """Return the tree of every rank, in rank order.

        The ranks of a host are children of its first rank; the first ranks form a tree
        of ``arity``.
        """
        members: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            members.setdefault(host, []).append(rank)
        leaders = [ranks[0] for ranks in members.values()]
        size = len(hosts)
        trees: dict[int, Tree] = {}
        for index, (leader, *others) in enumerate(members.values()):
            below = leaders[arity * index + 1 : arity * index + 1 + arity]
            parent = leaders[(index - 1) // arity] if index else None
            children = tuple(sorted([*others, *below]))
            trees[leader] = cls(leader, size, parent, children)
            for rank in others:
                trees[rank] = cls(rank, size, leader, ())
        return [trees[rank] for rank in range(size)]

    def neighbours(self, among: Sequence[int]) -> list[int]:
        return [r for r in among if r == self.parent or r in self.children]


class Loss(NamedTuple):
    """A rank that is lost, and the reason."""

    rank: int
    reason: str  # such as ``rank 3, process 4711, ended``
    is_orderly: bool  # the rank closed its channel first


def encode(items: Sequence[Sequence[Any]]) -> bytes:
    return json.dumps(items, separators=(",", ":")).encode()


def encode_numbers(epoch: int, bits: int) -> bytes:
    """Encode a non-empty set of cached request numbers, given as bits."""
    first = (bits & -bits).bit_length() - 1 & ~7
    rest = bits >> first
    data = rest.to_bytes((rest.bit_length() + 7) // 8, "little")
    return _NUMBERS.pack(epoch & 0xFFFF, first) + data


def decode_numbers(message: bytes) -> tuple[int, int] | None:
    """Return the epoch, modulo 2**16, and the bits; None for other messages."""
    if message[0]:
        return None
    epoch, first = _NUMBERS.unpack_from(message)
    return epoch, int.from_bytes(message[_NUMBERS.size :], "little") << first


def bits_of(number: int) -> list[int]:
    bits: list[int] = []
    while number:
        lowest = number & -number
        bits.append(lowest.bit_length() - 1)
        number ^= lowest
    return bits


def encode_bits(bits: int) -> str:
    """Encode the set bits of a number as ranges: ``0-63,70``."""
    parts: list[str] = []
    start = 0
    while bits:
        skip = (bits & -bits).bit_length() - 1
        bits >>= skip
        start += skip
        # Adding one carries to the end of the lowest run of ones.
        run = (~bits & (bits + 1)).bit_length() - 1
        parts.append(str(start) if run == 1 else f"{start}-{start + run - 1}")
        bits >>= run
        start += run
    return ",".join(parts)


def decode_bits(text: str) -> int:
    bits = 0
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        bits |= (2 << int(last or first)) - (1 << int(first))
    return bits


def format_ranks(ranks: int) -> str:
    """Format a set of ranks for a message: ``rank 3``, ``ranks 0-63,70``."""
    return ("rank " if ranks.bit_count() == 1 else "ranks ") + encode_bits(ranks)
