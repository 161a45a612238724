"""Abort scopes, which abort all waits and engines of a session together.

Note [Tracebacks hold groups]
    The traceback of a failure holds the frames that it passed through. The frames hold
    their objects, such as a Gloo group with a thread and four descriptors. If such an
    object refers to the failure, both live until Python collects cycles, perhaps
    minutes later. So frames and objects drop their references to each other early.
"""

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Generic, TypeVar

from ronde.errors import CollectiveError, fresh

T = TypeVar("T")
_logger = logging.getLogger("ronde")


_Method = weakref.WeakMethod[Callable[[], object]]
_ABORT_S = 1.0
_CONNECTING = "ronde connecting"
ABORTING = "ronde abort"
"""The name of the thread that frees Gloo's groups in the background."""
_EXIT_WAIT_S = {_CONNECTING: 1.0, ABORTING: 5.0}  # when Python exits


class AbortScope:
    """Aborts registered operations together; ``failure`` is the reason once aborted."""

    def __init__(self, *, is_live: bool = False) -> None:
        """Create a scope; with ``is_live``, ``abort`` may be called."""
        self.failure: CollectiveError | None = None
        self.store: object = None  # the job's, kept alive: see ``JobStore``
        self.is_live = is_live
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._methods: list[_Method] = []
        self._later: deque[Callable[[], object]] = deque()
        self._is_dropping = False

    def add(self, abort: Callable[[], object]) -> None:
        """Register a bound method as a weak reference; if aborted, call it at once."""
        with self._lock:
            if self.failure is None:
                self._methods = [each for each in self._methods if each() is not None]
                self._methods.append(weakref.WeakMethod(abort))
                return
        abort()

    def abort(self, failure: CollectiveError) -> None:
        """Abort registered operations, newest first; abort later ones when added."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
            methods, self._methods = self._methods, []
        try:
            for method in reversed(methods):
                if (abort := method()) is not None:
                    abort()
        finally:
            self._is_over.set()

    def call_later(self, function: Callable[[], object]) -> None:
        """Call a function in a background thread that Python waits for at exit.

        One thread calls all functions, as each thread has its own allocator arena.
        """
        with self._lock:
            self._later.append(function)
            if self._is_dropping:
                return
            self._is_dropping = True
        try:
            threading.Thread(target=self._call_all, name=ABORTING, daemon=True).start()
        except RuntimeError:  # Python is exiting and starts no more threads
            self._call_all()

    def _call_all(self) -> None:
        while True:
            with self._lock:
                if not self._later:
                    self._is_dropping = False
                    return
                function = self._later.popleft()
            with suppress(RuntimeError):  # the group is broken already
                function()

    def wait(self) -> None:
        """Wait until an abort by any thread is complete, for at most a second.

        Otherwise Python might exit while another thread frees Gloo's objects, and C++
        would abort the process.
        """
        self._is_over.wait(_ABORT_S)

    def end(self) -> None:
        """Unregister all operations; wait for an abort in progress."""
        with self._lock:
            self._methods = []
        if self.failure is not None:
            self.wait()

    def check(self) -> None:
        if self.failure is not None:
            raise fresh(self.failure)

    def run(self, function: Callable[[], T]) -> T:
        """Call a function that cannot be interrupted; after an abort, raise at once.

        The function still finishes in its own thread, and its result is dropped.
        """
        if not self.is_live:
            return function()
        self.check()
        call = _Call(function, self)
        self.add(call.leave)
        threading.Thread(target=call.run, name=_CONNECTING, daemon=True).start()
        outcome = call.outcome
        del call  # see Note [Tracebacks hold groups]
        try:
            return outcome.result()
        finally:
            del outcome


@atexit.register
def _wait_for_threads() -> None:
    # C++ aborts the process if a thread frees a group while Python exits.
    begun_s = time.monotonic()
    for thread in threading.enumerate():
        if thread.name in _EXIT_WAIT_S:
            left_s = begun_s + _EXIT_WAIT_S[thread.name] - time.monotonic()
            thread.join(max(0.0, left_s))


def warn_if_alive(thread: threading.Thread, within_s: float) -> None:
    if thread.is_alive():
        _logger.warning(
            "thread %r is still running %g s after close(). Find the operation that "
            "hangs in its stack.",
            thread.name,
            within_s,
        )


class _Call(Generic[T]):
    def __init__(self, function: Callable[[], T], scope: AbortScope) -> None:
        self.outcome: Future[T] = Future()
        self._function, self._scope = function, scope

    def run(self) -> None:
        outcome, function = self.outcome, self._function
        del self  # see Note [Tracebacks hold groups]
        with suppress(InvalidStateError):
            try:
                outcome.set_result(function())
            except BaseException as error:  # noqa: BLE001  raised in the waiting thread
                outcome.set_exception(error)
            finally:
                del outcome

    def leave(self) -> None:
        failure = self._scope.failure
        with suppress(InvalidStateError):
            self.outcome.set_exception(failure and fresh(failure))
