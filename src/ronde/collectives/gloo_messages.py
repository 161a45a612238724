"""Gloo's messages between two ranks, which torch completes only for whoever waits."""

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
_FOR_EVER = timedelta(0)  # what torch takes for it
_ASK_EVERY_S = 1.0
# torch's stubs give the backends' methods no common type.
Backend = Any


class BackendWork(Protocol):
    """The part of ``torch.distributed.Work`` that is used here."""

    def is_completed(self) -> bool: ...

    def wait(self, timeout: timedelta = _FOR_EVER) -> object: ...


Job = tuple[Callable[[], object], Future[object]]


class Waiters:
    """Threads for calls that wait for messages, and may do so for long."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Job | None]] = []
        self._is_closed = False

    def start(self, call: Callable[[], object]) -> Future[object]:
        """Return the outcome of a call."""
        outcome: Future[object] = Future()
        try:
            queue = self._idle.pop()
        except IndexError:
            queue = SimpleQueue[Job | None]()
            threading.Thread(target=self._serve, args=(queue,), daemon=True).start()
        queue.put((call, outcome))
        return outcome

    def close(self) -> None:
        """End the threads, those that still wait when they no longer do."""
        self._is_closed = True
        with suppress(IndexError):  # none is left; another thread may end some of them
            while True:
                self._idle.pop().put(None)

    def _serve(self, queue: "SimpleQueue[Job | None]") -> None:
        while (job := queue.get()) is not None:
            call, outcome = job
            try:
                told, failure = call(), None
            except BaseException as error:  # noqa: BLE001  raised where it is waited for
                told, failure = None, error.with_traceback(None)
            del job, call
            self._idle.append(queue)  # before anyone goes on, who may have the next
            if failure is None:
                outcome.set_result(told)
            else:
                outcome.set_exception(failure)
            del outcome, failure
            if self._is_closed:
                self.close()


class GlooMessage:
    """A send or receive on CPU tensors; one thread at a time asks for it."""

    __slots__ = ("_ask_s", "_inner", "_is_cut_off", "_is_lost", "_outcome", "_waiters")

    def __init__(
        self, inner: BackendWork, waiters: Waiters, is_cut_off: Callable[[], bool]
    ) -> None:
        self._inner = inner
        self._waiters = waiters
        self._is_cut_off = is_cut_off
        self._outcome: Future[object] | None = None
        self._ask_s = time.monotonic() + _ASK_EVERY_S
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
            raise RuntimeError(str(error))  # and not one that is kept here
        return self._outcome.result()

    def is_lost(self) -> bool:
        """Say whether its connection ended, and it did not for a while after that.

        See Note [What Gloo forgets] of ``engines/torch_distributed.py``.
        """
        if time.monotonic() < self._ask_s:
            return False
        if self._is_lost:
            return True
        self._is_lost = self._is_cut_off()
        self._ask_s = time.monotonic() + _ASK_EVERY_S
        return False


def is_cut_off(gloo: Backend, peer: int) -> bool:
    """Say whether the connection to a rank has ended."""
    try:
        # Gloo refuses it on such a connection; else nothing ever answers it.
        gloo.recv([torch.empty(1, device="cpu")], peer, UNUSED_TAG)
    except RuntimeError:
        return True
    return False
