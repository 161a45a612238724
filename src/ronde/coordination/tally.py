"""Who is ready for what: a rank itself, and all below each of its children."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Asking:
    """The texts for one name so far.

    Attributes:
        told: The ranks that sent each text, a bit each.
        contributors: Who has told of the name.
    """

    told: dict[str, int] = field(default_factory=dict[str, int])
    contributors: set[int] = field(default_factory=set[int])


class Tally:
    """Counts until all contributors are ready.

    A contributor that is absent, for all ranks from there on have joined, is ready for
    everything.

    Attributes:
        is_stirred: Whether something may have become complete since ``take_complete``.
    """

    def __init__(self, contributors: Sequence[int]) -> None:
        """Count for a rank and its children."""
        self.is_stirred = False
        self._contributors = tuple(contributors)
        self._have = dict.fromkeys(self._contributors, 0)
        self._asking: dict[str, Asking] = {}
        self._absent: set[int] = set()

    @property
    def is_all_absent(self) -> bool:
        """Whether all ranks from here down have joined."""
        return len(self._absent) == len(self._contributors)

    def hit(self, contributor: int, bits: int) -> None:
        """Note the cached requests that a contributor is ready for."""
        self._have[contributor] |= bits
        self.is_stirred = True

    def hear(self, contributor: int, name: str, text: str, ranks: int) -> None:
        """Note a request by its text, and the ranks that made it."""
        asking = self._asking.get(name)
        if asking is None:
            asking = self._asking[name] = Asking()
        asking.told[text] = asking.told.get(text, 0) | ranks
        asking.contributors.add(contributor)
        self.is_stirred = True

    def leave(self, contributor: int) -> None:
        """Note that all ranks of a contributor have joined."""
        self._absent.add(contributor)
        self.is_stirred = True

    def return_all(self) -> None:
        """Note that nobody counts as joined any more."""
        self._absent.clear()

    def take_ready(self, live: int) -> int:
        """Return the bits that all contributors have, and take them off.

        Args:
            live: The requests that are cached.
        """
        have = self._have
        if self.is_all_absent:
            # What some of them still waited for when they joined.
            ready = 0
            for bits in have.values():
                ready |= bits
        else:
            ready = live
            for contributor in self._contributors:
                if contributor not in self._absent:
                    ready &= have[contributor]
                    if not ready:
                        return 0
        self._take_off(ready)
        return ready

    def take_complete(self) -> list[Asking]:
        """Return the names that all contributors have told of, and take them off."""
        self.is_stirred = False
        needed = len(self._contributors)
        complete: list[str] = []
        for name, asking in self._asking.items():
            present = len(asking.contributors)
            if self._absent:
                present = len(asking.contributors | self._absent)
            if present == needed:
                complete.append(name)
        return [self._asking.pop(name) for name in complete]

    def forget(self, number: int) -> None:
        """Forget who is ready for a cached request."""
        self._take_off(1 << number)

    def forget_all(self) -> None:
        """Forget who is ready for any cached request."""
        self._have = dict.fromkeys(self._contributors, 0)

    def _take_off(self, bits: int) -> None:
        have = self._have
        for contributor in self._contributors:
            have[contributor] &= ~bits
