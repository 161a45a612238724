"""Notices a synchronisation that does not end."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from time import monotonic

Expired = Callable[[str], None]


class Watchdog:
    """Calls somebody when a stretch of work takes too long.

    Args:
        timeout_s: How long a stretch may take; 0 watches nothing.
        on_expired: Is told what took too long, from another thread.
    """

    def __init__(self, timeout_s: float, on_expired: Expired) -> None:
        self._timeout_s = timeout_s
        self._on_expired = on_expired
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._what = ""
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, what: str) -> Generator[None]:
        """Watch the block.

        Args:
            what: Its name, for who is told.
        """
        if not self._timeout_s:
            yield
            return
        self._arm(what, monotonic() + self._timeout_s)
        try:
            yield
        finally:
            self._arm("", None)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _arm(self, what: str, deadline: float | None) -> None:
        with self._changed:
            self._what, self._deadline = what, deadline
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._is_closed:
                if self._deadline is None:
                    self._changed.wait()
                    continue
                left_s = self._deadline - monotonic()
                if left_s <= 0:
                    self._on_expired(self._what)
                    self._deadline = None
                    continue
                self._changed.wait(left_s)
