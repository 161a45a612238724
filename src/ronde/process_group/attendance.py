"""Which ranks have made a call that others wait for, by the store of their group."""

from contextlib import suppress
from datetime import timedelta
from functools import cached_property

from torch.distributed import Store

from ronde.collectives.store import clone_of

_STORE_TIMEOUT = timedelta(seconds=5)


class SideStore:
    """The store of a group by a connection of its own, made once it is needed.

    Nothing waits there for other ranks, and it may be gone with a rank: then its calls
    raise a ``RuntimeError``.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @cached_property
    def connection(self) -> Store:
        own = clone_of(self._store)
        own.set_timeout(_STORE_TIMEOUT)
        return own


class Attendance:
    """Where each rank notes in which collective it waits, once that takes long.

    No engine but shared memory knows which ranks are late.
    """

    def __init__(self, store: SideStore, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        # Calls that this rank has waited in for long, by name and number: since when.
        self.waiting: dict[tuple[str, int], float] = {}

    def note(self, number: int) -> None:
        """Note that this rank waits in the collective of that number."""
        with suppress(RuntimeError):
            self._store.connection.set(f"waits/{self._rank}", str(number))

    def find_absent(self, number: int) -> list[int]:
        """Return the ranks that have not noted it; none if nobody can tell."""
        absent: list[int] = []
        with suppress(RuntimeError):
            store = self._store.connection
            for rank in range(self._size):
                key = f"waits/{rank}"
                is_there = store.check([key]) and int(store.get(key)) >= number
                if not is_there:
                    absent.append(rank)
        return absent if len(absent) < self._size else []
