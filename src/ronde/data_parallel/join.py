"""A rank without data takes part, with zeros, in what others still reduce."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from ronde.data_parallel.group import ReducerKey
from ronde.errors import CollectiveError


class JoinProgress(NamedTuple):
    """How far a rank went with one participant: its key, and ``last_round``."""

    set_id: int
    number: int
    size: int
    last_round: int

    @property
    def key(self) -> ReducerKey:
        return ReducerKey(*self[:3])


class JoinParticipant(Protocol):
    """Something that reduces over ranks on its own, outside any coordinator."""

    @property
    def key(self) -> ReducerKey:
        """Its name, equal on all ranks that have it."""
        ...

    @property
    def last_round(self) -> int:
        """Number of the last reduction that this rank added something to."""
        ...

    def start_connecting(self) -> None:
        """Begin to connect with the other ranks, if they have not; returns at once."""
        ...

    def participate_with_zeros(self) -> None:
        """Take part, adding nothing, until all ranks do so, or a reduction fails."""
        ...

    def unbind(self, *, is_abrupt: bool = False) -> None:
        """Leave the other ranks; if abruptly, what is under way fails everywhere."""
        ...


class JoinParticipants:
    """A thread for each participant: they need each other in no order.

    A participant that another rank has given up already is never called by anybody
    again. Here it may still be there, say because only this rank keeps an old
    optimizer; its thread waits in vain, and ``end`` gives it up too.
    """

    def __init__(self, participants: Iterable[JoinParticipant]) -> None:
        self._threads: dict[JoinParticipant, threading.Thread] = {}
        self._errors: list[tuple[ReducerKey, CollectiveError]] = []
        for each in participants:
            # Before this rank joins: where it asks for nothing, it has nothing to give.
            each.start_connecting()
            self._threads[each] = thread = threading.Thread(
                target=self._run, args=(each,), name="ronde-join", daemon=True
            )
            thread.start()

    def progress(self) -> list[JoinProgress]:
        """Return how far this rank went with each, without data or with."""
        return [JoinProgress(*each.key, each.last_round) for each in self._threads]

    def end(self, living: Collection[ReducerKey]) -> None:
        """Wait for those that all ranks have, once all have joined; abort the others.

        Raises what one of them failed with.
        """
        self.abort(keep=living)
        for thread in self._threads.values():
            thread.join()
        for key, error in self._errors:
            if key in living:
                raise error

    def abort(self, keep: Collection[ReducerKey] = ()) -> None:
        """Give up all but ``keep``, and wait for their threads."""
        for each, thread in self._threads.items():
            if each.key not in keep:
                each.unbind(is_abrupt=True)
                thread.join()

    def _run(self, participant: JoinParticipant) -> None:
        try:
            participant.participate_with_zeros()
        except CollectiveError as error:
            self._errors.append((participant.key, error))


def participate_until_all_joined(
    participants: Iterable[JoinParticipant],
    *,
    join: Callable[[], int],
    exchange: Callable[[list[JoinProgress]], list[list[JoinProgress]]],
) -> int:
    """Take part with zeros until all have joined; collective.

    Args:
        participants: What this rank has.
        join: Returns once all ranks have joined, with the one that did so last.
        exchange: Returns what every rank gives it, by rank; called after that.

    Returns:
        The rank that went on longest: of those that took part in the last step the one
        that ``join`` returned, if it is one of them. Steps are not negotiated, so news
        of who has joined may be overtaken by them.

    Raises:
        CollectiveError: A reduction failed, or a rank is gone.
    """
    threads = JoinParticipants(participants)
    try:
        last = join()
        everyone = exchange(threads.progress())
    except BaseException:
        threads.abort()
        raise
    counts = Counter(each.key for progress in everyone for each in progress)
    living = {key for key, num_ranks in counts.items() if num_ranks == key.size}
    threads.end(living)
    size = len(everyone)
    num_rounds = [
        sum(p.last_round for p in progress if p.key in living and p.size == size)
        for progress in everyone
    ]
    most = max(num_rounds)
    return last if num_rounds[last] == most else num_rounds.index(most)
