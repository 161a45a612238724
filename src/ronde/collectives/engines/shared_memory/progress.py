"""Carry collectives on, one after the other, by whichever thread has time.

Note [Phases]
    A collective is a generator that yields wherever it can go on only when all ranks
    have come as far: a phase is complete. Ranks count their phases in the word
    ``PROGRESS``; phase k is complete when every rank's word is at least k. All ranks
    run the same generators in the same order, so the numbers mean the same everywhere.

Note [Who makes progress]
    A call goes as far as it can, and so do all later calls, ``is_done()`` and
    ``wait()``. For a rank that starts a collective and then computes: whoever waits
    long rings the bell of those it waits for, and there the progress thread, which
    sleeps until then, carries the share out beside the computation. Whoever it is does
    so in the inference mode of the caller: elsewhere its tensors may not be written to.
"""

import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

import torch

from ronde.collectives.engine import ErrorContext, Look, Work, closed_error
from ronde.collectives.engines.shared_memory.shared_state import (
    BELL,
    IS_CLOSED,
    PROGRESS,
    ControlBlock,
)
from ronde.collectives.engines.shared_memory.waiting import (
    CONTENTION,
    IS_WEAKLY_ORDERED,
    Peers,
    fence,
    sleep_while,
    wake_all,
)
from ronde.collectives.scope import AbortScope
from ronde.errors import CollectiveError, UsageError, fresh

T = TypeVar("T")
Steps = Generator[None, None, T]

_NUM_SPINS = 200
_NUM_YIELDS = 100
FIRST_NAP_S = 0.001
_LAST_NAP_S = 0.05
_LOOK_EVERY_S = 0.25  # between two looks at whether the other ranks still live
_FOR_EVER_S = 3600.0
_RING_EVERY_S = 0.02


class PendingWord(NamedTuple):
    """A word of another rank's that must reach ``wanted`` before this rank goes on."""

    rank: int
    place: int
    value: int
    wanted: int


class SharedMemoryWork(Work[None]):
    """A collective or message under way."""

    __slots__ = ("_progress", "name")

    def __init__(self, progress: "ProgressEngine", name: str) -> None:
        super().__init__(None, is_over=False)
        self._progress = progress
        self.name = name

    def find_pending(self) -> PendingWord | None:
        """Return a word that must change before this can go on."""
        return self._progress.find_pending()

    def _poll(self) -> bool:
        self._progress.poll()
        return self.is_over

    def _block(self, look: Look | None) -> bool:
        progress = self._progress
        while not self.is_over:
            with progress.lock:
                progress.spin(self)
            if not (self.is_over or progress.rest(self, look)):
                return False
        return True

    def fail(self, error: Exception) -> None:
        self.failure = error
        self.is_over = True


class CollectiveWork(SharedMemoryWork):
    """A collective under way; ``steps`` is what is left to do."""

    __slots__ = ("is_inference", "steps")

    def __init__(
        self, progress: "ProgressEngine", name: str, steps: Steps[None]
    ) -> None:
        # As the classes above do, without the time of other calls.
        self.is_over, self.failure = False, None
        self._result, self._finish = None, None
        self._progress = progress
        self.name = name
        self.steps = steps
        self.is_inference = torch.is_inference_mode_enabled()


class Transfer(SharedMemoryWork):
    """A message under way between two ranks."""

    __slots__ = ()

    def start(self) -> None:
        raise NotImplementedError

    def advance(self) -> None:
        raise NotImplementedError


class ProgressEngine:
    """The collectives and messages of one communicator, and its waits."""

    def __init__(
        self,
        blocks: Sequence[ControlBlock],
        rank: int,
        peers: Peers,
        timeout_s: float,
        scope: AbortScope,
    ) -> None:
        self.rank = rank
        self.lock = threading.Lock()
        self.first_nap_s = FIRST_NAP_S  # of a wait, until it looks for itself
        self._blocks = blocks
        self._peers = peers
        self._timeout_s = timeout_s
        self._transfers: list[Transfer] = []
        self._own = blocks[rank]
        self._others = [(r, block) for r, block in enumerate(blocks) if r != rank]
        self._other_words = [block.words for _, block in self._others]
        self._num_phases = 0
        self._queue: deque[CollectiveWork] = deque()
        self._failure: CollectiveError | None = None
        CONTENTION.expect(len(blocks))
        self._num_spins = 0 if peers.is_crowded else _NUM_SPINS
        self._is_ending = False
        self._thread = threading.Thread(
            target=self._serve, name="ronde shared memory", daemon=True
        )
        self._thread.start()
        self._scope = scope
        scope.add(self.abort)

    def submit(self, name: str, steps: Steps[None]) -> CollectiveWork:
        """Start a collective, or queue it behind those under way."""
        work = CollectiveWork(self, name, steps)
        with self.lock:
            if self._failure is not None:
                raise fresh(self._failure)
            self._queue.append(work)
            if len(self._queue) == 1:
                self._resume()
            else:
                self._advance()
        return work

    def deliver(self, transfer: Transfer) -> None:
        with self.lock:
            if self._failure is not None:
                raise fresh(self._failure)
            self._transfers.append(transfer)
            transfer.start()
            self._advance()

    def require_usable(self) -> None:
        if self._failure is not None:
            raise fresh(self._failure)

    def poll(self) -> None:
        with self.lock:
            self._advance()

    def find_pending(self) -> PendingWord | None:
        """Return the word of a rank that has not completed the phase."""
        phase = self._num_phases
        for rank, block in self._others:
            value = block.words[PROGRESS]
            if value < phase:
                return PendingWord(rank, PROGRESS, value, phase)
        return None

    def abort(self) -> None:
        """Inform the others; what is under way fails, as does all to come."""
        with self.lock:
            self._own.publish(IS_CLOSED, 1)
            self._fail(self._scope.failure or closed_error())
        for block in self._blocks:
            wake_all(block.address + 8 * PROGRESS)  # who waits in this process

    def close(self) -> None:
        """Abort, and end the thread."""
        self.abort()
        self._is_ending = True
        if threading.current_thread() is self._thread:
            return
        # Another rank may ring at the same time, and undo it: see ControlBlock.ring.
        while self._thread.is_alive():
            self._own.ring()
            self._thread.join(_RING_EVERY_S)

    def _serve(self) -> None:
        """Sleep until this rank's bell rings, then do what can be done; a thread."""
        block = self._own
        while not self._is_ending:
            rung = block.words[BELL]
            self.poll()
            if not self._is_ending:
                sleep_while(block.address + 8 * BELL, rung, _FOR_EVER_S)

    def _advance(self) -> None:
        while self._queue and self._is_phase_complete():
            self._resume()
        if self._transfers:
            for transfer in list(self._transfers):
                transfer.advance()
            self._transfers = [t for t in self._transfers if not t.is_over]

    def _is_phase_complete(self) -> bool:
        phase = self._num_phases
        for words in self._other_words:
            if words[PROGRESS] < phase:
                return False
        if IS_WEAKLY_ORDERED:
            fence()
        return True

    def spin(self, work: SharedMemoryWork) -> None:
        """Carry on and look again for a short while, in no time; the lock is held."""
        others = self._other_words
        num_spins = num_left = CONTENTION.num_looks(self._num_spins)
        while not work.is_over:
            phase = self._num_phases
            for words in others:
                if words[PROGRESS] < phase:
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
        if self._transfers:
            self._advance()

    def _resume(self) -> None:
        """Run the first collective to its next phase, or to its end and the next's."""
        # An error that all ranks see alike ends one; any other leaves this rank out of
        # step, so that it takes part in none any more.
        queue = self._queue
        while queue:
            work = queue[0]
            is_in_step = False
            try:
                if work.is_inference == torch.is_inference_mode_enabled():
                    next(work.steps)
                else:
                    with torch.inference_mode(mode=work.is_inference):
                        next(work.steps)
                self._num_phases += 1
                self._own.publish(PROGRESS, self._num_phases)
                is_in_step = True
            except StopIteration:
                work.is_over = True
                is_in_step = True
            except (CollectiveError, UsageError) as error:
                # The frames would keep the tensors, and help nobody.
                work.fail(error.with_traceback(None))
                is_in_step = True
            except Exception as error:  # noqa: BLE001  raised where it is waited for
                work.fail(error)
            else:
                return
            finally:
                if not is_in_step:
                    self._break(work)
            if queue:
                queue.popleft()

    def _break(self, work: CollectiveWork) -> None:
        self._own.publish(IS_CLOSED, 1)
        self._fail(
            CollectiveError(
                f"communicator must be in step on all ranks, but {work.name} failed on "
                f"rank {self.rank}. Connect again."
            )
        )

    def _fail(self, error: CollectiveError) -> None:
        self._failure = error
        for work in self._queue:
            if not work.is_over:
                work.fail(error)
        self._queue.clear()
        for transfer in self._transfers:
            transfer.fail(error)
        self._transfers = []

    def rest(self, work: SharedMemoryWork, look: Look | None) -> bool:
        """Yield, then sleep until there may be progress; False if ``look`` ends it."""
        for _ in range(CONTENTION.num_looks(_NUM_YIELDS)):
            if work.is_over or work.find_pending() is None:
                return True
            if not CONTENTION.pause():
                break
        now = time.monotonic()
        deadline, look_at = now + self._timeout_s, now + _LOOK_EVERY_S
        nap_s, error = self.first_nap_s, None
        while not work.is_over and error is None:
            pending = work.find_pending()
            if pending is None:
                break
            pause_s = nap_s if look is None else look()
            if pause_s is None:
                return False
            self._nap(pending, min(nap_s, pause_s))
            nap_s = min(2 * nap_s, _LAST_NAP_S)
            now = time.monotonic()
            if now >= look_at or self._blocks[pending.rank].words[IS_CLOSED]:
                look_at = now + _LOOK_EVERY_S
                error = self._find_error(work, is_late=now >= deadline)
        if error is not None:
            with self.lock:
                # Another thread may have been reading the last that the rank sent.
                self._advance()
                is_lost = not work.is_over and work.find_pending() is not None
                if is_lost and self._failure is None:
                    self._fail(error)
        return True

    def _nap(self, pending: PendingWord, nap_s: float) -> None:
        """Sleep until a word changes; if it does not, have its rank look."""
        block = self._blocks[pending.rank]
        block.fall_asleep(self.rank)
        # The kernel looks at the word once more: see Note [Memory order].
        sleep_while(block.address + 8 * pending.place, pending.value, nap_s)
        block.wake_up(self.rank)
        if block.words[pending.place] == pending.value:
            block.ring()

    def _find_error(
        self, work: SharedMemoryWork, *, is_late: bool
    ) -> CollectiveError | None:
        pending = work.find_pending()
        if pending is None:
            return None
        absent = [pending.rank]
        if pending.place == PROGRESS:
            absent = [
                rank
                for rank, block in self._others
                if block.words[PROGRESS] < pending.wanted
            ]
        losses = [loss for rank in absent if (loss := self._find_loss(rank))]
        # What a rank did just before it went may be all that was waited for.
        if not (losses or is_late) or work.find_pending() is None:
            return None
        size = len(self._blocks)
        context = ErrorContext(work.name, self.rank, size, self._timeout_s)
        if losses:
            return context.lost(losses[0])
        stops = filter(None, map(self._peers.describe_stop, absent))
        stop = next((f" ({each})" for each in stops), "")
        return context.late(f" from ranks {absent[:8]}{stop}")

    def _find_loss(self, rank: int) -> str:
        if self._blocks[rank].words[IS_CLOSED]:
            return f"rank {rank} closed its communicator"
        return self._peers.find_loss(rank, self.rank)
