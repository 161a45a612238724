"""What was used lately: a mapping that cannot grow without bound."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A mapping that forgets what was not used for longest (LRU)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._weight = 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __iter__(self) -> Iterator[K]:
        return iter(self._values)

    def get(self, key: K) -> V | None:
        """Return a value, which counts as a use; None where there is none."""
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, weight: int = 1) -> None:
        """Keep a value under a key that has none; forget others if that is needed."""
        self._values[key] = value, weight
        self._weight += weight
        while self._weight > self._capacity and len(self._values) > 1:
            self._weight -= self._values.popitem(last=False)[1][1]

    def remove(self, key: K) -> None:
        self._weight -= self._values.pop(key)[1]
