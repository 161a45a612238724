"""The status of one rank as a value, and as one line of JSON."""

import json
from typing import NamedTuple

from ronde.plain_values import PlainValueError, from_plain, to_plain

UNKNOWN = -1
MAX_BYTES = 8 << 10
"""Of a line: the kernel takes so much whole or not at all."""


class PendingCollective(NamedTuple):
    """One collective that a rank has begun and that is not over."""

    name: str  # of the tensor or bucket; of a torch process group's call its kind
    group: str  # ``all``, ``set 2``, or the name of a torch process group
    kind: str  # such as ``allreduce``
    sequence: int  # its number among the group's calls; 0 where the name identifies it
    num_bytes: int  # that this rank puts in; 0 if unknown
    age_s: float  # since when
    ranks: tuple[int, ...] = ()  # of the group; empty for all, (UNKNOWN,) if unknown

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What is equal on all ranks that are in it."""
        return self.name, self.group, self.kind, self.sequence


class RankStatus(NamedTuple):
    """What one rank was doing when it looked."""

    pid: int  # of the process that reports, which a wrapper may have started
    step: int  # how many steps were applied; UNKNOWN without an optimizer of ours
    collectives: tuple[PendingCollective, ...]  # the oldest first; of many only some
    num_collectives: int  # how many are under way in all
    rss_bytes: int  # resident memory
    device_bytes: int  # allocated by torch on the current device; 0 without one
    progress: dict[str, float]  # what the program reports, by its names


def encode_status(status: RankStatus) -> str:
    """Return a status as a line of at most ``MAX_BYTES``; what is too long is cut."""
    line = _dump(status)
    if len(line) > MAX_BYTES:
        first = [each._replace(ranks=(UNKNOWN,)) for each in status.collectives[:1]]
        line = _dump(status._replace(collectives=tuple(first), progress={}))
    return line


def _dump(status: RankStatus) -> str:
    return json.dumps(to_plain(status), separators=(",", ":"))


def decode_status(plain: object) -> RankStatus | None:
    """Return the status of a JSON value; None if another version of ronde wrote it."""
    try:
        return from_plain(RankStatus, plain)
    except PlainValueError:
        return None
