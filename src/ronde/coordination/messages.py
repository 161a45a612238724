"""What travels between coordinators.

Upwards, from a rank to the one it reports to:

* *hits*, bits: cached requests that the sender and all below it are ready for.
* ``Report``: all else, rarely.

Downwards, from the root to everyone, who passes them on as they are:

* *runs*, bits: cached requests that all are ready for, to be run in ascending order.
* commands, a list: all else, rarely.

Note [Cached requests are bits]
    The root gives each request that may come again a number, which everyone remembers.
    Numbers are never given twice, until a reset drops all of them and begins a new
    epoch. Hits carry the epoch they mean, so that one that was under way during the
    reset is recognised: its sender learns of that too, and asks anew.
"""

import json
import struct
from dataclasses import dataclass, field
from typing import Any

_HEAD = struct.Struct("<cHI")
"""What it is, the epoch, and the number of the first bit."""
HITS = b"H"
RUNS = b"R"
REPORT = b"U"
COMMANDS = b"D"


@dataclass(slots=True)
class Report:
    """What a node sends to its parent beside hits.

    Attributes:
        requests: Texts of requests and the ranks that made them (``encode_ranks``).
        changed: Numbers of cached requests that no longer fit.
        joined: Ranks that have joined.
        is_absent: Whether all ranks from the sender down have joined.
        lost: Ranks that are gone: rank, why, and whether they had closed.
        is_asking: Whether some rank has waited for long and wants to know for whom.
        stalls: Answers to that question: its number, and a ``StallReport``.
        waits: Of ranks that wait for each other: see ``CircleInspector``.
    """

    requests: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    changed: list[int] = field(default_factory=list[int])
    joined: list[int] = field(default_factory=list[int])
    is_absent: bool = False
    lost: list[tuple[int, str, bool]] = field(
        default_factory=list[tuple[int, str, bool]]
    )
    is_asking: bool = False
    stalls: list[list[Any]] = field(default_factory=list[list[Any]])
    waits: list[list[Any]] = field(default_factory=list[list[Any]])

    def is_empty(self) -> bool:
        """Say whether there is nothing to report."""
        return not (
            self.requests
            or self.changed
            or self.joined
            or self.is_absent
            or self.lost
            or self.is_asking
            or self.stalls
            or self.waits
        )

    def encode(self) -> bytes:
        """Return it as a message."""
        fields = [getattr(self, name) for name in self.__slots__]
        return REPORT + json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, message: bytes) -> "Report":
        """Read what ``encode`` wrote."""
        return cls(*json.loads(message[1:]))


def encode_bits(what: bytes, epoch: int, bits: int) -> bytes:
    """Write numbers of cached requests, given as the bits of a number, not zero."""
    first = (bits & -bits).bit_length() - 1 & ~7
    rest = bits >> first
    data = rest.to_bytes((rest.bit_length() + 7) // 8, "little")
    return _HEAD.pack(what, epoch & 0xFFFF, first) + data


def decode_bits(message: bytes) -> tuple[int, int]:
    """Return the epoch and the bits of a message of hits or runs."""
    _, epoch, first = _HEAD.unpack_from(message)
    return epoch, int.from_bytes(message[_HEAD.size :], "little") << first


def encode_commands(commands: list[tuple[Any, ...]]) -> bytes:
    """Write commands, each a verb and its values."""
    return COMMANDS + json.dumps(commands, separators=(",", ":")).encode()


def decode_commands(message: bytes) -> list[list[Any]]:
    """Read what ``encode_commands`` wrote."""
    return json.loads(message[1:])


def bits_of(number: int) -> list[int]:
    """Return the places of the bits that are set, ascending."""
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
    """Read what ``encode_ranks`` wrote."""
    ranks = 0
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        num_ranks = int(last or first) - int(first) + 1
        ranks |= ((1 << num_ranks) - 1) << int(first)
    return ranks


def format_ranks(ranks: int) -> str:
    """Name a set of ranks in a message: ``rank 3``, ``ranks 0-63,70``."""
    return ("rank " if ranks.bit_count() == 1 else "ranks ") + encode_ranks(ranks)
