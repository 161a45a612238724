"""Carry collectives out, one after the other, by whichever thread has time.

Note [Meetings]
    A collective is a generator that yields wherever it can go on only when all ranks
    have come as far: a *meeting*. Ranks count their meetings in ``Places.progress``;
    meeting k is over when every rank's word is at least k. All ranks run the same
    generators in the same order, so the numbers mean the same everywhere.

Note [Who carries on]
    Nothing runs in the background by itself: a call goes as far as it can, and so do
    all later calls, ``is_done()`` and ``wait()``. A rank that starts a collective and
    then computes would so make the others wait for its share. Therefore whoever waits
    long rings the bell of those it waits for, and there a thread, which sleeps until
    then, carries the share out beside the computation. Whoever it is does so in the
    inference mode of the caller: elsewhere its tensors may not be written to.
"""

import threading
from collections import deque
from collections.abc import Generator, Sequence
from typing import Protocol, TypeVar

import torch

from ronde.collectives.engine import Look, Work
from ronde.collectives.engines.shared_memory.contention import CONTENTION
from ronde.collectives.engines.shared_memory.helper import Helper
from ronde.collectives.engines.shared_memory.peers import Peers
from ronde.collectives.engines.shared_memory.waiting import (
    STOPPED,
    Lag,
    Patience,
    Waited,
)
from ronde.collectives.engines.shared_memory.words import (
    IS_WEAKLY_ORDERED,
    Header,
    Places,
    fence,
)
from ronde.errors import CollectiveError, UsageError, fresh

T = TypeVar("T")
Steps = Generator[None, None, T]

_NUM_SPINS = 200
_CLOSED = 1
_PROGRESS = Places.progress


class Transfer(Waited, Protocol):
    """A message under way between two ranks."""

    def start(self) -> None:
        """Take its turn behind earlier ones."""
        ...

    def advance(self) -> None:
        """Go as far as it can."""
        ...

    def fail(self, error: Exception) -> None:
        """Be over, with an error."""
        ...


class Operation(Work[None]):
    """One collective under way.

    Attributes:
        name: The collective.
        steps: What is left to do.
        find_lag: Returns the word of a rank that has not come to the meeting.
        is_inference: Whether it was called in ``torch.inference_mode()``.
    """

    __slots__ = ("_executor", "find_lag", "is_inference", "name", "steps")

    def __init__(self, executor: "Executor", name: str, steps: Steps[None]) -> None:
        # As Work does, without the time of another call.
        self.is_over, self.failure = False, None
        self._result, self._finish = None, None
        self._executor = executor
        self.find_lag = executor.find_lag
        self.name = name
        self.steps = steps
        self.is_inference = torch.is_inference_mode_enabled()

    def _poll(self) -> bool:
        self._executor.poll()
        return self.is_over

    def _block(self, look: Look | None) -> bool:
        self._executor.finish(self, look)
        return self.is_over

    def fail(self, error: Exception) -> None:
        """Be over, with an error."""
        self.failure = error
        self.is_over = True


class Executor:
    """The collectives of one communicator.

    Args:
        headers: All ranks' words.
        rank: This process.
        peers: All ranks' processes.
        timeout_s: How long to wait for any of them.
    """

    def __init__(
        self, headers: Sequence[Header], rank: int, peers: Peers, timeout_s: float
    ) -> None:
        self.headers = headers
        self.rank = rank
        self.transfers: list[Transfer] = []
        self._own = headers[rank]
        self._others = [(r, h) for r, h in enumerate(headers) if r != rank]
        self._other_words = [header.words for _, header in self._others]
        self._patience = Patience(headers, rank, peers, timeout_s)
        self._num_meetings = 0
        self._queue: deque[Operation] = deque()
        self._failure: CollectiveError | None = None
        self._lock = threading.Lock()
        CONTENTION.expect(len(headers))
        self._num_spins = 0 if peers.is_crowded else _NUM_SPINS
        self._helper = Helper(self._own, self.poll)

    def submit(self, name: str, steps: Steps[None]) -> Operation:
        """Start a collective, or queue it behind those under way."""
        operation = Operation(self, name, steps)
        with self._lock:
            if self._failure is not None:
                raise fresh(self._failure)
            self._queue.append(operation)
            if len(self._queue) == 1:
                self._resume()
            else:
                self._advance()
        return operation

    def deliver(self, transfer: Transfer) -> None:
        """Start a message."""
        with self._lock:
            if self._failure is not None:
                raise fresh(self._failure)
            self.transfers.append(transfer)
            transfer.start()
            self._advance()

    def require_usable(self) -> None:
        """Refuse to start anything on what is closed or broken.

        Raises:
            CollectiveError: The communicator was closed, or lost a rank before.
        """
        if self._failure is not None:
            raise fresh(self._failure)

    def poll(self) -> None:
        """Carry on with whatever can go on now."""
        with self._lock:
            self._advance()

    def finish(self, waited: Waited, look: Look | None = None) -> None:
        """Carry on, waiting for others where that must be, until ``waited`` is over.

        Args:
            waited: What this thread waits for.
            look: Called from time to time; may say to stop.
        """
        while not waited.is_over:
            with self._lock:
                self._spin(waited)
            if not (waited.is_over or self._rest(waited, look)):
                return

    def find_lag(self) -> Lag | None:
        """Return the word of a rank that has not come to the meeting."""
        meeting = self._num_meetings
        for rank, header in self._others:
            value = header.words[_PROGRESS]
            if value < meeting:
                return Lag(rank, _PROGRESS, value, meeting)
        return None

    def close(self) -> None:
        """End the helper and tell the others; what is under way fails."""
        with self._lock:
            self._own.publish(Places.is_closed, _CLOSED)
            self._fail(
                CollectiveError(
                    "communicator must be open, got a closed one. Connect again."
                )
            )
        self._helper.close()

    def _advance(self) -> None:
        """Carry on without waiting; the lock is held."""
        while self._queue and self._has_met():
            self._resume()
        if self.transfers:
            for transfer in list(self.transfers):
                transfer.advance()
            self.transfers = [t for t in self.transfers if not t.is_over]

    def _has_met(self) -> bool:
        meeting = self._num_meetings
        for words in self._other_words:
            if words[_PROGRESS] < meeting:
                return False
        if IS_WEAKLY_ORDERED:
            fence()
        return True

    def _spin(self, waited: Waited) -> None:
        """Carry on, looking again and again for a short while; the lock is held.

        This is fastest where every rank has a core. It is written for the time it
        takes.
        """
        others = self._other_words
        num_spins = num_left = CONTENTION.num_looks(self._num_spins)
        while not waited.is_over:
            meeting = self._num_meetings
            for words in others:
                if words[_PROGRESS] < meeting:
                    num_left -= 1
                    break
            else:
                if not self._queue:
                    break
                if IS_WEAKLY_ORDERED:
                    fence()
                self._resume()
                num_left = num_spins
            if num_left < 0:
                break
        if self.transfers:
            self._advance()

    def _resume(self) -> None:
        """Run the first collective to its next meeting, or to its end and the next's.

        An error of a kind that all ranks see alike ends one collective; any other
        leaves this rank out of step, so that it takes part in none any more.
        """
        queue = self._queue
        while queue:
            operation = queue[0]
            is_in_step = False
            try:
                if operation.is_inference == torch.is_inference_mode_enabled():
                    next(operation.steps)
                else:
                    with torch.inference_mode(mode=operation.is_inference):
                        next(operation.steps)
                self._num_meetings += 1
                self._own.publish(_PROGRESS, self._num_meetings)
                is_in_step = True
            except StopIteration:
                operation.is_over = True
                is_in_step = True
            except (CollectiveError, UsageError) as error:
                # The frames would keep the tensors, and tell nobody anything.
                operation.fail(error.with_traceback(None))
                is_in_step = True
            except Exception as error:  # noqa: BLE001  raised where it is waited for
                operation.fail(error)
            else:
                return
            finally:
                if not is_in_step:
                    self._break(operation)
            if queue:
                queue.popleft()

    def _break(self, operation: Operation) -> None:
        """Have all ranks give up: this one is out of step."""
        self._own.publish(Places.is_closed, _CLOSED)
        self._fail(
            CollectiveError(
                f"communicator must be in step on all ranks, but {operation.name} "
                f"failed on rank {self.rank}. Connect again."
            )
        )

    def _fail(self, error: CollectiveError) -> None:
        """Fail all that is under way, and all that is to come."""
        self._failure = error
        for operation in self._queue:
            if not operation.is_over:
                operation.fail(error)
        self._queue.clear()
        for transfer in self.transfers:
            transfer.fail(error)
        self.transfers = []

    def _rest(self, waited: Waited, look: Look | None) -> bool:
        """Wait, without the lock, until something may have changed.

        Returns:
            Whether to go on: ``look`` did not say to stop.
        """
        outcome = self._patience.wait(waited, look)
        if outcome is not None and outcome is not STOPPED:
            with self._lock:
                # Another thread may have been reading the last that the rank sent.
                self._advance()
                is_lost = not waited.is_over and waited.find_lag() is not None
                if is_lost and self._failure is None:
                    self._fail(outcome)
        return outcome is not STOPPED
