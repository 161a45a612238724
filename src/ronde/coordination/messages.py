"""Who talks to whom, a tree of ranks, and what travels between coordinators.

What every step sends is short: an epoch and bits, as ``encode_numbers`` has them. From
a rank to its parent: the sender and all below are ready for these cached requests. From
the root to everyone: carry these out. Any other message is a JSON list of verbs with
their values. Upwards go events:

=========  =======================================================================
request    text, ranks: those ranks have made that request
absent     all ranks from the sender down have joined
changed    number: a cached request no longer fits
joined     rank
lost       rank, reason, is_orderly: the rank is gone; whether it had closed
ask        kind: a rank wants all ranks to be asked this: see ``waits``
answer     kind, number, rank, values: an answer to the question of that number
=========  =======================================================================

Downwards go the root's commands, passed on as they are: see ``Command``.

Note [Cached requests are bits]
    The root gives each request that may come again a number, which everyone remembers.
    Numbers are never given twice, until a reset drops all of them and begins a new
    epoch. Bits carry the epoch they mean, so that one that was under way during the
    reset is recognised: its sender learns of that too, and asks anew.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_ARITY = 16
"""Hosts that report to one host."""
_NUMBERS = struct.Struct("<xHI")  # a zero, which no JSON begins with; epoch; first bit


@dataclass(frozen=True, slots=True)
class Tree:
    """One rank's neighbours in a tree rooted at rank 0."""

    rank: int
    size: int
    parent: int | None  # who it reports to
    children: tuple[int, ...]  # who reports to it, ascending

    @classmethod
    def of_hosts(cls, hosts: Sequence[str], arity: int = _ARITY) -> list["Tree"]:
        """Return every rank's neighbours, in rank order, from the host of each.

        A host's ranks report to its first, and those to each other, ``arity`` to one.
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
    """A rank that will not answer any more."""

    rank: int
    reason: str  # as the end of a sentence: ``rank 3, process 4711, ended``
    is_orderly: bool  # whether it had closed its channel


def encode(items: Sequence[Sequence[Any]]) -> bytes:
    return json.dumps(items, separators=(",", ":")).encode()


def encode_numbers(epoch: int, bits: int) -> bytes:
    """Write numbers of cached requests, as the bits of a number that is not zero."""
    first = (bits & -bits).bit_length() - 1 & ~7
    rest = bits >> first
    data = rest.to_bytes((rest.bit_length() + 7) // 8, "little")
    return _NUMBERS.pack(epoch & 0xFFFF, first) + data


def decode_numbers(message: bytes) -> tuple[int, int] | None:
    """Return the epoch, modulo 2**16, and the bits; None if it is another message."""
    if message[0]:
        return None
    epoch, first = _NUMBERS.unpack_from(message)
    return epoch, int.from_bytes(message[_NUMBERS.size :], "little") << first


def bits_of(number: int) -> list[int]:
    places: list[int] = []
    while number:
        lowest = number & -number
        places.append(lowest.bit_length() - 1)
        number ^= lowest
    return places


def encode_bits(bits: int) -> str:
    """Write which bits of a number are set as ranges: ``0-63,70``."""
    parts: list[str] = []
    start = 0
    while bits:
        skip = (bits & -bits).bit_length() - 1
        bits >>= skip
        start += skip
        # The run of ones at the bottom ends where adding one carries to.
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
    """Name a set of ranks in a message: ``rank 3``, ``ranks 0-63,70``."""
    return ("rank " if ranks.bit_count() == 1 else "ranks ") + encode_bits(ranks)
