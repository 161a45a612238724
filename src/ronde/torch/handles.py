"""Integer handles of collectives under way, as Horovod's API has them."""

from itertools import count
from typing import Any

from ronde.collectives import Work
from ronde.errors import UsageError


class Handles:
    """The table from handle to work; handles start at 0 and are not used again."""

    def __init__(self) -> None:
        self._works: dict[int, Work[Any]] = {}
        self._numbers = count()

    def add(self, work: Work[Any]) -> int:
        """Return a new handle for ``work``."""
        handle = next(self._numbers)
        self._works[handle] = work
        return handle

    def poll(self, handle: int) -> bool:
        """Say whether ``synchronize(handle)`` would return at once."""
        if handle not in self._works:
            raise UsageError(f"Handle {handle} was not created or has been cleared.")
        return self._works[handle].is_done()

    def synchronize(self, handle: int) -> Any:  # noqa: ANN401 - each operation's own
        """Wait, forget the handle and return the result; None for one not known."""
        work = self._works.pop(handle, None)
        return None if work is None else work.wait()

    def clear(self) -> None:
        """Forget all handles."""
        self._works.clear()
