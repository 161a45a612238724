"""What is broken off together, by any thread: waits, engines, agreements.

Note [What a failure holds]
    A failure's traceback holds the frames that it has passed, and they all that they
    work on: such as a group of Gloo's, with a thread and four descriptors. Where that
    holds the failure in turn, as a call does whose outcome it is, both live until
    Python looks for cycles, which may take it minutes.
"""

import atexit
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


_Method = weakref.WeakMethod[Callable[[], object]]
_ABORT_S = 1.0
_CONNECTING = "ronde connecting"
ABORTING = "ronde abort"
"""The name of a thread that does what nobody waits for: it drops Gloo's groups."""
_LAST_S = {_CONNECTING: 1.0, ABORTING: 5.0}  # that such threads have at the end


class AbortScope:
    """What lives while a rank is connected; ``failure`` is why it was broken off."""

    def __init__(self, *, is_live: bool = False) -> None:
        """Begin; ``is_live``: somebody may call ``abort``."""
        self.failure: CollectiveError | None = None
        self.store: object = None  # where all meet; kept: see ``JobStore``
        self.is_live = is_live
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._methods: list[_Method] = []
        self._later: deque[Callable[[], object]] = deque()
        self._is_dropping = False

    def add(self, abort: Callable[[], object]) -> None:
        """Call a bound method at the abort, or now; its object is held weakly."""
        with self._lock:
            if self.failure is None:
                self._methods = [each for each in self._methods if each() is not None]
                self._methods.append(weakref.WeakMethod(abort))
                return
        abort()

    def abort(self, failure: CollectiveError) -> None:
        """Break all off that was added, the latest first, and what is added later."""
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
        """Call it in a thread, one after the other; Python waits for that as it ends.

        One thread, since each has a part of the allocator's memory to itself.
        """
        with self._lock:
            self._later.append(function)
            if self._is_dropping:
                return
            self._is_dropping = True
        try:
            threading.Thread(target=self._call_all, name=ABORTING, daemon=True).start()
        except RuntimeError:  # Python itself ends, and starts no thread any more
            self._call_all()

    def _call_all(self) -> None:
        while True:
            with self._lock:
                if not self._later:
                    self._is_dropping = False
                    return
                function = self._later.popleft()
            with suppress(RuntimeError):  # of what is broken already
                function()

    def wait(self) -> None:
        """Wait for an abort, by whichever thread.

        Else Python might end while another thread drops what is inside of Gloo, and C++
        would abort the process.
        """
        self._is_over.wait(_ABORT_S)

    def end(self) -> None:
        """Have nothing broken off from now on; wait for an abort that is under way."""
        with self._lock:
            self._methods = []
        if self.failure is not None:
            self.wait()

    def check(self) -> None:
        if self.failure is not None:
            raise fresh(self.failure)

    def run(self, function: Callable[[], T]) -> T:
        """Call what can be broken off in no way: it is left to a thread at the abort.

        Then its result is dropped.
        """
        if not self.is_live:
            return function()
        self.check()
        call = _Call(function, self)
        self.add(call.leave)
        threading.Thread(target=call.run, name=_CONNECTING, daemon=True).start()
        outcome = call.outcome
        del call  # see Note [What a failure holds]
        try:
            return outcome.result()
        finally:
            del outcome


@atexit.register
def _wait_for_threads() -> None:
    """Have none drop a group while Python ends: C++ would abort the process."""
    begun_s = time.monotonic()
    for thread in threading.enumerate():
        if thread.name in _LAST_S:
            left_s = begun_s + _LAST_S[thread.name] - time.monotonic()
            thread.join(max(0.0, left_s))


class _Call(Generic[T]):
    def __init__(self, function: Callable[[], T], scope: AbortScope) -> None:
        self.outcome: Future[T] = Future()
        self._function, self._scope = function, scope

    def run(self) -> None:
        outcome, function = self.outcome, self._function
        del self  # see Note [What a failure holds]
        with suppress(InvalidStateError):
            try:
                outcome.set_result(function())
            except BaseException as error:  # noqa: BLE001  raised where it is waited for
                outcome.set_exception(error)
            finally:
                del outcome

    def leave(self) -> None:
        failure = self._scope.failure
        with suppress(InvalidStateError):
            self.outcome.set_exception(failure and fresh(failure))
