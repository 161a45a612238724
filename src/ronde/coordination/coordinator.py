"""One rank's end of the agreement on what runs next.

Note [Who carries on]
    Whoever waits for a result carries the agreement on itself: messages in, messages
    out, agreed operations run, under one lock; no other thread is woken for it. Between
    such waits a thread of the coordinator's own listens, asleep until a message comes
    or a submission is there that nobody waits for. Submissions of that kind gather for
    a moment (``gather_time_s``), so that many small tensors travel together.

    Nobody holds the lock while waiting for messages. While an operation runs it is
    held: operations run one after the other, in the order that was agreed.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from ronde.collectives import Communicator, Look, Work
from ronde.coordination.control.channel import Channel
from ronde.coordination.entries import Entry
from ronde.coordination.listener import Attendance, Listener
from ronde.coordination.operations import Kind, Operation
from ronde.coordination.options import CoordinationOptions
from ronde.coordination.proceedings import SHUT_DOWN, Proceedings
from ronde.coordination.table import Watch
from ronde.coordination.waits import Place, Waits
from ronde.errors import CollectiveError
from ronde.timeline.events import Recorder

_LOOK_EVERY_S = 0.25
"""Between two looks at whether neighbours still live, and at what waits for long."""
_NUM_QUICK_WAITS = 2
_FAST_S = 0.05
"""After so long on the fast path, whoever has not come is to refuse."""
_CLOSE_WITHIN_S = 2.0
"""An operation that is under way may end by itself for so long."""


class Coordinator:
    """Carries out named operations of one process set, in an order all ranks agree on.

    Any thread may submit; names may come in any order, differently on each rank.

    Attributes:
        rank: This process in the set.
        size: Number of ranks in the set.
        waits: Those of this process.
    """

    def __init__(
        self,
        communicator: Communicator,
        channel: Channel,
        options: CoordinationOptions,
        *,
        set_id: int = 0,
        ranks: tuple[int, ...] = (),
        waits: Waits | None = None,
    ) -> None:
        """Begin to listen.

        Args:
            communicator: Moves the tensors; nobody else may use it.
            channel: Carries the agreement; closed with this.
            options: How to work.
            set_id: The process set, for timelines.
            ranks: Its ranks among all, ascending; empty for all.
            waits: Those of this process, in all sets; None where this is the only one.
        """
        self.rank, self.size = communicator.rank, communicator.size
        self._communicator = communicator
        self._channel = channel
        self._options = options
        self.waits = Waits() if waits is None else waits
        self._table = self.waits.table(set_id)
        self._set_id, self._ranks = set_id, ranks
        self._proceedings = Proceedings(
            communicator,
            channel,
            self.waits,
            options,
            set_id=set_id,
            ranks=ranks or tuple(range(self.size)),
        )
        self._lock = threading.Lock()
        self._attending = Attendance(channel)
        self._next_look_s = 0.0
        self._is_closed = False
        self._listener = Listener(
            channel,
            self._attending,
            options.gather_time_s,
            carry_on=self._carry_on_alone,
            patience_s=self._patience_s,
        )
        self.stir = self._listener.stir
        if set_id == 0:
            self.waits.ask = self._ask

    @property
    def recorder(self) -> Recorder | None:
        """Takes down what happens; may be set at any time."""
        return self._proceedings.execution.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        """Set it."""
        self._proceedings.execution.recorder = recorder

    def submit(self, operation: Operation) -> Work[Any]:
        """Start an operation; returns at once.

        Returns:
            Work whose result is, with one entry for each tensor of the operation:
            ALLREDUCE, ADASUM, BROADCAST: the tuple of ``outputs``. ALLGATHER,
            REDUCESCATTER: a tuple of new tensors. ALLTOALL: a tuple of pairs of a new
            tensor and the rows received from each rank, a list. BARRIER: None. JOIN:
            the rank (in the set) that joined last.

            ``is_done()`` does not wait, and is False for a while after ``submit``.

        Raises:
            UsageError: The name is under way already. (Text of Horovod's.)
            CollectiveError: The job is shut down, or a rank is gone. From ``wait()``
                also: the ranks' operations do not fit together.
        """
        self.waits.add_user()
        entry = self._enter(operation)
        self._proceedings.submitted.append(entry)
        self.stir()
        return entry

    def connect(self, name: str, make: Callable[[int], Communicator]) -> Entry:
        """Start to make a communicator with an order of calls of its own.

        Args:
            name: Equal on all ranks.
            make: See ``Operation.connect``.

        Returns:
            Work whose result is the communicator and its number.

        Raises:
            UsageError: See ``submit``.
            CollectiveError: See ``submit``. From ``wait()`` also: a rank has joined
                without asking for it.
            UnpairedError: From ``wait()``: see ``Waits.tell``.
        """
        entry = self._enter(Operation(Kind.CONNECT, name=name, connect=make))
        self._proceedings.submitted.append(entry)
        self.stir()
        return entry

    def give_up(self, entry: Entry) -> None:
        """Have a ``connect`` fail here, if it is not over."""
        if self._table.take(entry.name) is entry:
            entry.fail(CollectiveError(f"{entry.name} was given up by this rank."))

    def run(self, operation: Operation) -> Any:  # noqa: ANN401 - each operation's own
        """Carry an operation out and return its result.

        Quicker than ``submit(operation).wait()``, for no other thread is woken.

        Raises:
            UsageError: See ``submit``.
            CollectiveError: See ``submit``.
        """
        self.waits.add_user()
        entry = self._enter(operation)
        proceedings = self._proceedings
        with self._lock:
            is_fast = not self._is_closed and proceedings.start_fast(entry)
            if is_fast:
                proceedings.finish_fast()
            else:
                proceedings.submitted.append(entry)
        if is_fast and not entry.is_over:
            self._await_round()
        return entry.wait()

    def watch(self, name: str) -> Watch:
        """Have the stall inspector count something that is waited for elsewhere.

        For collectives that are never negotiated, such as gradient buckets.
        """
        return self._table.watch(name)

    def call_on_stop(self, function: Callable[[], None]) -> None:
        """Call ``function``, in any thread, if a stall ends the job.

        For what is waited for elsewhere: nothing else would end that wait.
        """
        self._proceedings.on_stop = function

    def close(self) -> None:
        """Tell the others that this rank is gone; what is under way fails.

        Ends the thread; the communicator stays its maker's, save where an operation is
        under way on it: then it is aborted.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._table.fail(CollectiveError(SHUT_DOWN))
        if self._lock.acquire(timeout=_CLOSE_WITHIN_S):
            self._lock.release()
        else:
            self._communicator.abort()
        self._listener.end()
        self._channel.close()
        self._listener.join()

    def finish(self, entry: Entry, look: Look | None = None) -> None:
        """Carry on until ``entry`` is over, or ``look`` says to stop."""
        with self._attending:
            num_left = 0 if look or self.waits.has_put_off else _NUM_QUICK_WAITS
            while num_left and not self._is_over(entry):
                # Mostly that is all: what comes below takes longer.
                self._await_news(self.waits.patience_s)
                num_left -= 1
            if look is not None:
                self._finish(entry, look)
            elif not entry.is_over:
                with self.waits.waiting(self.place(entry.name)) as own:
                    self._finish(entry, own)
        if self._proceedings.submitted:
            self.stir()

    def place(self, name: str, number: int = 0) -> Place:
        """Return a place of the set: see ``Place``."""
        return Place(self._set_id, name, number, self._ranks)

    def _finish(self, entry: Entry, look: Look) -> None:
        while not self._is_over(entry):
            pause_s = look()
            if pause_s is None:
                return
            self._await_news(min(pause_s, _LOOK_EVERY_S))

    def _is_over(self, entry: Entry) -> bool:
        if not entry.is_over:
            self._carry_on(1)
        return entry.is_over

    def _await_news(self, timeout_s: float) -> None:
        fast_path = self._proceedings.fast_path
        if fast_path is not None and fast_path.rounds.is_awaited():
            with self._lock:
                fast_path.refuse()
        self._channel.wait(timeout_s, is_eager=True)
        self._look(1)

    def _enter(self, operation: Operation) -> Entry:
        entry = Entry(self, self._table.name(operation), operation)
        self._table.add(entry)
        return entry

    def _await_round(self) -> None:
        """Wait for a round; if it does not end, ``finish`` sees to it."""
        fast_path = self._proceedings.fast_path
        if fast_path is not None:
            fast_path.rounds.wait(min(_FAST_S, self.waits.patience_s))
            with self._lock:
                self._proceedings.finish_fast(is_late=True)

    def _ask(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._proceedings.ask()
        self._carry_on(0)

    def _patience_s(self) -> float | None:
        """Return when to look next, though no message came."""
        if not self._table.is_empty():
            return _LOOK_EVERY_S
        # Something may begin to be watched meanwhile, and that wakes nobody.
        warning_s = self._options.stall_warning_s
        return warning_s / 2 if warning_s else None

    def _carry_on_alone(self) -> None:
        self._carry_on(0)
        self._look(0)

    def _carry_on(self, num_own: int) -> None:
        """Do all that can be done without waiting for messages.

        Args:
            num_own: 1 for a thread that attends itself, 0 for the listener. Others that
                attend may sleep for what has come of it, and are woken.
        """
        with self._lock:
            if self._is_closed:
                return
            is_news = self._proceedings.carry_on()
        if is_news and self._attending.count > num_own:
            self._channel.wake()

    def _look(self, num_own: int) -> None:
        """Look after neighbours and stalls, from time to time."""
        now = time.monotonic()
        if now < self._next_look_s:
            return
        with self._lock:
            self._next_look_s = now + _LOOK_EVERY_S
            if self._is_closed:
                return
            self._proceedings.look()
        self._carry_on(num_own)
