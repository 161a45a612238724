"""What this process waits for, so that ranks which wait for each other are found.

Note [Ranks that wait for each other]
    Requests have names and may come in any order. Rounds of gradients are not
    negotiated: ``backward()`` waits until all ranks have come to the same round. So one
    rank may wait in a round for another that waits in a request of which the first has
    not heard, or in another optimizer's round. Horovod's ``backward()`` does not wait.

    Whoever has waited for longer than its patience notes what for, and has the root
    ask everyone twice: what it waits for, and whether it has come to what the others
    wait for. A wait counts if it was there both times, and a rank if all threads that
    ever waited or submitted anything are in such waits: so all of it was true at one
    time, between the questions, and slow ranks are never taken for stuck ones. Where
    ranks wait for each other in a circle, those in ``backward()`` *give way*: it
    returns, and its round goes on whenever the thread waits for anything else, to its
    end at ``step()`` or ``synchronize()`` at the latest.

    The first time this takes ``_FIRST_PATIENCE_S``; from then on, everyone asks sooner.
    Where orders agree nothing is noted, asked or sent.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from ronde.coordination.operations import Kind
from ronde.coordination.table import Table
from ronde.errors import UnpairedError

_logger = logging.getLogger("ronde")
_GAVE_WAY = (
    "backward() returned before its gradients were reduced (it waited in %s), since "
    "%s. The gradients are complete after optimizer.step() or optimizer.synchronize(); "
    "call the latter before you look at them or change them. This is not reported "
    "again."
)
_FIRST_PATIENCE_S = 0.25
_LATER_PATIENCE_S = 0.002
_LONGEST_PATIENCE_S = 5.0
_DRIVE_EVERY_S = 0.001
_EXPECT_ANSWER_S = 0.1
_LISTEN_EVERY_S = 0.002
_LISTEN_RARELY_S = 0.02


class Place(NamedTuple):
    """Where all ranks of a process set meet.

    Attributes:
        set_id: The process set.
        name: Of a request, or of an optimizer's gradients.
        number: The round of those; 0 for a request.
        ranks: The set's among all; empty for all.
    """

    set_id: int
    name: str
    number: int = 0
    ranks: tuple[int, ...] = ()

    @property
    def is_connect(self) -> bool:
        """Whether the ranks meet to connect."""
        return not self.number and self.name.startswith(f"{Kind.CONNECT.word}.")


class Blocked(NamedTuple):
    """A wait, as other ranks are told of it.

    Attributes:
        wait_id: Its number on this rank, used once.
        place: Where it waits.
        can_give_way: Whether it can be told to stop.
    """

    wait_id: int
    place: Place
    can_give_way: bool


class PutOff(Protocol):
    """A round that gave way and is not over."""

    def carry_on(self) -> None:
        """Go on as far as that needs no waiting; never raises."""
        ...


class Waiting:
    """One wait: the ``Look`` that the thread calls meanwhile.

    Attributes:
        place: Where.
        thread: Who will not do anything else before it is over.
        can_give_way: Whether ``tell()`` ends it.
        is_told: Whether that was called.
    """

    def __init__(
        self, waits: "Waits", place: Place, thread: int, *, can_give_way: bool
    ) -> None:
        self.place = place
        self.thread = thread
        self.can_give_way = can_give_way
        self.is_told = False
        self.number = 0
        self._waits = waits
        self._patience_s = 0.0
        self._ask_at_s = 0.0
        self._answer_by_s = 0.0

    def move(self, place: Place) -> None:
        """Note that it waits elsewhere from now on."""
        self._waits.forget(self)
        self.place = place

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._waits.forget(self)

    def __call__(self) -> float | None:
        """See ``Look``: ask when patience is over, and drive what was put off."""
        waits = self._waits
        has_put_off = waits.drive()
        if self.is_told:
            return None
        now = time.monotonic()
        if not self._patience_s:
            self._patience_s = waits.patience_s
            self._ask_at_s = now + self._patience_s
        if now >= self._ask_at_s:
            waits.note(self)
            waits.ask()
            self._patience_s = min(2 * self._patience_s, _LONGEST_PATIENCE_S)
            self._ask_at_s = now + self._patience_s
            self._answer_by_s = now + _EXPECT_ANSWER_S
        pause_s = self._ask_at_s - now
        if has_put_off:
            pause_s = min(pause_s, _DRIVE_EVERY_S)
        if self.number and self.can_give_way:
            is_soon = now < self._answer_by_s
            pause_s = min(pause_s, _LISTEN_EVERY_S if is_soon else _LISTEN_RARELY_S)
        return pause_s


class Waits:
    """The waits of one process in one session; any thread may call it.

    Attributes:
        patience_s: After so long a wait is looked into.
        ask: Has the root look into all ranks' waits.
    """

    def __init__(self) -> None:
        self.patience_s = _FIRST_PATIENCE_S
        self.ask: Callable[[], None] = lambda: None
        self._has_warned = False
        self._numbers = count(1)
        self._noted: dict[int, Waiting] = {}
        self._users: set[int] = set()
        self._begun: dict[tuple[int, str], int] = {}
        self._tables: dict[int, Table] = {}
        self._put_off: dict[PutOff, int] = {}

    def table(self, set_id: int) -> Table:
        """Return the table of a process set's requests."""
        return self._tables.setdefault(set_id, Table())

    def add_user(self) -> None:
        """Note that this thread takes part in collectives."""
        self._users.add(threading.get_ident())

    def begin(self, place: Place) -> None:
        """Note that this rank has come to a round, and will see it through."""
        self._begun[place.set_id, place.name] = place.number

    def waiting(
        self, place: Place, thread: int | None = None, *, can_give_way: bool = False
    ) -> Waiting:
        """Return the ``Look`` of a wait that this thread begins.

        Args:
            place: Where.
            thread: Who cannot do anything else meanwhile; None for this one.
            can_give_way: Whether it may be told to stop.
        """
        thread = threading.get_ident() if thread is None else thread
        return Waiting(self, place, thread, can_give_way=can_give_way)

    def note(self, waiting: Waiting) -> None:
        """Have the others told of a wait."""
        if not waiting.number:
            waiting.number = next(self._numbers)
            self._noted[waiting.number] = waiting

    def forget(self, waiting: Waiting) -> None:
        """Tell nobody of a wait any more: it is over."""
        self._noted.pop(waiting.number, None)
        waiting.number = 0

    def put_off(self, round_: PutOff, thread: int) -> None:
        """Have a round go on whenever ``thread`` waits for something."""
        self._put_off[round_] = thread

    def take_up(self, round_: PutOff) -> None:
        """Leave a round to its owner."""
        self._put_off.pop(round_, None)

    @property
    def has_put_off(self) -> bool:
        """Whether a round of this rank gave way and is not over."""
        return bool(self._put_off)

    def drive(self) -> bool:
        """Carry this thread's rounds on; say whether there are any."""
        if not self._put_off:
            return False
        own = threading.get_ident()
        for round_, thread in list(self._put_off.items()):
            if thread == own:
                round_.carry_on()
        return True

    def blocked(self) -> list[Blocked]:
        """Return all waits; none where some thread may still do something else."""
        noted = list(self._noted.values())
        if self._tables[0].has_joined or not self._is_stuck(noted):
            return []
        if not all(self._has_come_to(waiting.place) for waiting in noted):
            return []  # one is over, and its thread about to go on
        return [Blocked(w.number, w.place, w.can_give_way) for w in noted]

    def compare(self, places: Sequence[Place]) -> tuple[list[int], list[bool]]:
        """Return which waits there are still, and which places this rank came to."""
        still = [each.wait_id for each in self.blocked()]
        return still, [self._has_come_to(place) for place in places]

    def tell(self, wait_ids: Sequence[int], others: str) -> None:
        """Have waits give way, and look into the next ones sooner.

        One that cannot is of ranks that wait to connect, each with others: what it
        waits for fails.

        Args:
            wait_ids: Numbers of waits of this rank; may be over.
            others: Who waits for what meanwhile, for the log.
        """
        self.patience_s = _LATER_PATIENCE_S
        for wait_id in wait_ids:
            waiting = self._noted.get(wait_id)
            if waiting is None:
                continue
            if not waiting.can_give_way:
                self._fail_to_connect(waiting.place)
                continue
            if not self._has_warned:
                self._has_warned = True
                _logger.warning(_GAVE_WAY, waiting.place.name, others)
            waiting.is_told = True

    def _fail_to_connect(self, place: Place) -> None:
        entry = self.table(place.set_id).take(place.name)
        if entry is not None:
            entry.fail(UnpairedError(f"{place.name} is not what all ranks wait for."))

    def _is_stuck(self, noted: Sequence[Waiting]) -> bool:
        users = frozenset(self._users)
        self._users -= users - {thread.ident for thread in threading.enumerate()}
        return self._users <= {waiting.thread for waiting in noted}

    def _has_come_to(self, place: Place) -> bool:
        if place.number:
            return self._begun.get((place.set_id, place.name), 0) >= place.number
        table = self._tables.get(place.set_id)
        return table is not None and table.find(place.name) is not None
