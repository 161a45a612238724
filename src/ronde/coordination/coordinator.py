"""One rank's end of the agreement on what runs next.

Note [Who makes progress]
    Whoever waits for a result makes progress itself: messages in, messages out, agreed
    operations run, under one lock; no other thread is woken for it. Between such waits
    a thread of the coordinator's own waits, asleep until a message comes or a
    submission is there that nobody waits for. Submissions of that kind gather for a
    moment (``gather_time_s``), so that many small tensors travel together.

    Nobody holds the lock while waiting for messages. While an operation runs it is
    held: operations run one after the other, in the order that was agreed.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from ronde.collectives import Communicator, Look, Work
from ronde.coordination.control.channel import ControlChannel
from ronde.coordination.requests import Entry, NamedOperation, OpKind
from ronde.coordination.stall import WAITS
from ronde.coordination.state import SHUT_DOWN, CoordinationOptions, CoordinatorState
from ronde.coordination.waits import SyncPoint, Waits
from ronde.errors import CollectiveError

__all__ = ["CoordinationOptions", "Coordinator"]

_LOOK_EVERY_S = 0.25  # between two looks at who still lives and what waits for long
_NUM_QUICK_WAITS = 2
_FAST_S = 0.05  # after so long on the fast path, whoever has not come is to refuse
_CLOSE_WITHIN_S = 2.0  # an operation that is under way may end by itself for so long


class Coordinator:
    """Carries out named operations of one process set, in an order all ranks agree on.

    Any thread may submit; names may come in any order, differently on each rank. The
    recorder of ``execution`` may be set at any time. ``watch`` counts, for stalls, what
    is waited for elsewhere: collectives that are never negotiated, such as buckets.
    ``wake`` has the coordinator's own thread make progress.
    """

    def __init__(
        self,
        communicator: Communicator,
        channel: ControlChannel,
        options: CoordinationOptions,
        *,
        set_id: int = 0,
        ranks: tuple[int, ...] = (),
        waits: Waits | None = None,
    ) -> None:
        """Begin; nobody else may use the communicator and the channel.

        ``ranks`` are the set's among all, ascending; empty for all. ``waits`` are those
        of this process in all sets.
        """
        self.rank, self.size = communicator.rank, communicator.size
        self._communicator = communicator
        self._channel, self._waiter = channel, channel.waiter
        self._options = options
        self.waits = waits = waits or Waits()
        self._table = waits.table(set_id)
        self.watch = self._table.watch
        self._set_id, self._ranks = set_id, ranks
        self._state = CoordinatorState(
            communicator, channel, waits, options, set_id=set_id, ranks=ranks
        )
        self.execution = self._state.execution
        self._lock = threading.Lock()
        self._next_look_s = 0.0
        self._is_woken = False
        self._is_closed = False
        if set_id == 0:
            waits.ask_all = self._ask_for_waits
        self._thread = threading.Thread(
            target=self._work, name="ronde-coordinator", daemon=True
        )
        self._thread.start()

    def submit(self, operation: NamedOperation) -> Work[Any]:
        """Start an operation; returns at once.

        The work's result has one entry for each tensor of the operation. ALLREDUCE,
        ADASUM, BROADCAST: the tuple of ``outputs``. ALLGATHER, REDUCESCATTER: a tuple
        of new tensors. ALLTOALL: a tuple of pairs of a new tensor and the rows received
        from each rank, a list. BARRIER: None. JOIN: the rank (in the set) that joined
        last. ``is_done()`` does not wait, and is False for a while after ``submit``.

        Raises:
            UsageError: The name is under way already. (Text of Horovod's.)
            CollectiveError: The job is shut down, or a rank is gone. From ``wait()``
                also: the ranks' operations do not fit together.
        """
        self.waits.add_user()
        return self._submit(operation)

    def connect(self, name: str, make: Callable[[int], Communicator]) -> Entry:
        """Start to make a communicator with an order of calls of its own.

        The result is the communicator and its number. ``wait()`` raises
        ``CollectiveError`` also where a rank has joined without asking for it, and
        ``UnpairedError``: see ``Waits.give_way``.
        """
        return self._submit(NamedOperation(OpKind.CONNECT, name=name, connect=make))

    def give_up(self, entry: Entry) -> None:
        """Have a ``connect`` fail here, if it is under way."""
        if self._table.take(entry.name) is entry:
            entry.fail(CollectiveError(f"{entry.name} was given up by this rank."))

    def run(self, operation: NamedOperation) -> Any:  # noqa: ANN401 - each operation's own
        """Do what ``submit(operation).wait()`` does; no other thread is woken."""
        self.waits.add_user()
        entry = self._enter(operation)
        state = self._state
        with self._lock:
            rounds = None if self._is_closed else state.start_fast(entry)
            if rounds is not None:
                state.finish_fast()
            else:
                state.submitted.append(entry)
        if rounds is not None and not entry.is_over:
            # If the round does not end, ``_finish`` sees to it.
            rounds.wait(min(_FAST_S, self.waits.patience_s))
            with self._lock:
                state.finish_fast(is_late=True)
        return entry.wait()

    def call_on_stop(self, function: Callable[[], None]) -> None:
        """Call ``function``, in any thread, if a stall ends the job."""
        self._state.on_stop = function

    def close(self) -> None:
        """Announce to the others that this rank is gone; what is under way fails.

        The communicator stays its maker's, but is aborted if an operation runs on it.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._table.fail(CollectiveError(SHUT_DOWN))
        if self._lock.acquire(timeout=_CLOSE_WITHIN_S):
            self._lock.release()
        else:
            self._communicator.abort()
        self._channel.close()
        self._thread.join()

    def wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._waiter.wake()

    def point(self, name: str) -> SyncPoint:
        return SyncPoint(self._set_id, name, 0, self._ranks)

    def _submit(self, operation: NamedOperation) -> Entry:
        entry = self._enter(operation)
        self._state.submitted.append(entry)
        self.wake()
        return entry

    def _enter(self, operation: NamedOperation) -> Entry:
        name = self._table.name(operation)
        entry = Entry(name, operation, self.wake, self._finish)
        self._table.add(entry)
        return entry

    def _finish(self, entry: Entry, look: Look | None = None) -> None:
        """Make progress until ``entry`` is over, or ``look`` stops it."""
        self._waiter.add_waiter()
        try:
            num_left = 0 if look or self.waits.has_put_off else _NUM_QUICK_WAITS
            while num_left and not self._is_over(entry):
                # Mostly that is all: what comes below takes longer.
                self._await_messages(self.waits.patience_s)
                num_left -= 1
            if look is not None:
                self._wait(entry, look)
            elif not entry.is_over:
                with self.waits.waiting(self.point(entry.name)) as own:
                    self._wait(entry, own)
        finally:
            self._waiter.remove_waiter()
        if self._state.submitted:
            self.wake()

    def _wait(self, entry: Entry, look: Look) -> None:
        while not self._is_over(entry):
            pause_s = look()
            if pause_s is None:
                return
            self._await_messages(min(pause_s, _LOOK_EVERY_S))

    def _is_over(self, entry: Entry) -> bool:
        if not entry.is_over:
            self._progress(1)
        return entry.is_over

    def _await_messages(self, timeout_s: float) -> None:
        fast_path = self._state.fast_path
        if fast_path is not None and fast_path.rounds.is_awaited():
            with self._lock:
                fast_path.refuse()
        self._waiter.wait(timeout_s, is_eager=True)
        self._look(1)

    def _ask_for_waits(self) -> None:
        with self._lock:
            self._state.ask_all(WAITS)
        self._progress(0)

    def _progress(self, num_own: int) -> None:
        """Do all that needs no waiting; wake others if more than ``num_own`` wait."""
        with self._lock:
            if self._is_closed:
                return
            has_changed = self._state.progress()
        if has_changed and self._waiter.num_waiters > num_own:
            self._waiter.wake()

    def _look(self, num_own: int) -> None:
        now = time.monotonic()
        if now < self._next_look_s:
            return
        with self._lock:
            self._next_look_s = now + _LOOK_EVERY_S
            if not self._is_closed:
                self._state.look()
        self._progress(num_own)

    def _work(self) -> None:
        """Make progress when nobody else does: asleep until something comes."""
        while not self._is_closed:
            timeout_s = _LOOK_EVERY_S
            if self._table.is_empty():
                # Something may begin to be watched meanwhile, and that wakes nobody.
                timeout_s = self._options.stall_warning_s / 2 or None
            self._waiter.wait(timeout_s, is_eager=False)
            if self._is_closed:
                return
            if self._is_woken and not self._waiter.num_waiters:
                time.sleep(self._options.gather_time_s)
            self._is_woken = False
            self._progress(0)
            self._look(0)
