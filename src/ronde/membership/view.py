"""A view, its members, and the messages between a rank and its controller.

A *worker* is a process of a job, with a unique id. A *view* is the workers that train
together, its *members*, in the order of their ranks. Views are numbered, and belong to
one start of the job (``RONDE_EPOCH``).

Note [From one view to the next]
    A change begins with ``ViewEnded`` (a member was lost: abort) or with ``AskStep``
    and ``StopAfter`` (a planned change: all stop after the same step). Each member then
    ends all operations of the old view and sends ``Settled``, as does a new worker.
    When all living workers have sent it, the members of the next view receive
    ``ViewBegins``. Only this message has the key for the rendezvous of the view, so a
    process that was left out, stopped or disconnected cannot reach the members.

    Data-parallel ranks are never more than one step apart. A member that has answered
    ``AskStep`` begins no step beyond the next until it receives ``StopAfter``. So all
    can still stop after the step that follows the largest number in an answer.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar, cast, get_args

from ronde.errors import LaunchError
from ronde.plain_values import PlainValueError, decode_message, encode_message
from ronde.world import World

T = TypeVar("T")
NO_VIEW = -1
NEW = -1  # the step of a worker that has no state yet

_SHORT = 256  # characters


class Worker(NamedTuple):
    """A process of a job, and the slot of a host that it runs in."""

    id: int  # unique in the job
    host: str
    slot: int  # of its host, from 0 on


class Settled(NamedTuple):
    """From a rank: all its operations of earlier views have ended.

    Without a request for it, it also says that the rank cannot continue in its view.
    """

    view: int  # the last view that it was in; NO_VIEW for a new worker
    step: int  # the number of steps in its state; NEW without a state
    applied: int  # the number it had applied, if its state is an older copy
    reason: str  # why it cannot continue, for a sentence; empty after a request


class AtStep(NamedTuple):
    """From a rank: its number of applied steps, the answer to ``AskStep``."""

    view: int
    step: int


class Entered(NamedTuple):
    """From a rank: it is connected and has the state of the source."""

    view: int
    step: int  # of that state; smaller than before if state was lost


class Done(NamedTuple):
    """From a rank: it has applied the last step, and waits for ``Finish``."""

    view: int
    step: int


class Failed(NamedTuple):
    """From a rank: it ends with an uncaught exception, which may take seconds."""

    view: int
    step: int
    reason: str  # such as ``ValueError: the program is wrong``


class ViewEnded(NamedTuple):
    """To a rank: abort all operations, because the view has ended."""

    view: int
    reason: str  # such as ``rank 2 on node1 was killed by SIGKILL``


class AskStep(NamedTuple):
    """To a rank: report the number of applied steps, for a planned change."""

    view: int


class StopAfter(NamedTuple):
    """To a rank: settle after this number of steps."""

    view: int
    step: int
    reason: str


class Save(NamedTuple):
    """To a rank: write a checkpoint after this step, as all hosts are about to end."""

    view: int


class ViewBegins(NamedTuple):
    """To a rank: the next view, complete or as a difference from another view."""

    view: int
    key: str  # the secret of this view
    base: int  # the view it differs from; NO_VIEW if it is complete
    gone: tuple[int, ...]  # members of ``base`` that are not in it
    new: tuple[Worker, ...]  # its other members, in the order of their ranks
    source: int  # a member that has applied the most steps, and broadcasts its state
    step: int  # the number of these steps; NEW if no member has a state
    is_equal: bool  # all members already have that state
    reason: str


class Leave(NamedTuple):
    """To a rank: exit with 0, because it is not in the next view."""

    reason: str


class Finish(NamedTuple):
    """To a rank: all ranks have applied the last step."""


FromRank = Settled | AtStep | Entered | Done | Failed
ToRank = ViewEnded | AskStep | StopAfter | Save | ViewBegins | Leave | Finish
FROM_RANK: tuple[type[FromRank], ...] = get_args(FromRank)
TO_RANK: tuple[type[ToRank], ...] = get_args(ToRank)


def encode_text(message: FromRank | ToRank) -> str:
    return encode_message(message)


def decode_text(text: str, kinds: tuple[type[T], ...]) -> T:
    """Decode a message; raise LaunchError if it is not one of ``kinds``."""
    # Thousands of ranks send the same short text.
    decode = _decode_again if len(text) <= _SHORT else _decode
    return cast("T", decode(text, kinds))


def _decode(text: str, kinds: tuple[type[T], ...]) -> T:
    try:
        return decode_message(text, kinds)
    except PlainValueError as error:
        raise LaunchError(f"malformed membership message: {error}") from None


_decode_again = lru_cache(maxsize=64)(_decode)


def order_ranks(
    survivors: Sequence[tuple[int, int]], newcomers: Sequence[int]
) -> list[int]:
    """Return worker ids in the order of their new ranks.

    Survivors keep their order and, if possible, their ranks. Rank 0 is the first
    survivor. New workers fill the gaps.

    Args:
        survivors: Ids and former ranks, ascending by rank.
        newcomers: Ids.
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
        """Return the next view; ``begins`` may be a difference from this view."""
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
        """A dict from worker id to rank, in rank order."""
        return {worker.id: rank for rank, worker in enumerate(self.members)}

    def rank_of(self, worker: int) -> int:
        return next(r for r, w in enumerate(self.members) if w.id == worker)

    def worlds(self) -> list[World]:
        return World.of_slots([worker[1:] for worker in self.members])

    def world_of(self, worker: int) -> World:
        return self.worlds()[self.rank_of(worker)]
