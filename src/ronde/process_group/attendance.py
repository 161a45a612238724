"""Records, kept in a group's store, of the calls in which its ranks wait."""

from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from threading import Lock, Thread

from torch.distributed import Store

from ronde.collectives.store import clone_of

_STORE_TIMEOUT = timedelta(seconds=5)


class SideStore:
    """A second connection to a group's store, made at its first use.

    Calls raise ``RuntimeError`` if the rank that serves the store has ended.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = Lock()
        self._clone: Future[Store] | None = None

    @property
    def connection(self) -> Store:
        with self._lock:
            if self._clone is None:
                self._clone = Future()
                # In a thread, as a TCPStore may try to connect for 30 minutes.
                target = self._connect
                Thread(target=target, args=(self._clone,), daemon=True).start()
        try:
            return self._clone.result(_STORE_TIMEOUT.total_seconds())
        except TimeoutError:
            raise RuntimeError("the group's store does not respond") from None

    def _connect(self, clone: Future[Store]) -> None:
        try:
            own = clone_of(self._store)
            own.set_timeout(_STORE_TIMEOUT)
        except Exception as error:  # noqa: BLE001  raised by ``connection``
            clone.set_exception(error)
        else:
            clone.set_result(own)


class Attendance:
    """Records of long waits, used to find the absent ranks of a late call.

    Only the shared-memory engine can find late ranks without such records.
    """

    def __init__(self, store: SideStore, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._newest = 0
        # Start times of this rank's long waits, by the call's name and number.
        self.waiting: dict[tuple[str, int], float] = {}

    def note(self, number: int) -> None:
        """Record, in the background, that this rank waits in a collective."""
        self._newest = number
        Thread(target=self._write, daemon=True).start()

    def _write(self) -> None:
        with suppress(RuntimeError):
            self._store.connection.set(f"waits/{self._rank}", str(self._newest))

    def find_absent(self, number: int) -> list[int]:
        """Return the other ranks that have no record of waiting in call ``number``."""
        absent: list[int] = []
        with suppress(RuntimeError):
            store = self._store.connection
            for rank in range(self._size):
                key = f"waits/{rank}"
                if rank == self._rank:
                    continue
                if not (store.check([key]) and int(store.get(key)) >= number):
                    absent.append(rank)
        return absent
