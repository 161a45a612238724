"""The status of one rank, as a value and as one line of JSON."""

import json
from typing import Any, NamedTuple, cast

from ronde.plain_values import PlainValueError, from_plain, to_plain
from ronde.status.steps import StepTime
from ronde.world.environment import MAX_STATUS_BYTES

UNKNOWN = -1


class PendingCollective(NamedTuple):
    """A collective that a rank has entered and has not left."""

    name: str  # of the tensor or bucket; in a torch process group the kind
    group: str  # ``all``, ``set 2``, or the name of a torch process group
    kind: str  # such as ``allreduce``
    sequence: int  # its number among the group's calls; 0 if the name identifies it
    num_bytes: int  # this rank's input; 0 if unknown
    age_s: float
    ranks: tuple[int, ...] = ()  # of the group; empty for all, (UNKNOWN,) if unknown

    @property
    def key(self) -> tuple[str, str, str, int]:
        """The fields of a call that are equal on all of its ranks."""
        return self.name, self.group, self.kind, self.sequence

    def is_same(self, other: "PendingCollective") -> bool:
        """Return True if both are the same call; different groups may share a name."""
        own, others = self.ranks, other.ranks
        is_group = own == others or UNKNOWN in own or UNKNOWN in others
        return self.key == other.key and is_group


class RankStatus(NamedTuple):
    """The status of one rank at the time of a report."""

    pid: int  # of the process that reports, which may be a wrapper's child
    step: int  # the number of applied steps; UNKNOWN without an optimizer of ronde
    collectives: tuple[PendingCollective, ...]  # the oldest ones, the oldest first
    num_collectives: int
    rss_bytes: int
    device_bytes: int  # allocated by torch on the current device; 0 without one
    progress: dict[str, float | None]  # the program's figures; None: not finite
    steps: tuple[StepTime, ...] = ()  # some of the last seconds, the newest last


def name_group(name: str, description: str) -> str:
    """Return the description of a torch group, or ``group 1`` for one without it."""
    return f"group {name}" if description in ("", "undefined") else description


def encode_status(status: RankStatus) -> str:
    """Return a status as one line, shortened to at most ``MAX_STATUS_BYTES``."""
    line = _dump(status)
    if len(line) > MAX_STATUS_BYTES:
        first = [each._replace(ranks=(UNKNOWN,)) for each in status.collectives[:1]]
        short = status._replace(collectives=tuple(first), progress={}, steps=())
        line = _dump(short)
    return line


def _dump(status: RankStatus) -> str:
    plain = cast("dict[str, object]", to_plain(status._replace(steps=())))
    # As lists, which are short.
    plain["steps"] = [[round(value, 6) for value in each] for each in status.steps]
    return json.dumps(plain, separators=(",", ":"))


def decode_status(plain: Any) -> RankStatus | None:  # noqa: ANN401  any JSON
    """Return the status in a JSON value; None if another version wrote it."""
    try:
        steps = [StepTime(int(n), *map(float, parts)) for n, *parts in plain["steps"]]
        found = from_plain(RankStatus, {**plain, "steps": []})
        return found._replace(steps=tuple(steps))
    except (PlainValueError, LookupError, TypeError, ValueError):
        return None
