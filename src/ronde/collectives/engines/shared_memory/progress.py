"""Progress of collectives and messages, by calling threads and a progress thread.

Note [Phases]
    A collective is a generator. It yields at the end of a phase and continues once all
    ranks have completed the phase. Ranks count their phases in the word ``PROGRESS``;
    phase k is complete when every rank's word is at least k. All ranks run the same
    generators in the same order, so the numbers mean the same on all ranks.

Note [Progress]
    A call makes all progress possible without waiting, and so do all later calls,
    ``is_done()`` and ``wait()``. A rank may start a collective and then compute. If
    another rank waits long, it wakes the progress thread of the computing rank, which
    then performs that rank's part. Every thread uses the inference mode of the original
    caller, as the tensors may not be writable otherwise.
"""

import threading
import time
import zlib
from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ronde.collectives.engine import ErrorContext, PollCallback, Work, closed_error
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
from ronde.collectives.scope import AbortScope, warn_if_alive
from ronde.errors import CollectiveError, UsageError, fresh

T = TypeVar("T")
Steps = Generator[None, None, T]

_NUM_SPINS = 200
_NUM_YIELDS = 100
FIRST_NAP_S = 0.001
_LAST_NAP_S = 0.05
_CHECK_EVERY_S = 0.25  # for ranks that have ended
_FOR_EVER_S = 3600.0
_RING_EVERY_S = 0.02
_CLOSE_WITHIN_S = 60.0  # limit of close(), as one step may be long


class PendingWord(NamedTuple):
    """A word of another rank that must reach ``wanted`` before this rank continues."""

    rank: int
    word: int  # its index
    value: int
    wanted: int


class MessageHeader(NamedTuple):
    """The header before each piece, checked by the receiver."""

    tag: int
    num_bytes: int
    kind: int  # a digest of the dtype


class SharedMemoryWork(Work[None]):
    """A collective or message in progress."""

    __slots__ = ("_progress", "name")

    def __init__(self, progress: "ProgressEngine", name: str) -> None:
        super().__init__(None, is_over=False)
        self._progress = progress
        self.name = name

    def find_pending(self) -> PendingWord | None:
        return self._progress.find_pending()

    def _poll(self) -> bool:
        self._progress.poll()
        return self.is_over

    def _block(self, poll: PollCallback | None) -> bool:
        progress = self._progress
        while not self.is_over:
            with progress.lock:
                progress.spin(self)
            if not (self.is_over or progress.sleep(self, poll)):
                return False
        return True

    def fail(self, error: Exception) -> None:
        self.failure = error
        self.is_over = True


class CollectiveWork(SharedMemoryWork):
    """A collective in progress; ``steps`` are the remaining phases."""

    __slots__ = ("is_inference", "steps")

    def __init__(
        self, progress: "ProgressEngine", name: str, steps: Steps[None]
    ) -> None:
        # Not super().__init__(), which costs time in every call.
        self.is_over, self.failure = False, None
        self._result, self._finish = None, None
        self._progress = progress
        self.name = name
        self.steps = steps
        self.is_inference = torch.is_inference_mode_enabled()


class Message(SharedMemoryWork):
    """A send or receive in progress; ``data`` are the bytes of its tensor."""

    __slots__ = ("data", "header")

    def __init__(
        self, progress: "ProgressEngine", name: str, tensor: Tensor, tag: int
    ) -> None:
        super().__init__(progress, name)
        self.data = tensor.view(torch.uint8)
        kind = zlib.crc32(str(tensor.dtype).encode())
        self.header = MessageHeader(tag, self.data.numel(), kind)

    def start(self) -> None:
        raise NotImplementedError

    def advance(self) -> None:
        raise NotImplementedError


class ProgressEngine:
    """Drives the collectives, messages and waits of one communicator."""

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
        self.first_nap_s = FIRST_NAP_S  # before a sleeping wait polls
        self._blocks = blocks
        self._peers = peers
        self._timeout_s = timeout_s
        self._messages: list[Message] = []
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

    def deliver(self, message: Message) -> None:
        with self.lock:
            if self._failure is not None:
                raise fresh(self._failure)
            self._messages.append(message)
            message.start()
            self._advance()

    def require_usable(self) -> None:
        if self._failure is not None:
            raise fresh(self._failure)

    def poll(self) -> None:
        with self.lock:
            self._advance()

    def find_pending(self) -> PendingWord | None:
        """Return the progress word of a rank that lags behind this rank, or None."""
        phase = self._num_phases
        for rank, block in self._others:
            value = block.words[PROGRESS]
            if value < phase:
                return PendingWord(rank, PROGRESS, value, phase)
        return None

    def abort(self) -> None:
        """Notify the other ranks; fail all current and later calls."""
        with self.lock:
            self._own.publish(IS_CLOSED, 1)
            self._fail(self._scope.failure or closed_error())
        for block in self._blocks:
            wake_all(block.address + 8 * PROGRESS)  # waits of this process

    def close(self) -> None:
        self.abort()
        self._is_ending = True
        if threading.current_thread() is self._thread:
            return
        # One of several simultaneous rings may be lost: see ControlBlock.ring.
        end_s = time.monotonic() + _CLOSE_WITHIN_S
        while self._thread.is_alive() and time.monotonic() < end_s:
            self._own.ring()
            self._thread.join(_RING_EVERY_S)
        warn_if_alive(self._thread, _CLOSE_WITHIN_S)

    def _serve(self) -> None:
        """Make progress whenever this rank's bell rings; run by the progress thread."""
        block = self._own
        while not self._is_ending:
            rung = block.words[BELL]
            self.poll()
            if not self._is_ending:
                sleep_while(block.address + 8 * BELL, rung, _FOR_EVER_S)

    def _advance(self) -> None:
        while self._queue and self._is_phase_complete():
            self._resume()
        if self._messages:
            for message in list(self._messages):
                message.advance()
            self._messages = [t for t in self._messages if not t.is_over]

    def _is_phase_complete(self) -> bool:
        phase = self._num_phases
        for words in self._other_words:
            if words[PROGRESS] < phase:
                return False
        if IS_WEAKLY_ORDERED:
            fence()
        return True

    def spin(self, work: SharedMemoryWork) -> None:
        """Make progress and poll briefly without yielding; the lock must be held."""
        others = self._other_words
        num_spins = num_left = CONTENTION.num_polls(self._num_spins)
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
        if self._messages:
            self._advance()

    def _resume(self) -> None:
        """Run the first collective to its next phase; if it ends, run the next one."""
        # An error that all ranks raise ends only this collective. Any other error puts
        # this rank out of step and breaks the communicator.
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
                # The frames in its traceback would keep the tensors alive.
                work.fail(error.with_traceback(None))
                is_in_step = True
            except Exception as error:  # noqa: BLE001  raised in the waiting thread
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
                f"communicator is out of step: {work.name} failed on rank {self.rank}. "
                "Connect again."
            )
        )

    def _fail(self, error: CollectiveError) -> None:
        self._failure = error
        for work in self._queue:
            if not work.is_over:
                work.fail(error)
        self._queue.clear()
        for message in self._messages:
            message.fail(error)
        self._messages = []

    def sleep(self, work: SharedMemoryWork, poll: PollCallback | None) -> bool:
        """Wait until progress is likely; return False if ``poll`` ends the wait."""
        if CONTENTION.spin(
            lambda: work.is_over or work.find_pending() is None, _NUM_YIELDS
        ):
            return True
        now = time.monotonic()
        deadline, check_at = now + self._timeout_s, now + _CHECK_EVERY_S
        nap_s, error = self.first_nap_s, None
        while not work.is_over and error is None:
            pending = work.find_pending()
            if pending is None:
                break
            pause_s = nap_s if poll is None else poll()
            if pause_s is None:
                return False
            self._nap(pending, min(nap_s, pause_s))
            nap_s = min(2 * nap_s, _LAST_NAP_S)
            now = time.monotonic()
            if now >= check_at or self._blocks[pending.rank].words[IS_CLOSED]:
                check_at = now + _CHECK_EVERY_S
                error = self._find_error(work, is_late=now >= deadline)
        if error is not None:
            with self.lock:
                # Another thread may have been reading the awaited rank's last message.
                self._advance()
                is_lost = not work.is_over and work.find_pending() is not None
                if is_lost and self._failure is None:
                    self._fail(error)
        return True

    def _nap(self, pending: PendingWord, nap_s: float) -> None:
        block = self._blocks[pending.rank]
        block.fall_asleep(self.rank)
        # The kernel compares the word again: see Note [Memory order].
        sleep_while(block.address + 8 * pending.word, pending.value, nap_s)
        block.wake_up(self.rank)
        if block.words[pending.word] == pending.value:
            block.ring()

    def _find_error(
        self, work: SharedMemoryWork, *, is_late: bool
    ) -> CollectiveError | None:
        pending = work.find_pending()
        if pending is None:
            return None
        absent = [pending.rank]
        if pending.word == PROGRESS:
            absent = [
                rank
                for rank, block in self._others
                if block.words[PROGRESS] < pending.wanted
            ]
        losses = [
            f"rank {rank} closed its communicator"
            if self._blocks[rank].words[IS_CLOSED]
            else self._peers.find_loss(rank, self.rank)
            for rank in absent
        ]
        losses = [*filter(None, losses)]
        # The rank's last store before it ended may complete the wait.
        if not (losses or is_late) or work.find_pending() is None:
            return None
        size = len(self._blocks)
        context = ErrorContext(work.name, self.rank, size, self._timeout_s)
        if losses:
            return context.lost(losses[0])
        stops = filter(None, map(self._peers.describe_stop, absent))
        stop = next((f" ({each})" for each in stops), "")
        return context.late(f" from ranks {absent[:8]}{stop}")
