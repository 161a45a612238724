"""Collectives of MPI's under way."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from ronde.collectives.communicator import Look
from ronde.collectives.engines.mpi.library import MPI, Library
from ronde.collectives.failures import Scene
from ronde.errors import CollectiveError, fresh

T_co = TypeVar("T_co", covariant=True)

_SPIN_S = 0.002
_SPIN_S_PER_BYTE = 4e-9
_FIRST_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 1e-3


class MpiWork(Generic[T_co]):
    """Requests of MPI's and what is left to do after them.

    MPI moves bytes only inside of its calls: nothing happens between the call of a
    collective and ``wait()`` but what other calls of this process drive on.
    """

    __slots__ = (
        "_failure",
        "_finish",
        "_held",
        "_is_closed",
        "_library",
        "_requests",
        "_result",
        "_scene",
    )
    _result: T_co

    def __init__(
        self,
        library: Library,
        requests: Sequence[MPI.Request],
        finish: Callable[[], T_co],
        scene: Scene,
        held: Sequence[Tensor],
        is_closed: Callable[[], bool],
    ) -> None:
        """Take note of what is under way.

        Args:
            library: Whose requests these are.
            requests: At least one.
            finish: What turns the bytes into the result.
            scene: For the sentence that says how it failed.
            held: What MPI reads and writes meanwhile.
            is_closed: Whether the communicator was closed; nobody waits any more then.
        """
        self._library = library
        self._requests = list(requests)
        self._finish: Callable[[], T_co] | None = finish
        self._scene = scene
        self._held = held
        self._is_closed = is_closed
        library.hold(self)
        self._failure: CollectiveError | None = None

    def is_done(self) -> bool:
        """Say whether ``wait()`` would return without blocking; move bytes on."""
        if self._finish is None or self._failure is not None:
            return True
        with self._library.calling():
            try:
                is_done = MPI.Request.Testall(self._requests)
            except MPI.Exception as error:
                self._fail(error)
                return True
        if is_done:
            self._library.release(self)
        return is_done

    def wait(self) -> T_co:
        """Block until the result is there and return it; later calls return it again.

        Raises:
            CollectiveError: The collective failed; every later call raises it again.
        """
        if self._finish is not None:
            self._poll()
            if self._failure is not None:
                raise fresh(self._failure)
            self._result = self._finish()
            self._finish = None
            self._requests = []
            self._held = ()
        return self._result

    def wait_watched(self, look: Look) -> bool:
        """Block until it is over or ``look`` says to stop: see ``Work``."""
        return self._finish is None or self._poll(look)

    def _poll(self, look: Look | None = None) -> bool:
        """Drive MPI until it is done, at first at every turn, then ever more rarely.

        The turns are given to whoever else wants the core. As long as the bytes may
        take, the rank stays awake: asleep it would move none of them.
        """
        started_s = time.monotonic()
        sleep_s = _FIRST_SLEEP_S
        num_bytes = sum(tensor.nbytes for tensor in self._held)
        spin_s = _SPIN_S + _SPIN_S_PER_BYTE * num_bytes
        while not self.is_done():
            waited_s = time.monotonic() - started_s
            if self._is_closed():
                self._fail(CollectiveError("its communicator was closed meanwhile"))
                return True
            if waited_s > self._scene.timeout_s:
                self._fail(TimeoutError("MPI request timed out"))
                return True
            if waited_s < spin_s:
                os.sched_yield()
                continue
            pause_s = sleep_s if look is None else look()
            if pause_s is None:
                return False
            time.sleep(min(pause_s, sleep_s))
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
        return True

    def _fail(self, error: Exception) -> None:
        self._library.has_failed = True
        self._failure = self._scene.explain(error)
        self._failure.__cause__ = error
