"""Works and futures of the backend: see Note [Groups written in Python]."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, distributed as dist
from torch.autograd.variable import Variable

from ronde.collectives import Work
from ronde.errors import CollectiveError, PeerLostError, fresh
from ronde.process_group.attendance import Attendance
from ronde.status.steps import own_meter

_POLL_EVERY_S, _NOTE_AFTER_S = 0.05, 1.0
_torch: Any = torch
_current_node: Callable[[], object] = _torch._C._current_autograd_node  # noqa: SLF001  its only name
_current_backward: Callable[[], int] = _torch._C._current_graph_task_id  # noqa: SLF001  its only name


class BackendError(CollectiveError, dist.DistBackendError):
    """Raised if a call of the backend fails; also a torch ``DistBackendError``."""


class BackendPeerLostError(PeerLostError, BackendError):
    """Raised if a call fails because another rank is lost."""


def as_backend_error(error: CollectiveError) -> CollectiveError:
    kind = BackendPeerLostError if isinstance(error, PeerLostError) else BackendError
    return kind(*error.args)


class Late(NamedTuple):
    """Callbacks for a call that waits too long; ``number`` is None for messages."""

    attendance: Attendance
    abort: Callable[[], None]
    name: str
    number: int | None = None

    def note(self, begun_s: float) -> None:
        """Record that this rank has waited in the call since ``begun_s``."""
        self.attendance.waiting[self.name, self.number or 0] = begun_s
        if self.number is not None:
            self.attendance.note(self.number)

    def note_end(self) -> None:
        self.attendance.waiting.pop((self.name, self.number or 0), None)

    def expire(self, limit_s: float) -> NoReturn:
        """Abort the group, and raise an error that names the absent ranks."""
        absent = [] if self.number is None else self.attendance.find_absent(self.number)
        self.abort()
        reason = "no answer from another rank"
        if absent:
            ranks = ", ".join(map(str, absent))
            reason = f"rank{'s' * (len(absent) > 1)} {ranks} did not make this call"
        raise CollectiveError(
            f"the call timed out after {limit_s:g} s: {reason}. Find the rank that "
            "hangs or makes other calls."
        )


class FutureQueue:
    """Completes the futures of works in order, at the end of backward or at once."""

    def __init__(self) -> None:
        self._queue: deque[GroupWork] = deque()
        self._backward = -1  # the backward pass that calls ``run`` at its end
        self._is_running = False

    def add(self, work: "GroupWork") -> None:
        """Complete a work's future, or queue it during backward."""
        # Without a node, no backward runs, or it is calling its callbacks.
        if _current_node() is None or self._is_running:
            work.resolve()
            return
        if self._backward != _current_backward():
            self.run()  # completes works of a failed backward, which calls no callbacks
            variable: Any = Variable
            variable._execution_engine.queue_callback(self.run)  # noqa: SLF001
            self._backward = _current_backward()
        self._queue.append(work)

    def run(self) -> None:
        """Complete all queued futures; failures are stored in them."""
        self._is_running = True
        self._backward = -1
        try:
            while self._queue:
                self._queue.popleft().resolve()
        finally:
            self._is_running = False


class GroupWork(dist.Work):
    """One or more calls of the backend that were started together."""

    def __init__(
        self,
        futures: FutureQueue,
        works: Sequence[Work[Any]] | None,
        finish: Callable[[list[Any]], list[Tensor]],
        limit_s: float,
        late: Late,
    ) -> None:
        """Track started ``works``; ``finish`` converts their results to tensors.

        If ``works`` is None, ``finish`` makes the call itself. ``late`` handles a wait
        of more than ``limit_s``.
        """
        super().__init__()
        self.source = -1  # the sender of a message
        self.works, self._futures, self._finish = works, futures, finish
        self._limit_s, self._late = limit_s, late
        self._is_over = False
        self._tensors: list[Tensor] = []
        self._failure: Exception | None = None
        self._future: Any = None
        self._base: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for at most ``timeout`` if given, else for the call's own timeout.

        Raises:
            BackendError: The call did not complete. After ``timeout`` it continues;
                after its own timeout the group is aborted.
        """
        limit_s = timeout.total_seconds()
        if 0 < limit_s < self._limit_s and not self._await(limit_s):
            raise BackendError(
                f"the call did not complete within the {limit_s:g} s of this wait() "
                "and is still in progress. Wait again, or pass a longer timeout."
            )
        self._complete()
        return True

    def get_future(self) -> Any:  # noqa: ANN401  torch's stubs give it no type
        if self._future is None:
            if torch.cuda.is_initialized():
                # On GPUs this only orders streams.
                with suppress(Exception):
                    self._complete()
            devices: Any = [t.device for t in self._tensors if t.is_cuda]
            self._base = torch.futures.Future(devices=devices or None)
            self._future = self._base.then(self._tensors_or_raise)
            self._futures.add(self)
        return self._future

    def resolve(self) -> None:
        """Complete the future, with the tensors or the failure."""
        with suppress(Exception):
            self._complete()
        self._base.set_result(None)

    def _tensors_or_raise(self, _: object) -> list[Tensor]:
        # Raised here, as C++ would crash if the exception were set on the future.
        if self._failure is not None:
            raise fresh(self._failure)
        return self._tensors

    def _complete(self) -> None:
        if not self._is_over:
            try:
                with own_meter().blocked:
                    if not self._await(self._limit_s):
                        self._late.expire(self._limit_s)
                    results = [work.wait() for work in self.works or ()]
                    self._tensors = self._finish(results)
            except CollectiveError as error:
                self._failure = as_backend_error(error)
                # The traceback refers to this work, and so to the group.
                self._failure.__cause__ = error.with_traceback(None)
            except Exception as error:  # noqa: BLE001  raised by every wait
                self._failure = error
            self._is_over, self.works = True, ()
            self._finish = list[Tensor]
        if self._failure is not None:
            raise fresh(self._failure)

    def _await(self, limit_s: float) -> bool:
        """Wait for the works; return False on timeout."""
        begun_s = time.monotonic()
        note_s = min(_NOTE_AFTER_S, limit_s / 2)
        is_noted = False

        def poll() -> float | None:
            nonlocal is_noted
            past_s = time.monotonic() - begun_s
            if past_s > note_s and not is_noted:
                self._late.note(begun_s)
                is_noted = True
            return min(limit_s - past_s, _POLL_EVERY_S) if past_s < limit_s else None

        works = self.works or ()
        try:
            return all(work.is_done() or work.wait_watched(poll) for work in works)
        finally:
            if is_noted:
                self._late.note_end()

    def is_completed(self) -> bool:
        """Return True if the call is over and its result is complete.

        A receive from any rank is over only after ``wait()``.
        """
        works = self.works
        if works is not None and all(work.is_done() for work in works):
            with suppress(Exception):  # see ``exception()``
                self._complete()
        return self._is_over

    def is_success(self) -> bool:
        return self.is_completed() and self._failure is None

    def exception(self) -> Exception | None:
        return self._failure

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank
