"""The coordinator of one rank: negotiates and runs named operations.

Note [Progress]
    A thread that waits for a result makes progress itself, under one lock: it receives
    and sends messages and runs agreed operations, and no other thread is woken. If no
    thread waits, the coordinator's own thread makes progress. It sleeps until a message
    comes or an operation is submitted for which no thread waits. Such submissions are
    gathered for a moment (``gather_time_s``), and longer while more arrive. So many
    small tensors are fused in the same way every time, and their plan is cached.

    The lock is not held while waiting for messages. It is held while an operation runs,
    so operations run one after the other, in the agreed order.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from ronde.collectives import Communicator, PollCallback, ReduceOp, Work
from ronde.collectives.scope import warn_if_alive
from ronde.coordination.control.channel import ControlChannel
from ronde.coordination.execution import CoordinationOptions, Execution, FusionTuning
from ronde.coordination.fast_path import FastPath
from ronde.coordination.messages import Loss
from ronde.coordination.node import (
    Command,
    ConnectCommand,
    FailCommand,
    GiveWayCommand,
    JoinedCommand,
    Node,
    ReportCommand,
    RootNode,
    RunCommand,
    StopCommand,
    TuneCommand,
)
from ronde.coordination.requests import Entry, NamedOperation, OpKind, Request
from ronde.coordination.waits import (
    STALLS,
    WAITS,
    Inspector,
    PolledWait,
    StallReport,
    SyncPoint,
    Waits,
)
from ronde.errors import CollectiveError, MismatchError, PeerLostError
from ronde.status.steps import own_meter

__all__ = ["CoordinationOptions", "Coordinator"]

_CHECK_EVERY_S = 0.25  # for lost ranks and stalls
_NUM_QUICK_WAITS = 2
_MOST_GATHERED = 4  # most delays of a submission by newer ones
_CLOSE_WITHIN_S = 2.0  # for a running operation to end by itself
_JOIN_WITHIN_S = 60.0  # for the thread to end after an abort
_FAST_ENGINES = ("auto", "shared_memory")  # results equal the fast path's
_FIND_LOSS_WITHIN_S = 1.5
"""Wait, after a failed operation, for a message about the rank that was lost first."""
_HAS_JOINED, _HAS_GIVEN_UP, _ASKS = -1, 0, 1  # votes for a new communicator
SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks "
    "or an attempt to allreduce, allgather or broadcast a tensor after one of the "
    "ranks finished execution. If the shutdown was caused by an exception, you should "
    "see the exception in the log before the first shutdown message."
)
_JOINED_WITHOUT = (
    "%s must exist on every rank before any rank joins, got a rank that joined without "
    "it. Create optimizers before any rank joins."
)


class CoordinatorState:
    """The state of a coordinator; used by one thread at a time."""

    def __init__(
        self,
        communicator: Communicator,
        channel: ControlChannel,
        waits: Waits,
        options: CoordinationOptions,
        *,
        set_id: int,
        ranks: tuple[int, ...],
    ) -> None:
        """Create the state; ``ranks`` are those of the process set, empty for all."""
        self.submitted: deque[Entry] = deque()  # any thread may append
        # Called when a stall ends the job.
        self.on_stop: Callable[[], None] = lambda: None
        self.execution = Execution(communicator, set_id, options)
        self._communicator, self._channel = communicator, channel
        self._waits, self._table = waits, waits.table(set_id)
        self._ranks = ranks or tuple(range(communicator.size))
        self._stall_warning_s = options.stall_warning_s
        self._tuning: FusionTuning | None = None
        self._inspector: Inspector | None = None
        self._node = Node(channel.tree)
        if channel.tree.parent is None:
            self._node = root = RootNode(channel.tree, options.cache_capacity)
            limits = options.stall_warning_s, options.stall_shutdown_s
            self._inspector = Inspector(root, *limits)
            if options.tuning is not None:
                default = options.fusion_threshold_bytes
                self._tuning = FusionTuning(
                    default, options.tuning, lambda size: root.order(TuneCommand(size))
                )
        self.fast_path: FastPath | None = None
        is_fast = communicator.engine in _FAST_ENGINES and options.tuning is None
        if channel.shared is not None and is_fast:
            self.fast_path = FastPath(channel.shared)
        self._num_connected = 0
        self.duplicates = WeakSet[Communicator]()  # duplicates in use
        self.ask_all = partial(self._node.report, "ask")

    def progress(self) -> bool:
        """Make all possible progress without waiting; return True if there was any."""
        has_changed = False
        commands = self._node.commands
        while self._exchange():
            has_changed = True
            while commands:
                self._execute(commands.popleft())
        return has_changed

    def _execute(self, command: Command) -> None:
        match command:
            case RunCommand():
                self._run(command)
            case ConnectCommand(name):
                self._connect(name)
            case FailCommand():
                self._fail_name(command)
            case JoinedCommand(last):
                self._end_join(last)
            case Loss():
                self._lose(command)
            case ReportCommand():
                self._report(command)
            case GiveWayCommand():
                self._give_way(command)
            case StopCommand(text):
                self._table.fail(CollectiveError(f"{SHUT_DOWN}\n{text}"))
                self.on_stop()
            case TuneCommand(num_bytes):
                self.execution.threshold_bytes = num_bytes

    def start_fast(self, entry: Entry) -> FastPath | None:
        """Start an operation on the fast path; return the path, None if ineligible."""
        # Not with a timeline, which records negotiations; with deferred rounds,
        # which only normal waits drive; and with several operations, which are fused.
        if (
            self.fast_path is None
            or entry.operation.kind is not OpKind.ALLREDUCE
            or self.submitted
            or self.execution.recorder is not None
            or self._waits.put_off
            or len(self._table.entries) != 1
        ):
            return None
        cache = self._node.cache
        known = cache.find(entry.name)
        if known is None or not known[1].matches(entry.operation):
            return None
        tag = cache.epoch << 32 | known[0] + 1
        is_started = self.fast_path.start(entry, tag, known[1])
        return self.fast_path if is_started else None

    def finish_fast(self, *, is_late: bool = False) -> None:
        ended = self.fast_path and self.fast_path.finish(is_late=is_late)
        if not ended:
            return
        entry, is_over = ended
        if is_over:
            self._table.pop(entry.name)
            self._node.cache.use(entry.name)
        else:
            self.submitted.append(entry)

    def check(self) -> None:
        """Check for lost ranks and stalls; call ``progress`` after it."""
        self._report_losses()
        if self._stall_warning_s:
            oldest_s = next(iter(self._table.ages_s().values()), 0.0)
            if oldest_s >= self._stall_warning_s:
                self.ask_all(STALLS)
        if self._inspector is not None:
            self._inspector.step()

    def _exchange(self) -> bool:
        """Receive and send messages; return True if there are commands to execute."""
        node, channel = self._node, self._channel
        for sender, message in channel.receive():
            node.receive(sender, message)
        if self.fast_path is not None:
            is_asked = self.fast_path.is_asked()
            self.finish_fast()
            if is_asked:  # the previous round is finished now
                self.fast_path.refuse()
        if self.submitted:
            recorder = self.execution.recorder
            if recorder is not None:
                recorder.cycle(time.monotonic_ns())
            while self.submitted:
                self._submit(self.submitted.popleft())
        if isinstance(node, RootNode) and node.inquiries and self._inspector:
            self._inspector.step()
        for to, message in node.flush():
            channel.send(to, message)
        return bool(node.commands)

    def _submit(self, entry: Entry) -> None:
        operation, name = entry.operation, entry.name
        if operation.kind is OpKind.JOIN:
            self._table.has_joined = True
            self._node.join()
            return
        known = self._node.cache.find(name)
        if known is None:
            self._node.submit(Request.of(operation, name))
        elif known[1].matches(operation):
            self._node.hit(*known)
        else:
            self._node.change(known[0], Request.of(operation, name))

    def _run(self, run: RunCommand) -> None:
        if self._table.failure is not None:
            return
        entries = [self._table.pop(request.name) for request in run.requests]
        try:
            self.execution.run(run, entries)
        except Exception as error:  # noqa: BLE001 - fails the entries
            self._fail(entries, error)
            return
        if self.fast_path is not None:
            self.fast_path.ran()
        if self._tuning is not None and not self._tuning.is_over:
            own = [entry for entry in entries if entry is not None]
            num_bytes = sum(t.nbytes for each in own for t in each.operation.tensors)
            self._tuning.ran([each.name for each in own], num_bytes, time.monotonic())

    def _connect(self, name: str) -> None:
        """Make a communicator if every rank still requests the name."""
        if self._table.failure is not None:
            return
        # The command also covers ranks that gave up meanwhile, or have joined.
        entry = self._table.entries.get(name)
        absent = _HAS_JOINED if self._table.has_joined else _HAS_GIVEN_UP
        vote = torch.tensor([absent if entry is None else _ASKS], device="cpu")
        try:
            self._communicator.all_reduce(vote, ReduceOp.MIN).wait()
        except CollectiveError as error:
            self._fail([entry], error)
            return
        number, self._num_connected = self._num_connected, self._num_connected + 1
        if entry is None:
            return
        if vote.item() == _HAS_GIVEN_UP:
            self.submitted.append(entry)  # the other rank may request it again
            return
        self._table.pop(name)
        if vote.item() == _HAS_JOINED:
            entry.fail(CollectiveError(_JOINED_WITHOUT % name))
            return
        try:
            with torch.inference_mode(mode=False):  # it outlives the call
                duplicate = self._communicator.duplicate()
            self.duplicates.add(duplicate)
            entry.succeed((duplicate, number))
        except CollectiveError as error:
            entry.fail(error)
        except Exception as error:  # noqa: BLE001 - fails the entry
            self._fail([entry], error)

    def _fail_name(self, command: FailCommand) -> None:
        if entry := self._table.pop(command.name):
            entry.fail(MismatchError(command.text))

    def _end_join(self, last: int) -> None:
        self._table.all_joined()
        if entry := self._table.pop("join.noname"):
            entry.succeed(last)

    def _lose(self, loss: Loss) -> None:
        how = "has shut down" if loss.is_orderly else "is gone"
        text = f"{SHUT_DOWN}\nRank {self._ranks[loss.rank]} {how}: {loss.reason}."
        self._table.fail(PeerLostError(text))

    def _report(self, command: ReportCommand) -> None:
        if command.kind == STALLS:
            answer = StallReport.of(self._table)
        else:
            points = [SyncPoint(*point) for point in command.points]
            answer = self._waits.answer(points)
        own = self._node.tree.rank
        self._node.report("answer", command.kind, command.number, own, answer)

    def _give_way(self, command: GiveWayCommand) -> None:
        own = self._node.tree.rank
        others = [f"rank {r} waits in {name}" for r, name in command.where if r != own]
        self._waits.give_way(dict(command.chosen).get(own, []), ", ".join(others))

    def _fail(self, entries: Sequence[Entry | None], error: Exception) -> None:
        """Fail all operations after a failed collective or an error of this rank."""
        if isinstance(error, CollectiveError):
            # First, so that ranks that wait for this rank in a collective fail, too.
            self._communicator.abort()
            self._await_loss()
            if self._table.failure is None:
                self._leave(str(error), PeerLostError(f"{SHUT_DOWN}\n{error}"))
            error = self._table.failure or error
        else:
            reason = f"{type(error).__name__}: {error}"
            self._leave(reason, CollectiveError(f"{SHUT_DOWN}\n{reason}"))
            self._communicator.abort()
        for entry in filter(None, entries):
            entry.fail(error)

    def _await_loss(self) -> None:
        deadline = time.monotonic() + _FIND_LOSS_WITHIN_S
        while self._table.failure is None and time.monotonic() < deadline:
            self._report_losses()
            self._exchange()
            for command in self._node.commands:
                if isinstance(command, Loss) and not self._table.failure:
                    self._lose(command)
            self._channel.wait(_FIND_LOSS_WITHIN_S / 10, is_eager=True)

    def _leave(self, reason: str, failure: CollectiveError) -> None:
        """Report this rank as lost and fail all its operations."""
        self._node.lose(Loss(self._node.tree.rank, reason, is_orderly=False))
        self._exchange()
        self._table.fail(failure)

    def _report_losses(self) -> None:
        for loss in self._channel.find_losses():
            self._node.lose(loss)


class Coordinator:
    """Runs named operations of one process set in an order that all ranks agree on.

    Any thread may submit, and the order of names may differ between ranks. The recorder
    of ``execution`` may be set at any time. ``watch`` makes stall reports include waits
    that are not negotiated, such as waits for gradient buckets. ``wake`` wakes the
    coordinator's thread.
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
        """Take exclusive use of a communicator and a channel.

        Args:
            ranks: The ranks of the process set, ascending; empty for all.
            waits: The waits of this process. An abort of their scope fails all
                operations of this coordinator, but does not abort the communicator.
        """
        self.rank, self.size = communicator.rank, communicator.size
        self._communicator, self._options = communicator, options
        self._channel, self._waiter = channel, channel.waiter
        self.waits = waits = waits or Waits()
        self._table = waits.table(set_id)
        self._table.ranks = ranks
        self.watch = self._table.watch
        self._set_id, self._ranks = set_id, ranks
        self._state = CoordinatorState(
            communicator, channel, waits, options, set_id=set_id, ranks=ranks
        )
        self.execution, self.duplicates = self._state.execution, self._state.duplicates
        self._lock = threading.Lock()
        self._next_check_s = 0.0
        self._is_woken = False
        self._is_closed = False
        if set_id == 0:
            waits.ask_all = self._ask_for_waits
        self._thread = threading.Thread(
            target=self._work, name="ronde-coordinator", daemon=True
        )
        self._thread.start()
        waits.scope.add(self._abort)

    @property
    def fast_path(self) -> FastPath | None:
        """The fast path; None if ranks do not share memory or fusion is tuned."""
        return self._state.fast_path

    def submit(self, operation: NamedOperation) -> Work[Any]:
        """Start an operation; returns at once.

        The work's result has one entry for each tensor of the operation. ALLREDUCE,
        ADASUM, BROADCAST: the tuple of ``outputs``. ALLGATHER, REDUCESCATTER: a tuple
        of new tensors. ALLTOALL: a tuple of pairs of a new tensor and the list of rows
        received from each rank. BARRIER: None. JOIN: the last rank (in the set) to
        join.

        Raises:
            UsageError: The name is in use; the text is Horovod's.
            CollectiveError: The job is shut down, or a rank is lost; from ``wait()``,
                also if the ranks' operations are incompatible.
        """
        self.waits.add_user()
        return self._submit(operation)

    def connect(self, name: str) -> Entry:
        """Start to duplicate the communicator.

        The result is the new communicator and its number. ``wait()`` also fails if a
        rank has joined without this call, or if ``Waits.give_way`` chooses it.
        """
        return self._submit(NamedOperation(OpKind.CONNECT, name=name))

    def give_up(self, entry: Entry) -> None:
        """Fail a pending ``connect`` on this rank."""
        if self._table.pop(entry.name) is entry:
            entry.fail(CollectiveError(f"{entry.name} was given up by this rank."))

    def run(self, operation: NamedOperation) -> Any:  # noqa: ANN401 - each operation's own
        """Run ``submit(operation).wait()`` without waking another thread."""
        with own_meter().blocked:
            return self._run(operation)

    def _run(self, operation: NamedOperation) -> Any:  # noqa: ANN401  as above
        self.waits.add_user()
        entry = self._enter(operation)
        state = self._state
        with self._lock:
            fast_path = None if self._is_closed else state.start_fast(entry)
            if fast_path is not None:
                state.finish_fast()
            else:
                state.submitted.append(entry)
        if fast_path is not None and not entry.is_over:
            # ``_finish`` completes a round that does not end here.
            fast_path.wait(min(fast_path.patience_s, self.waits.patience_s))
            with self._lock:
                state.finish_fast(is_late=True)
        return entry.wait()

    def call_on_stop(self, function: Callable[[], None]) -> None:
        self._state.on_stop = function

    def close(self) -> None:
        """Close the channel and fail pending operations; may be called repeatedly.

        The communicator is not closed, but is aborted if an operation is running.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._table.fail(self._final_failure())
        if self._lock.acquire(timeout=_CLOSE_WITHIN_S):
            self._lock.release()
        else:
            self._communicator.abort()
        self._channel.close()
        self._thread.join(_JOIN_WITHIN_S)
        warn_if_alive(self._thread, _JOIN_WITHIN_S)
        if self._set_id == 0:
            self.waits.ask_all = lambda: None  # no reference cycle

    def _abort(self) -> None:
        self._table.fail(self._final_failure(), is_last=True)
        self._channel.wake()

    def _final_failure(self) -> CollectiveError:
        return self.waits.scope.failure or CollectiveError(SHUT_DOWN)

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

    def _finish(self, entry: Entry, poll: PollCallback | None = None) -> None:
        """Make progress until ``entry`` is over or ``poll`` ends the wait."""
        self._waiter.add_waiter()
        try:
            num_left = 0 if poll or self.waits.put_off else _NUM_QUICK_WAITS
            while num_left and not self._is_over(entry):
                # Usually sufficient, and faster than the waits below.
                self._await_messages(self.waits.patience_s)
                num_left -= 1
            if poll is not None:
                self._wait(entry, poll)
            elif not entry.is_over:
                with PolledWait(self.waits, self.point(entry.name)) as own:
                    self._wait(entry, own)
        finally:
            self._waiter.remove_waiter()
        if self._state.submitted:
            self.wake()

    def _wait(self, entry: Entry, poll: PollCallback) -> None:
        while not self._is_over(entry):
            pause_s = poll()
            if pause_s is None:
                return
            self._await_messages(min(pause_s, _CHECK_EVERY_S))

    def _is_over(self, entry: Entry) -> bool:
        if not entry.is_over:
            self._progress(1)
        return entry.is_over

    def _await_messages(self, timeout_s: float) -> None:
        fast_path = self._state.fast_path
        if fast_path is not None and fast_path.is_awaited():
            with self._lock:
                self._state.finish_fast()
                fast_path.refuse()
        self._waiter.wait(timeout_s, is_eager=True)
        self._check(1)

    def _ask_for_waits(self) -> None:
        with self._lock:
            self._state.ask_all(WAITS)
        self._progress(0)

    def _progress(self, num_own: int) -> None:
        """Make progress without waiting; wake the other waiters, if there are any."""
        with self._lock:
            if self._is_closed:
                return
            has_changed = self._state.progress()
        if has_changed and self._waiter.num_waiters > num_own:
            self._waiter.wake()

    def _check(self, num_own: int) -> None:
        now = time.monotonic()
        if now < self._next_check_s:
            return
        with self._lock:
            self._next_check_s = now + _CHECK_EVERY_S
            if not self._is_closed:
                self._state.check()
        self._progress(num_own)

    def _gather(self) -> None:
        submitted = self._state.submitted
        for _ in range(_MOST_GATHERED):
            num_before = len(submitted)
            if self._waiter.num_waiters:
                return
            time.sleep(self._options.gather_time_s)
            if len(submitted) == num_before:
                return

    def _work(self) -> None:
        """Make progress while no other thread does; run by the coordinator's thread."""
        while not self._is_closed:
            timeout_s = _CHECK_EVERY_S
            if not (self._table.entries or self._table.watches):
                # A watch that begins meanwhile does not wake this thread.
                timeout_s = self._options.stall_warning_s / 2 or None
            self._waiter.wait(timeout_s, is_eager=False)
            if self._is_closed:
                return
            if self._is_woken:
                self._gather()
            self._is_woken = False
            self._progress(0)
            self._check(0)
