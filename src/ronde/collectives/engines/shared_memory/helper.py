"""A thread that works when another rank asks for it; see Note [Who carries on]."""

import threading
from collections.abc import Callable

from ronde.collectives.engines.shared_memory.futex import sleep_while
from ronde.collectives.engines.shared_memory.words import Header, Places

_FOR_EVER_S = 3600.0
_RING_EVERY_S = 0.02


def _do_nothing() -> None:
    pass


class Helper:
    """Sleeps until the bell of this rank rings, then does what can be done."""

    def __init__(self, header: Header, work: Callable[[], None]) -> None:
        """Start the thread.

        Args:
            header: This rank's words.
            work: What to do.
        """
        self._header = header
        self._work = work
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._run, name="ronde shared memory", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread; calls may be repeated."""
        self._is_closed = True
        # Another rank may ring at the same time, and undo it: see Header.ring.
        while (
            threading.current_thread() is not self._thread and self._thread.is_alive()
        ):
            self._header.ring()
            self._thread.join(_RING_EVERY_S)
        self._work = _do_nothing  # no circle keeps the memory

    def _run(self) -> None:
        header = self._header
        address = header.address + 8 * Places.bell
        while not self._is_closed:
            heard = header.words[Places.bell]
            self._work()
            if not self._is_closed:
                sleep_while(address, heard, _FOR_EVER_S)
