"""Engines made of others: a thread carries out what takes several steps, in order."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from ronde.collectives.arithmetic import HALVES, PLAIN, rounds_often
from ronde.collectives.engine import Engine, Look, Native, ReduceOp, Reduction, Work
from ronde.collectives.torch_modes import in_mode_of_caller
from ronde.errors import CollectiveError, fresh

T = TypeVar("T")


class Closable(Protocol):
    """An engine or communicator."""

    def abort(self) -> None:
        """Close, and have what is under way fail on all ranks."""
        ...

    def close(self) -> None:
        """Close."""
        ...


class Lane:
    """One thread and the communicators that it alone calls.

    Once a collective has failed all later ones do, and the communicators are closed:
    ranks that wait for this one, and not for the one that is gone, learn of it so.
    """

    def __init__(self, *communicators: Closable) -> None:
        self._communicators = communicators
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ronde-lane")
        self._lock = threading.Lock()
        self._failure: CollectiveError | None = None
        self._is_busy = False
        self._is_closed = False

    def submit(self, name: str, steps: Callable[[], None]) -> "FutureWork[None]":
        """Call ``steps`` once all earlier ones are over.

        Args:
            name: What they are, for the error that says how they failed.
            steps: What the thread is to do.

        Raises:
            CollectiveError: The lane is closed.
        """
        self.require_open()
        return FutureWork(
            self._thread.submit(in_mode_of_caller(self._call), name, steps)
        )

    def require_open(self) -> None:
        """Refuse once closed.

        Raises:
            CollectiveError: The lane is closed.
        """
        if self._is_closed:
            raise CollectiveError(
                "communicator must be open, got a closed one. Connect again."
            )

    def close(self) -> None:
        """End thread and communicators; what is under way fails."""
        # Nothing else ends a message that the thread waits for.
        self._end(is_abrupt=self._stop())

    def abort(self) -> None:
        """End thread and communicators, and tell the other ranks."""
        self._stop()
        self._end(is_abrupt=True)

    def _stop(self) -> bool:
        """Let nothing begin any more; say whether something is under way."""
        with self._lock:
            self._is_closed = True
            is_busy = self._is_busy
        self._thread.shutdown(wait=False, cancel_futures=True)
        return is_busy

    def _end(self, *, is_abrupt: bool) -> None:
        for communicator in self._communicators:
            if is_abrupt:
                communicator.abort()
            else:
                communicator.close()
        self._thread.shutdown()

    def _call(self, name: str, steps: Callable[[], None]) -> None:
        with self._lock:
            if self._is_closed:
                raise _closed_under(name)
            if self._failure is not None:
                raise fresh(self._failure)
            self._is_busy = True
        try:
            steps()
        except CollectiveError as error:
            if self._is_closed:
                raise _closed_under(name) from error
            self._failure = type(error)(f"{name}: {error}")
            for communicator in self._communicators:
                communicator.abort()
            raise fresh(self._failure) from error
        finally:
            self._is_busy = False


class FutureWork(Work[T]):
    """What another thread carries out."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: Future[T]) -> None:
        super().__init__(cast("T", None), is_over=False)
        self._outcome = outcome
        self._finish = outcome.result

    def _poll(self) -> bool:
        return self._outcome.done()

    def _block(self, look: Look | None) -> bool:
        while look is not None and not self._outcome.done():
            pause_s = look()
            if pause_s is None:
                return False
            wait((self._outcome,), pause_s)
        try:
            self.failure = cast("Exception | None", self._outcome.exception())
        except CancelledError as error:
            self.failure = _closed_under("a work")
            self.failure.__cause__ = error
        self.is_over = True
        return True


class LaneEngine(Engine):
    """Made of other engines: reduces and copies in a lane, in several steps.

    What it cannot do better (``all_to_all``, messages, ``barrier``) is done by an
    engine of all ranks. The methods with an underscore run in the lane.
    """

    def __init__(self, world: Engine, lane: Lane) -> None:
        """Take over an engine of all ranks; it is closed with this one."""
        self.rank, self.size, self.timeout_s = world.rank, world.size, world.timeout_s
        self._world = world
        self._lane = lane

    @abstractmethod
    def _reduce(self, vector: Tensor, op: ReduceOp) -> None:
        """Reduce a vector in place."""

    @abstractmethod
    def _reduce_parts(
        self, vector: Tensor, counts: Sequence[int], op: ReduceOp
    ) -> Tensor:
        """Return this rank's part of the reduction; ``vector`` is left as it was."""

    @abstractmethod
    def _gather(self, out: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        """Put all ranks' bytes into ``out``; ``own`` may lie there already."""

    @abstractmethod
    def _copy(self, data: Tensor, root: int) -> None:
        """Copy the root's bytes, in place."""

    def require_open(self) -> None:
        """Refuse once closed: see ``Engine``."""
        self._lane.require_open()

    def native(
        self,
        call: str,  # noqa: ARG002  the interface's
        dtype: torch.dtype,
        op: ReduceOp,
        device_type: str,  # noqa: ARG002
    ) -> Native | None:
        """Take what torch adds; 16-bit floats where they are rounded once."""
        is_average = op is ReduceOp.AVERAGE
        if dtype in HALVES:
            is_plain = not rounds_often(dtype, op, self.size)
        else:
            is_plain = dtype in PLAIN and (dtype.is_floating_point or not is_average)
        return Native(ReduceOp.SUM if is_average else op) if is_plain else None

    def all_reduce(self, source: Tensor, out: Tensor, what: Reduction) -> Work[None]:  # noqa: ARG002
        """Reduce in place."""
        return self._submit("all_reduce", lambda: self._reduce(out, what.op))

    def reduce_scatter(
        self, source: Tensor, out: Tensor, counts: Sequence[int], what: Reduction
    ) -> Work[None]:
        """Reduce consecutive parts, one for each rank."""

        def steps() -> None:
            out.copy_(self._reduce_parts(source, counts, what.op))

        return self._submit("reduce_scatter", steps)

    def gather_numbers(self, own: Tensor, call: str) -> Tensor:
        """Return every rank's vector of numbers; blocks."""
        self.require_open()
        return self._world.gather_numbers(own, call)

    def all_gather(self, own: Tensor, out: Tensor, counts: Sequence[int]) -> Work[None]:
        """Concatenate the ranks' bytes."""
        return self._submit("all_gather", lambda: self._gather(out, own, counts))

    def broadcast(self, data: Tensor, root: int) -> Work[None]:
        """Copy ``root``'s elements into everybody's."""
        place = data.view(torch.uint8)
        return self._submit("broadcast", lambda: self._copy(place, root))

    def all_to_all(
        self, sent: Tensor, received: Tensor, plan: Sequence[Sequence[int]]
    ) -> Work[Any]:
        """Send every rank its part of the bytes."""
        return self._world.all_to_all(sent, received, plan)

    def send(self, data: Tensor, to: int, tag: int) -> Work[Any]:
        """Send to one rank."""
        return self._world.send(data, to, tag)

    def recv(self, data: Tensor, source: int, tag: int) -> Work[Any]:
        """Receive from one rank."""
        return self._world.recv(data, source, tag)

    def barrier(self) -> Work[Any]:
        """Be over when all have called."""
        return self._world.barrier()

    def abort(self) -> None:
        """Close at once: see ``Engine``."""
        self._lane.abort()
        self._world.abort()

    def close(self) -> None:
        """Give all back; not collective, and calls may be repeated."""
        self._lane.close()
        self._world.close()

    def _submit(self, name: str, steps: Callable[[], None]) -> FutureWork[None]:
        place = f"{name} on rank {self.rank} of {self.size} by {self.name}"
        return self._lane.submit(place, steps)


def _closed_under(name: str) -> CollectiveError:
    return CollectiveError(
        f"{name} must be over before close(), got a closed communicator. Wait for "
        "every work first."
    )
