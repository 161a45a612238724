"""What stands before each line of a rank's output."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ronde.errors import UsageError
from ronde.render.lines import Lines

_TIME = "time"


class Place(StrEnum):
    """How much is said of where a line comes from."""

    AUTO = "auto"
    """The rank, and its host where there are several."""
    RANK = "rank"
    HOST = "host"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Tag:
    """What stands before each line.

    Attributes:
        place: The rank, its host and rank, or nothing.
        has_time: Whether the time of day comes first.
    """

    place: Place = Place.AUTO
    has_time: bool = False

    def places(self, hosts: Sequence[str]) -> tuple[bytes, ...]:
        """Return what to say of each rank's place: ``[3]``, ``[node2:3]`` or nothing.

        Args:
            hosts: Name of each rank's host, by rank.
        """
        place = self.place
        if place is Place.AUTO:
            place = Place.HOST if len(set(hosts)) > 1 else Place.RANK
        if place is Place.NONE:
            return (b"",) * len(hosts)
        names = [f"{h}:" if place is Place.HOST else "" for h in hosts]
        return tuple(
            f"[{name}{rank}]".encode("utf-8", "backslashreplace")
            for rank, name in enumerate(names)
        )


def parse_tag(text: str) -> Tag:
    """Read what ``--tag`` says: ``rank``, ``host``, ``none``, each with ``,time``.

    Raises:
        UsageError: It says something else.
    """
    words = [word.strip() for word in text.split(",")]
    places = [word for word in words if word != _TIME]
    if len(places) > 1 or words.count(_TIME) > 1 or not set(places) <= set(Place):
        raise UsageError(
            f"--tag must be rank, host, time or none, or one of them and time, got "
            f"{text!r}. Type: --tag host,time"
        )
    return Tag(Place(places[0]) if places else Place.AUTO, _TIME in words)


class Tagger:
    """Puts tags before lines.

    Args:
        tag: What a line is to begin with.
    """

    def __init__(self, tag: Tag) -> None:
        self._tag = tag
        self._places: tuple[bytes, ...] = ()
        self._second = 0
        self._time_of_day = b""

    def begin(self, hosts: Sequence[str]) -> None:
        """Take note of where each rank is."""
        self._places = self._tag.places(hosts)

    def tagged(self, rank: int, lines: Lines) -> bytes:
        """Return lines of a rank as they are to be shown, with their last end.

        One that goes on from what was shown before has ``+`` in place of the blank.
        """
        first = self.tag(rank)
        head = first
        if lines.is_continuation and first:
            head = first[:-1] + b"+"
        return head + lines.text.replace(b"\n", b"\n" + first) + b"\n"

    def tag(self, rank: int) -> bytes:
        """Return what stands before a line of a rank, with a blank, or nothing."""
        place = self._places[rank]
        if not self._tag.has_time:
            return place + b" " if place else b""
        now_s = time.time()
        if int(now_s) != self._second:
            self._second = int(now_s)
            self._time_of_day = time.strftime("%H:%M:%S").encode()
        told = b"%s.%03d " % (self._time_of_day, int(now_s % 1 * 1000))
        return told + place + b" " if place else told
