"""Works and futures of the backend: see Note [How torch takes a group in Python]."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed as dist
from torch.autograd.variable import Variable

from ronde.collectives import Work
from ronde.errors import CollectiveError, PeerLostError, fresh

_LOOK_EVERY_S = 0.05
_torch: Any = torch
_current_node: Callable[[], object] = _torch._C._current_autograd_node  # noqa: SLF001  its only name
_current_backward: Callable[[], int] = _torch._C._current_graph_task_id  # noqa: SLF001  likewise


class BackendError(CollectiveError, dist.DistBackendError):
    """A call of the backend failed; torch's own scripts catch it, too."""


class BackendPeerLostError(PeerLostError, BackendError):
    """It failed because another rank is gone."""


def as_backend_error(error: CollectiveError) -> CollectiveError:
    """Return the same for those who expect torch's errors."""
    kind = BackendPeerLostError if isinstance(error, PeerLostError) else BackendError
    return kind(*error.args)


class Drain:
    """Completes a group's works in order, when backward ends or at once."""

    def __init__(self) -> None:
        self._queue: deque[GroupWork] = deque()
        self._backward = -1  # which one ends with a call of ``run``
        self._is_running = False

    def add(self, work: "GroupWork") -> None:
        """Have a work's future completed."""
        # Without a node, backward itself is over and calls what was left to its end.
        if _current_node() is None or self._is_running:
            work.resolve()
            return
        if self._backward != _current_backward():
            self.run()  # what one left that has failed: it calls nothing in the end
            variable: Any = Variable
            variable._execution_engine.queue_callback(self.run)  # noqa: SLF001
            self._backward = _current_backward()
        self._queue.append(work)

    def run(self) -> None:
        """Complete all; a failure is in the future of what failed."""
        self._is_running = True
        self._backward = -1
        try:
            while self._queue:
                self._queue.popleft().resolve()
        finally:
            self._is_running = False


class GroupWork(dist.Work):
    """One call of the backend, or several, under way."""

    def __init__(
        self,
        drain: Drain,
        works: Sequence[Work[Any]] | None,
        finish: Callable[[list[Any]], list[Tensor]],
        limit_s: float,
        abort: Callable[[], None],
    ) -> None:
        """``finish`` gets the works' results; its own is the future's.

        Without ``works`` it does all.
        If they are not over ``limit_s`` after a wait began, ``abort`` is called.
        """
        super().__init__()
        self.source = -1  # whose message this was
        self.works, self._drain, self._finish = works, drain, finish
        self._limit_s, self._abort = limit_s, abort
        self._is_over = False
        self._tensors: list[Tensor] = []
        self._failure: Exception | None = None
        self._future: Any = None
        self._base: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait, at most for ``timeout``, else for that of the call."""
        self._complete(timeout.total_seconds() or self._limit_s)
        return True

    def get_future(self) -> Any:  # noqa: ANN401  torch's stubs give it no type
        if self._future is None:
            if torch.cuda.is_initialized():
                # That orders streams, and waits for nothing else.
                with suppress(Exception):
                    self._complete(self._limit_s)
            devices: Any = [t.device for t in self._tensors if t.is_cuda]
            self._base = torch.futures.Future(devices=devices or None)
            self._future = self._base.then(self._taken)
            self._drain.add(self)
        return self._future

    def resolve(self) -> None:
        """Complete the future, which raises what failed."""
        with suppress(Exception):
            self._complete(self._limit_s)
        self._base.set_result(None)

    def _taken(self, _: object) -> list[Tensor]:
        # C++ would crash on a future that was given an exception.
        if self._failure is not None:
            raise fresh(self._failure)
        return self._tensors

    def _complete(self, limit_s: float) -> None:
        if not self._is_over:
            try:
                works = self.works or ()
                if not all(work.is_done() for work in works):
                    self._await(works, limit_s)
                self._tensors = self._finish([work.wait() for work in works])
            except CollectiveError as error:
                self._failure = as_backend_error(error)
                # Its frames hold this work, and so the group.
                self._failure.__cause__ = error.with_traceback(None)
            except Exception as error:  # noqa: BLE001  raised by every wait
                self._failure = error
            self._is_over, self.works = True, ()
            self._finish = list[Tensor]
        if self._failure is not None:
            raise fresh(self._failure)

    def _await(self, works: Sequence[Work[Any]], limit_s: float) -> None:
        until_s = time.monotonic() + limit_s

        def look() -> float | None:
            left_s = until_s - time.monotonic()
            return min(left_s, _LOOK_EVERY_S) if left_s > 0 else None

        for work in works:
            if not work.wait_watched(look):
                self._abort()
                raise CollectiveError(
                    f"the call must complete within its timeout of {limit_s:g} s, but "
                    "there was no answer. See which rank hangs or makes other calls."
                )

    def is_completed(self) -> bool:
        """Return whether it is over; whoever asks may read the result without a wait.

        What receives from any rank is over in ``wait()`` alone.
        """
        works = self.works
        if works is not None and all(work.is_done() for work in works):
            with suppress(Exception):  # it is kept, for ``exception()``
                self._complete(self._limit_s)
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
