"""Base class of engines that use other engines in a thread of their own, the lane."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ronde.collectives.arithmetic import HALVES, PLAIN, rounds_often
from ronde.collectives.communicator import Communicator
from ronde.collectives.engine import (
    Engine,
    Plan,
    PollCallback,
    ReduceOp,
    Reduction,
    Work,
    closed_error,
)
from ronde.collectives.torch_modes import in_mode_of_caller
from ronde.errors import CollectiveError, fresh

T = TypeVar("T")


class FutureWork(Work[T]):
    """Work that is performed by another thread."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: Future[T]) -> None:
        super().__init__(cast("T", None), is_over=False)
        self._outcome = outcome
        self._finish = outcome.result

    def _poll(self) -> bool:
        return self._outcome.done()

    def _block(self, poll: PollCallback | None) -> bool:
        while poll is not None and not self._outcome.done():
            pause_s = poll()
            if pause_s is None:
                return False
            wait((self._outcome,), pause_s)
        try:
            self.failure = cast("Exception | None", self._outcome.exception())
        except CancelledError as error:
            self.failure = _closed_during("a work")
            self.failure.__cause__ = error
        self.is_over = True
        return True


class LaneEngine(Engine):
    """Base class of engines that run a collective as several calls of other engines."""

    # Only the lane's thread calls ``inner`` and the abstract methods. ``world`` serves
    # all other calls.
    # After a failed collective all later ones fail and ``inner`` is aborted. So ranks
    # that wait for this rank, and not for the lost rank, fail, too.

    def __init__(self, world: Engine, *inner: Communicator | Engine) -> None:
        """Take ownership of ``inner`` and of ``world``, which has all ranks."""
        self.rank, self.size, self.timeout_s = world.rank, world.size, world.timeout_s
        self.sender = world.name
        self._world = world
        self._inner = inner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ronde-lane")
        self._lock = threading.Lock()
        self._failure: CollectiveError | None = None
        self._is_busy = False
        self._is_closed = False

    @abstractmethod
    def _reduce(self, vector: Tensor, op: ReduceOp) -> None: ...

    @abstractmethod
    def _reduce_parts(
        self, vector: Tensor, counts: Sequence[int], op: ReduceOp
    ) -> Tensor:
        """Return this rank's part of the reduction; ``vector`` is not changed."""

    @abstractmethod
    def _gather(self, out: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        """Gather all ranks' bytes into ``out``; ``own`` may be a part of it."""

    @abstractmethod
    def _copy(self, data: Tensor, root: int) -> None:
        """Copy the root's bytes into ``data`` on every other rank."""

    def require_open(self) -> None:
        if self._is_closed:
            raise closed_error()

    def native(self, call: str, like: Tensor, op: ReduceOp) -> Reduction | None:
        dtype, is_average = like.dtype, op is ReduceOp.AVERAGE
        is_plain = dtype in PLAIN and (dtype.is_floating_point or not is_average)
        if dtype in HALVES:
            is_plain = not rounds_often(dtype, op, self.size)
        return Reduction(ReduceOp.SUM if is_average else op) if is_plain else None

    def all_reduce(
        self, source: Tensor, out: Tensor, reduction: Reduction
    ) -> Work[None]:
        return self._submit("all_reduce", lambda: self._reduce(out, reduction.op))

    def reduce_scatter(
        self, source: Tensor, out: Tensor, counts: Sequence[int], reduction: Reduction
    ) -> Work[None]:
        def steps() -> None:
            out.copy_(self._reduce_parts(source, counts, reduction.op))

        return self._submit("reduce_scatter", steps)

    def gather_numbers(self, own: Tensor, call: str) -> Tensor:
        self.require_open()
        return self._world.gather_numbers(own, call)

    def all_gather(
        self, own: Tensor, out: Tensor, counts: Sequence[int], call: str = "all_gather"
    ) -> Work[None]:
        return self._submit(call, lambda: self._gather(out, own, counts))

    def broadcast(self, data: Tensor, root: int) -> Work[None]:
        values = data.view(torch.uint8)
        return self._submit("broadcast", lambda: self._copy(values, root))

    def all_to_all(self, sent: Tensor, received: Tensor, plan: Plan) -> Work[Any]:
        return self._world.all_to_all(sent, received, plan)

    def send(self, data: Tensor, to: int, tag: int) -> Work[Any]:
        return self._world.send(data, to, tag)

    def recv(self, data: Tensor, source: int, tag: int) -> Work[Any]:
        return self._world.recv(data, source, tag)

    def barrier(self) -> Work[Any]:
        return self._world.barrier()

    def abort(self) -> None:
        self._close(is_abrupt=True)
        self._world.abort()

    def close(self) -> None:
        self._close(is_abrupt=False)
        self._world.close()

    def _close(self, *, is_abrupt: bool) -> None:
        with self._lock:
            self._is_closed = True
            # The thread may wait for a message, which only an abort ends.
            is_abrupt = is_abrupt or self._is_busy
        self._thread.shutdown(wait=False, cancel_futures=True)
        for each in self._inner:
            (each.abort if is_abrupt else each.close)()
        self._thread.shutdown()

    def _submit(self, name: str, steps: Callable[[], None]) -> FutureWork[None]:
        self.require_open()
        subject = f"{name} on rank {self.rank} of {self.size} by {self.name}"
        call = in_mode_of_caller(self._call)
        return FutureWork(self._thread.submit(call, subject, steps))

    def _call(self, name: str, steps: Callable[[], None]) -> None:
        with self._lock:
            if self._is_closed:
                raise _closed_during(name)
            if self._failure is not None:
                raise fresh(self._failure)
            self._is_busy = True
        try:
            steps()
        except CollectiveError as error:
            if self._is_closed:
                raise _closed_during(name) from error
            self._failure = type(error)(f"{name}: {error}")
            for each in self._inner:
                each.abort()
            raise fresh(self._failure) from error
        finally:
            self._is_busy = False


def _closed_during(name: str) -> CollectiveError:
    return CollectiveError(
        f"the communicator was closed before {name} completed. Wait for every work "
        "before close()."
    )
