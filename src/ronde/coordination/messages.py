"""What travels between coordinators.

Upwards, from a rank to the one it reports to:

* *hits*, bits: cached requests that the sender and all below it are ready for.
* ``Report``: all else, rarely.

Downwards, from the root to everyone, who passes them on as they are:

* *runs*, bits: cached requests that all are ready for, to be run in ascending order.
* orders, a list: all else, rarely.

Note [Cached requests are bits]
    The root gives each request that may come again a number, which everyone remembers.
    Numbers are never given twice, until a reset forgets all of them and begins a new
    epoch. Hits say which epoch they mean, so that one that was under way while the
    root forgot is recognised: its sender learns of that too, and asks anew.
"""

import json
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_HEAD = struct.Struct("<cHI")
"""What it is, the epoch, and the number of the first bit."""
HITS = b"H"
RUNS = b"R"
REPORT = b"U"
ORDERS = b"D"


class Pending(NamedTuple):
    """What one rank waits for: its answer to the stall inspector.

    Attributes:
        rank: Who answers.
        has_joined: Whether it has joined.
        names: What it has submitted and waits for, the oldest first.
        ages_s: For how long, each.
        number: The question that this answers.
    """

    rank: int
    has_joined: bool
    names: tuple[str, ...]
    ages_s: tuple[float, ...]
    number: int


@dataclass(slots=True)
class Report:
    """What a node tells its parent beside hits.

    Attributes:
        requests: Texts of requests and the ranks that made them (``encode_ranks``).
        changed: Numbers of cached requests that no longer fit.
        joined: Ranks that have joined.
        is_absent: Whether all ranks from the sender down have joined.
        lost: Ranks that are gone: rank, why, and whether they said goodbye.
        is_asking: Whether some rank has waited for long and wants to know for whom.
        pending: Answers to that question.
        heard: What ranks say of their waits: see ``Inquiry``.
    """

    requests: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    changed: list[int] = field(default_factory=list[int])
    joined: list[int] = field(default_factory=list[int])
    is_absent: bool = False
    lost: list[tuple[int, str, bool]] = field(
        default_factory=list[tuple[int, str, bool]]
    )
    is_asking: bool = False
    pending: list[Pending] = field(default_factory=list[Pending])
    heard: list[list[Any]] = field(default_factory=list[list[Any]])

    def is_empty(self) -> bool:
        """Say whether there is nothing to tell."""
        return not (
            self.requests
            or self.changed
            or self.joined
            or self.is_absent
            or self.lost
            or self.is_asking
            or self.pending
            or self.heard
        )

    def encode(self) -> bytes:
        """Return it as a message."""
        fields = (
            self.requests,
            self.changed,
            self.joined,
            int(self.is_absent),
            self.lost,
            int(self.is_asking),
            self.pending,
            self.heard,
        )
        return REPORT + json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, message: bytes) -> "Report":
        """Read what ``encode`` wrote."""
        requests, changed, joined, absent, lost, asking, *rest = json.loads(message[1:])
        pending, heard = rest
        return cls(
            [(text, ranks) for text, ranks in requests],
            changed,
            joined,
            bool(absent),
            [(rank, reason, orderly) for rank, reason, orderly in lost],
            bool(asking),
            [
                Pending(rank, joined, tuple(names), tuple(ages), number)
                for rank, joined, names, ages, number in pending
            ],
            heard,
        )


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


def encode_orders(orders: list[tuple[Any, ...]]) -> bytes:
    """Write orders, each a word and its values."""
    return ORDERS + json.dumps(orders, separators=(",", ":")).encode()


def decode_orders(message: bytes) -> list[list[Any]]:
    """Read what ``encode_orders`` wrote."""
    return json.loads(message[1:])
