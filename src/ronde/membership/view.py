"""A view, its members, and the messages between a rank and its controller.

A *worker* is a process of a job, with an id that it keeps and no other ever gets. A
*view* is the workers that train together, its *members*, in the order of their ranks.
Views are numbered, and belong to one start of the job (``RONDE_EPOCH``).

Note [From one view to the next]
    A change begins with ``ViewEnded`` (a member was lost: break off) or with
    ``AskStep`` and ``StopAfter`` (planned: all stop after the same step). Each member
    then has nothing of the old view under way and sends ``Settled``, as does a new
    worker. Once all that live have, ``ViewBegins`` goes to the members of the next
    view. It alone holds the view's key, under which they meet, so that a process that
    was left out, stopped or cut off can reach nobody.

    Data-parallel ranks are never more than one step apart, and a member that was asked
    for its step begins none beyond the next until it hears when to stop. So the step
    after the largest is one that all can still stop after.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar, cast, get_args

from ronde.errors import LaunchError
from ronde.plain_values import PlainValueError, from_plain, shorten, to_plain
from ronde.world import World

T = TypeVar("T")
NO_VIEW = -1
NEW = -1  # the step of a worker that has no state yet

_SHORT = 256  # letters


class Worker(NamedTuple):
    """A process of a job, and where it runs."""

    id: int  # its own, for good
    host: str
    slot: int  # which of its host's, from 0 on


class Settled(NamedTuple):
    """From a rank: nothing of an earlier view is under way here.

    Unasked, it means that this rank cannot go on in its view.
    """

    view: int  # the last that it took part in; NO_VIEW for a new worker
    step: int  # of the state that it has: how many were applied; NEW without any
    applied: int  # how many it had applied, where that state is an older copy
    reason: str  # why it cannot go on, in half a sentence; empty if it was asked


class AtStep(NamedTuple):
    """From a rank, to ``AskStep``: so many it has applied."""

    view: int
    step: int


class Entered(NamedTuple):
    """From a rank: it is connected and has the state that counts."""

    view: int
    step: int  # how many steps are applied in it; fewer than before if state was lost


class Done(NamedTuple):
    """From a rank: it has applied the last step, and waits for ``Finish``."""

    view: int
    step: int


class Failed(NamedTuple):
    """From a rank: an exception that nobody caught ends it; the others need not wait.

    Until the process is gone may take seconds.
    """

    view: int
    step: int
    reason: str  # such as ``ValueError: the program is wrong``


class ViewEnded(NamedTuple):
    """To a rank: the view is over; break off whatever is under way."""

    view: int
    reason: str  # such as ``rank 2 on node1 was killed by SIGKILL``


class AskStep(NamedTuple):
    """To a rank: how many steps have you applied? A planned change is to come."""

    view: int


class StopAfter(NamedTuple):
    """To a rank: settle when so many steps are applied."""

    view: int
    step: int
    reason: str


class Save(NamedTuple):
    """To a rank: write a checkpoint after this step: all hosts are about to end."""

    view: int


class ViewBegins(NamedTuple):
    """To a rank: a view, as a difference to the last one, or whole."""

    view: int
    key: str  # secret, of this view alone
    base: int  # the view it differs from; NO_VIEW where it is whole
    gone: tuple[int, ...]  # members of ``base`` that are not in it
    new: tuple[Worker, ...]  # its other members, in the order of their ranks
    source: int  # the member whose state counts: one that has applied the most steps
    step: int  # how many it has applied; NEW where nobody has any state
    is_equal: bool  # all have that state already
    reason: str


class Leave(NamedTuple):
    """To a rank: the next view is without it; exit with 0."""

    reason: str


class Finish(NamedTuple):
    """To a rank: all have applied the last step."""


FromRank = Settled | AtStep | Entered | Done | Failed
ToRank = ViewEnded | AskStep | StopAfter | Save | ViewBegins | Leave | Finish
FROM_RANK: tuple[type[FromRank], ...] = get_args(FromRank)
TO_RANK: tuple[type[ToRank], ...] = get_args(ToRank)


def encode_text(message: FromRank | ToRank) -> str:
    """Return a message as one line of JSON."""
    plain = cast("dict[str, object]", to_plain(message))
    return json.dumps({"is": type(message).__name__, **plain})


def decode_text(text: str, kinds: tuple[type[T], ...]) -> T:
    """Return the message of a line; ``LaunchError`` if it is none of ``kinds``."""
    # Thousands of ranks settle with the same short text.
    decode = _decode_again if len(text) <= _SHORT else _decode
    return cast("T", decode(text, kinds))


def _decode(text: str, kinds: tuple[type[T], ...]) -> T:
    try:
        values = cast("dict[str, object]", json.loads(text))
        name = values.pop("is", None)
        kind = next(each for each in kinds if each.__name__ == name)
        return from_plain(kind, values)
    except (ValueError, AttributeError, TypeError, StopIteration, PlainValueError):
        names = ", ".join(kind.__name__ for kind in kinds)
        raise LaunchError(
            f"a rank's message must be one of {names}, got {shorten(text)}."
        ) from None


_decode_again = lru_cache(maxsize=64)(_decode)


def order_ranks(
    survivors: Sequence[tuple[int, int]], newcomers: Sequence[int]
) -> list[int]:
    """Return worker ids in the order of their new ranks.

    ``survivors`` are id and former rank, ascending by rank. They keep their order,
    and their rank where it exists and no lower one would be left without a survivor
    or newcomer for it; newcomers fill the gaps, rank 0 never.
    """
    size = len(survivors) + len(newcomers)
    ordered = [-1] * size
    for index, (worker, rank) in enumerate(survivors):
        most = size - (len(survivors) - index)
        ordered[min(rank, most) if index else 0] = worker
    rest = iter(newcomers)
    return [next(rest) if worker < 0 else worker for worker in ordered]


class View(NamedTuple):
    """The members of one view, in the order of their ranks."""

    view: int
    members: tuple[Worker, ...]

    def next(self, begins: ViewBegins) -> "View":
        """Return the view that begins, which is whole or differs from this one."""
        if begins.base == NO_VIEW:
            return View(begins.view, begins.new)
        gone = set(begins.gone)
        kept = [(w, rank) for rank, w in enumerate(self.members) if w.id not in gone]
        by_id = {worker.id: worker for worker in begins.new}
        by_id |= {worker.id: worker for worker, _ in kept}
        order = order_ranks(
            [(worker.id, rank) for worker, rank in kept],
            [worker.id for worker in begins.new],
        )
        return View(begins.view, tuple(by_id[worker] for worker in order))

    @property
    def ranks(self) -> dict[int, int]:
        """Return each member's rank, by its id, in the order of the ranks."""
        return {worker.id: rank for rank, worker in enumerate(self.members)}

    def rank_of(self, worker: int) -> int:
        return next(r for r, w in enumerate(self.members) if w.id == worker)

    def worlds(self) -> list[World]:
        """Return each member's world, by rank."""
        return World.of_slots([worker[1:] for worker in self.members])

    def world_of(self, worker: int) -> World:
        return self.worlds()[self.rank_of(worker)]
