"""Gloo's point-to-point messages, which complete only while a thread waits."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch

UNUSED_TAG = (1 << 31) - 1
_FOR_EVER = timedelta(0)  # torch's value for no timeout
_CHECK_EVERY_S = 1.0
Backend = Any  # torch's stubs give the backends' methods no common type


class BackendWork(Protocol):
    """The methods of ``torch.distributed.Work`` that ronde uses."""

    def is_completed(self) -> bool: ...

    def wait(self, timeout: timedelta = _FOR_EVER) -> object: ...


Job = tuple[Callable[[], object], Future[object]]


class Waiters:
    """Reusable threads for calls that may wait long for messages."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Job | None]] = []
        self._is_closed = False

    def start(self, call: Callable[[], object]) -> Future[object]:
        outcome: Future[object] = Future()
        try:
            queue = self._idle.pop()
        except IndexError:
            queue = SimpleQueue[Job | None]()
            threading.Thread(target=self._serve, args=(queue,), daemon=True).start()
        queue.put((call, outcome))
        return outcome

    def close(self) -> None:
        """End the idle threads now, and each busy thread after its call."""
        self._is_closed = True
        with suppress(IndexError):  # another thread may end some of them
            while True:
                self._idle.pop().put(None)

    def _serve(self, queue: "SimpleQueue[Job | None]") -> None:
        while (job := queue.get()) is not None:
            call, outcome = job
            try:
                result, failure = call(), None
            except BaseException as error:  # noqa: BLE001  raised in the waiting thread
                result, failure = None, error.with_traceback(None)
            del job, call
            # Before the result is set: then the waiting thread may start the next call.
            self._idle.append(queue)
            if failure is None:
                outcome.set_result(result)
            else:
                outcome.set_exception(failure)
            del outcome, failure
            if self._is_closed:
                self.close()


class GlooMessage:
    """A send or receive of CPU tensors; used by one thread at a time."""

    __slots__ = (
        "_check_s",
        "_inner",
        "_is_cut_off",
        "_is_lost",
        "_outcome",
        "_waiters",
    )

    def __init__(
        self, inner: BackendWork, waiters: Waiters, is_cut_off: Callable[[], bool]
    ) -> None:
        self._inner = inner
        self._waiters = waiters
        self._is_cut_off = is_cut_off
        self._outcome: Future[object] | None = None
        self._check_s = time.monotonic() + _CHECK_EVERY_S
        self._is_lost = False

    def is_completed(self) -> bool:
        if self._outcome is None:
            self._outcome = self._waiters.start(self._inner.wait)
        return self._outcome.done()

    def wait(self, timeout: timedelta = _FOR_EVER) -> object:
        if self._outcome is None:
            return self._inner.wait(timeout)
        try:
            error = self._outcome.exception(timeout.total_seconds() or None)
        except TimeoutError:
            raise RuntimeError("Operation timed out!") from None
        if error is not None:
            raise RuntimeError(str(error))  # a new one for each wait
        return self._outcome.result()

    def is_lost(self) -> bool:
        """Return True if the message is incomplete long after its connection ended.

        See Note [Messages that Gloo loses] in ``engines/torch_distributed.py``.
        """
        if time.monotonic() < self._check_s:
            return False
        if self._is_lost:
            return True
        self._is_lost = self._is_cut_off()
        self._check_s = time.monotonic() + _CHECK_EVERY_S
        return False


def is_cut_off(gloo: Backend, peer: int) -> bool:
    try:
        # Gloo refuses this receive if the connection has ended. Its tag is never sent.
        gloo.recv([torch.empty(1, device="cpu")], peer, UNUSED_TAG)
    except RuntimeError:
        return True
    return False
