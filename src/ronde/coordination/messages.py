"""Who talks to whom, a tree of ranks, and what travels between coordinators.

Upwards, from a rank to its parent:

* *hits*, bits: cached requests that the sender and all below it are ready for.
* events, a list: all else, rarely. Each is a verb and its values:

  =========  =======================================================================
  request    text, ranks (``encode_ranks``): those ranks have made that request
  absent     all ranks from the sender down have joined
  changed    number: a cached request no longer fits
  joined     rank
  lost       rank, reason, is_orderly: the rank is gone; whether it had closed
  ask        kind: a rank wants all ranks to be asked this: see ``stall``
  answer     kind, number, rank, values: an answer to the question of that number
  =========  =======================================================================

Downwards, from the root to everyone, who passes them on as they are:

* *runs*, bits: cached requests that all are ready for, to be run in ascending order.
* commands, a list: all else, rarely. See ``Command``.

Note [Cached requests are bits]
    The root gives each request that may come again a number, which everyone remembers.
    Numbers are never given twice, until a reset drops all of them and begins a new
    epoch. Hits carry the epoch they mean, so that one that was under way during the
    reset is recognised: its sender learns of that too, and asks anew.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_ARITY = 16
"""Hosts that report to one host."""
_HEAD = struct.Struct("<cHI")
"""What it is, the epoch, and the number of the first bit."""
HITS = b"H"
RUNS = b"R"
EVENTS = b"U"
COMMANDS = b"D"


@dataclass(frozen=True, slots=True)
class Tree:
    """One rank's neighbours in a tree rooted at rank 0.

    Attributes:
        parent: Who it reports to; None for the root.
        children: Who reports to it, ascending.
        local: Those of its neighbours that run on its host.
    """

    rank: int
    size: int
    parent: int | None
    children: tuple[int, ...]
    local: frozenset[int]

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
            trees[leader] = cls(leader, size, parent, children, frozenset(others))
            for rank in others:
                trees[rank] = cls(rank, size, leader, (), frozenset((leader,)))
        return [trees[rank] for rank in range(size)]


class Loss(NamedTuple):
    """A neighbour that will not answer any more.

    Attributes:
        reason: As the end of a sentence: ``rank 3, process 4711, ended``.
        is_orderly: Whether it had closed its channel.
    """

    rank: int
    reason: str
    is_orderly: bool


def encode_bits(what: bytes, epoch: int, bits: int) -> bytes:
    """Write numbers of cached requests, given as the bits of a number, not zero."""
    first = (bits & -bits).bit_length() - 1 & ~7
    rest = bits >> first
    data = rest.to_bytes((rest.bit_length() + 7) // 8, "little")
    return _HEAD.pack(what, epoch & 0xFFFF, first) + data


def decode_bits(message: bytes) -> tuple[int, int]:
    _, epoch, first = _HEAD.unpack_from(message)
    return epoch, int.from_bytes(message[_HEAD.size :], "little") << first


def encode(what: bytes, items: Sequence[Sequence[Any]]) -> bytes:
    return what + json.dumps(items, separators=(",", ":")).encode()


def decode(message: bytes) -> list[list[Any]]:
    return json.loads(message[1:])


def bits_of(number: int) -> list[int]:
    places: list[int] = []
    while number:
        lowest = number & -number
        places.append(lowest.bit_length() - 1)
        number ^= lowest
    return places


def encode_ranks(ranks: int) -> str:
    """Write a set of ranks, a bit each, as ranges: ``0-63,70``."""
    parts: list[str] = []
    start = 0
    while ranks:
        skip = (ranks & -ranks).bit_length() - 1
        ranks >>= skip
        start += skip
        # The run of ones at the bottom ends where adding one carries to.
        run = (~ranks & (ranks + 1)).bit_length() - 1
        parts.append(str(start) if run == 1 else f"{start}-{start + run - 1}")
        ranks >>= run
        start += run
    return ",".join(parts)


def decode_ranks(text: str) -> int:
    ranks = 0
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        num_ranks = int(last or first) - int(first) + 1
        ranks |= ((1 << num_ranks) - 1) << int(first)
    return ranks


def format_ranks(ranks: int) -> str:
    """Name a set of ranks in a message: ``rank 3``, ``ranks 0-63,70``."""
    return ("rank " if ranks.bit_count() == 1 else "ranks ") + encode_ranks(ranks)
