"""A rank without data keeps up with those that still train."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from ronde.data_parallel.bond import Key
from ronde.errors import CollectiveError


class Follower(Protocol):
    """Something that reduces over ranks on its own, outside any coordinator."""

    @property
    def key(self) -> Key:
        """Its name, equal on all ranks that have it."""
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
        self._shadows = {follower.key: _Shadow(follower) for follower in followers}

    @property
    def keys(self) -> list[Key]:
        """What is kept up with."""
        return list(self._shadows)

    def end(self, living: Collection[Key]) -> None:
        """Wait for those that all ranks have, and give up the others.

        To be called once all ranks have joined.

        Args:
            living: Keys of the followers that all their ranks have.

        Raises:
            CollectiveError: One of them failed.
        """
        self.abort(keep=living)
        for key in self._shadows.keys() & set(living):
            self._shadows[key].wait()

    def abort(self, keep: Collection[Key] = ()) -> None:
        """Give up all but ``keep``, and wait for their threads."""
        for key in self._shadows.keys() - set(keep):
            self._shadows[key].abort()


class _Shadow:
    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._errors: list[CollectiveError] = []
        self._thread = threading.Thread(
            target=self._keep_up, name="ronde-shadow", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()
        for error in self._errors:
            raise error

    def abort(self) -> None:
        self._follower.unbind(is_abrupt=True)
        self._thread.join()

    def _keep_up(self) -> None:
        try:
            self._follower.keep_up()
        except CollectiveError as error:
            self._errors.append(error)


def keep_up_until(
    followers: Iterable[Follower],
    join: Callable[[], int],
    exchange: Callable[[list[Key]], list[list[Key]]],
) -> int:
    """Keep up with the other ranks until all have joined; collective.

    Args:
        followers: What this rank has.
        join: Returns once all ranks have joined, with the one that did so last.
        exchange: Returns what every rank gives it; called after that.

    Returns:
        What ``join`` returned.

    Raises:
        CollectiveError: A reduction failed, or a rank is gone.
    """
    shadows = Shadows(followers)
    try:
        last = join()
        counts = Counter(key for keys in exchange(shadows.keys) for key in keys)
    except BaseException:
        shadows.abort()
        raise
    shadows.end({key for key, num_ranks in counts.items() if num_ranks == key.size})
    return last
