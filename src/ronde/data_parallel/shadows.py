"""A rank without data keeps up with those that still train."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from ronde.data_parallel.bond import Key
from ronde.errors import CollectiveError


class Standing(NamedTuple):
    """How far a rank went with one follower: its key, and ``last_round``."""

    set_id: int
    number: int
    size: int
    last_round: int

    @property
    def key(self) -> Key:
        """Whose it is."""
        return Key(self.set_id, self.number, self.size)


class Follower(Protocol):
    """Something that reduces over ranks on its own, outside any coordinator."""

    @property
    def key(self) -> Key:
        """Its name, equal on all ranks that have it."""
        ...

    @property
    def last_round(self) -> int:
        """Number of the last reduction that this rank added something to."""
        ...

    def start_following(self) -> None:
        """Begin to connect with the other ranks, if they have not; returns at once."""
        ...

    def keep_up(self) -> None:
        """Take part, adding nothing, until all ranks do so.

        Raises:
            CollectiveError: A reduction failed.
        """
        ...

    def unbind(self, *, is_abrupt: bool = False) -> None:
        """Leave the other ranks.

        Args:
            is_abrupt: Have what is under way fail, here and there.
        """
        ...


class Shadows:
    """Threads that keep up, one for each follower: they need each other in no order.

    A follower that another rank has given up already is never called by anybody again.
    Here it may still be there, say because only this rank keeps an old optimizer; its
    thread waits in vain, and ``end`` gives it up too.

    Args:
        followers: Those of this rank.
    """

    def __init__(self, followers: Iterable[Follower]) -> None:
        self._shadows = [_Shadow(follower) for follower in followers]

    @property
    def standings(self) -> list[Standing]:
        """How far this rank went with each, without data or with."""
        return [
            Standing(*shadow.follower.key, shadow.follower.last_round)
            for shadow in self._shadows
        ]

    def end(self, living: Collection[Key]) -> None:
        """Wait for those that all ranks have, and give up the others.

        To be called once all ranks have joined.

        Args:
            living: Keys of the followers that all their ranks have.

        Raises:
            CollectiveError: One of them failed.
        """
        self.abort(keep=living)
        for shadow in self._shadows:
            if shadow.follower.key in living:
                shadow.wait()

    def abort(self, keep: Collection[Key] = ()) -> None:
        """Give up all but ``keep``, and wait for their threads."""
        for shadow in self._shadows:
            if shadow.follower.key not in keep:
                shadow.abort()


class _Shadow:
    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self._errors: list[CollectiveError] = []
        # Before this rank joins: where it asks for nothing, it has nothing to give.
        follower.start_following()
        self._thread = threading.Thread(
            target=self._keep_up, name="ronde-shadow", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()
        for error in self._errors:
            raise error

    def abort(self) -> None:
        self.follower.unbind(is_abrupt=True)
        self._thread.join()

    def _keep_up(self) -> None:
        try:
            self.follower.keep_up()
        except CollectiveError as error:
            self._errors.append(error)


def keep_up_until(
    followers: Iterable[Follower],
    *,
    join: Callable[[], int],
    exchange: Callable[[list[Standing]], list[list[Standing]]],
) -> int:
    """Keep up with the other ranks until all have joined; collective.

    Args:
        followers: What this rank has.
        join: Returns once all ranks have joined, with the one that did so last.
        exchange: Returns what every rank gives it, by rank; called after that.

    Returns:
        The rank that went on longest: of those that took part in the last step the one
        that ``join`` returned, if it is one of them.

    Raises:
        CollectiveError: A reduction failed, or a rank is gone.
    """
    shadows = Shadows(followers)
    try:
        last = join()
        everyone = exchange(shadows.standings)
    except BaseException:
        shadows.abort()
        raise
    counts = Counter(each.key for standings in everyone for each in standings)
    living = {key for key, num_ranks in counts.items() if num_ranks == key.size}
    shadows.end(living)
    return _last(everyone, living, last)


def _last(everyone: list[list[Standing]], living: Collection[Key], joined: int) -> int:
    """Return the rank that took the last step, whichever the others heard of last.

    Steps are not negotiated, so news of who has joined may be overtaken by them.
    """
    size = len(everyone)
    progress = [
        sum(s.last_round for s in standings if s.key in living and s.size == size)
        for standings in everyone
    ]
    if progress[joined] == max(progress):
        return joined
    return progress.index(max(progress))
