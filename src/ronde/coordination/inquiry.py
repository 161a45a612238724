"""The root's part in finding ranks that wait for each other: asks, and judges.

Where nobody can give way, but all ranks of a set wait to connect, each with others, all
of them learn that, and compare what they have.

See Note [Ranks that wait for each other] in ``waits``.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ronde.coordination.root import Root
from ronde.coordination.waits import Blocked, Place

_ANSWER_WITHIN_S = 0.5
"""A rank that is too busy to answer does not wait for anybody."""
Waits = Mapping[int, Sequence[Blocked]]
"""What each rank waits for that can do nothing else; others are not there."""


class Inquiry:
    """Asks all ranks what they wait for, and has some give way.

    Not thread-safe: whoever drives the coordinator calls it.

    Args:
        root: Carries questions and answers.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._size = root.tree.size
        self._is_wanted = False
        self._number = 0
        self._deadline_s = 0.0
        self._has_answered: set[int] = set()
        self._waits: dict[int, list[Blocked]] = {}
        self._places: list[Place] = []
        self._here: dict[int, list[bool]] = {}

    def has_heard(self) -> bool:
        """Say whether something is to be looked into."""
        return bool(self._root.heard)

    def look(self) -> None:
        """Take answers in, and go on where all are there or it is time."""
        heard, self._root.heard = self._root.heard, []
        for word, *values in heard:
            if word == "ask":
                self._is_wanted = True
            elif values[0] == self._number:
                self._take(*values[1:])
        if self._deadline_s:
            is_late = time.monotonic() >= self._deadline_s
            if len(self._has_answered) < self._size and not is_late:
                return
            self._conclude()
        if self._is_wanted and not self._deadline_s:
            self._is_wanted = False
            self._places, self._waits, self._here = [], {}, {}
            self._ask()

    def _ask(self) -> None:
        self._number += 1
        self._has_answered.clear()
        self._deadline_s = time.monotonic() + _ANSWER_WITHIN_S
        self._root.inquire(self._number, self._places)

    def _take(self, rank: int, first: list[Any], second: list[bool]) -> None:
        """Note an answer: waits and nothing, or numbers of waits and a bit a place."""
        self._has_answered.add(rank)
        if self._places:
            still = [each for each in self._waits.get(rank, ()) if each[0] in first]
            self._waits[rank] = still
            self._here[rank] = second
        else:
            self._waits[rank] = [_decode(each) for each in first]

    def _conclude(self) -> None:
        self._deadline_s = 0.0
        self._waits = {
            rank: waits
            for rank, waits in self._waits.items()
            if waits and rank in self._has_answered
        }
        if not self._places:
            places = {each.place for waits in self._waits.values() for each in waits}
            self._places = sorted(places)
            if any(
                each.can_give_way or each.place.is_connect
                for waits in self._waits.values()
                for each in waits
            ):
                self._ask()
            return
        circles = find_circles(self._waits, self._size, self._has_come)
        told = {
            rank: [each.wait_id for each in waits if each.can_give_way]
            for rank, waits in circles.items()
        }
        told = {rank: wait_ids for rank, wait_ids in told.items() if wait_ids}
        told = told or find_unpaired(circles, self._size)
        if told:
            where = [(rank, w[0].place.name) for rank, w in sorted(circles.items())]
            self._root.give_way(list(told.items()), where)

    def _has_come(self, rank: int, place: Place) -> bool:
        here = self._here.get(rank)
        return here is not None and here[self._places.index(place)]


def find_circles(
    waits: Waits, size: int, has_come: Callable[[int, Place], bool]
) -> dict[int, list[Blocked]]:
    """Return the waits that keep each other from ending.

    Args:
        waits: What each rank waits for that can do nothing else.
        size: Number of ranks.
        has_come: Whether a rank has come to a place.

    Returns:
        For each rank that waits for itself in the end, its waits that nobody but such
        ranks can end.
    """
    missing = {
        (rank, each): {
            other
            for other in each.place.ranks or range(size)
            if not has_come(other, each.place)
        }
        for rank, blocked in waits.items()
        for each in blocked
    }
    # A rank may still come anywhere if it is free, or if one of its waits can end.
    stuck = set(missing)
    while True:
        held = {
            rank
            for rank, blocked in waits.items()
            if all((rank, each) in stuck for each in blocked)
        }
        ended = {key for key in stuck if not missing[key] & held}
        if not ended:
            break
        stuck -= ended
    edges: dict[int, set[int]] = {}
    for rank, each in stuck:
        edges.setdefault(rank, set()).update(missing[rank, each] & waits.keys())
    circles = {rank for rank in edges if rank in _reachable(edges, rank)}
    return {
        rank: [each for each in waits[rank] if (rank, each) in stuck]
        for rank in circles
    }


def find_unpaired(circles: Waits, size: int) -> dict[int, list[int]]:
    """Return the waits in sets of which every rank waits to connect.

    Args:
        circles: The waits that keep each other from ending.
        size: Number of ranks.

    Returns:
        Numbers of waits, by rank; one a rank and set.
    """
    by_set: dict[int, dict[int, Blocked]] = {}
    for rank, waits in circles.items():
        for each in waits:
            if each.place.is_connect:
                by_set.setdefault(each.place.set_id, {}).setdefault(rank, each)
    unpaired: dict[int, list[int]] = {}
    for waits in by_set.values():
        place = next(iter(waits.values())).place
        if len(waits) == len(place.ranks or range(size)):
            for rank, each in waits.items():
                unpaired.setdefault(rank, []).append(each.wait_id)
    return unpaired


def _reachable(edges: Mapping[int, set[int]], start: int) -> set[int]:
    found: set[int] = set()
    left = list(edges[start])
    while left:
        rank = left.pop()
        if rank not in found:
            found.add(rank)
            left += edges.get(rank, ())
    return found


def _decode(sent: Sequence[Any]) -> Blocked:
    wait_id, (set_id, name, number, ranks), can_give_way = sent
    return Blocked(wait_id, Place(set_id, name, number, tuple(ranks)), can_give_way)
