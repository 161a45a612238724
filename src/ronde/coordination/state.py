"""What a coordinator does under its lock: messages in and out, commands carried out.

Note [Fast path]
    A cached all-reduce of a few bytes takes two hand-offs in the ordinary way, up the
    tree and down, and one more to reduce. Where all ranks share memory, one does: each
    shows its number of the request together with its elements, and where all numbers
    are the same every rank reduces. If not, all go the ordinary way, each with what it
    had. Which of the two it is comes from the round alone, so it is the same on all
    ranks: see ``control/rounds.py``, Note [One exchange].

    A rank that is in an ordinary wait, or computes for long while others ask, refuses
    the round. After a round without a result all leave some runs to the ordinary way,
    more and more of them; all have seen the same rounds and the same runs, so they
    come back together.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ronde.collectives import Communicator, ReduceOp
from ronde.collectives.arithmetic import require_reducible, scale_
from ronde.collectives.engines.shared_memory.phases import (
    ReduceKernel,
    Scratch,
)
from ronde.collectives.torch_modes import writing_to
from ronde.coordination.control.channel import ControlChannel
from ronde.coordination.control.shared_memory import (
    REFUSED,
    ROUND_BYTES,
    ExchangeRounds,
)
from ronde.coordination.execution import Execution, FusionTuning
from ronde.coordination.node import Node, RootNode, RunCommand
from ronde.coordination.requests import Entry, OpKind, Request
from ronde.coordination.stall import STALLS, Inspector, StallReport
from ronde.coordination.waits import SyncPoint, Waits
from ronde.errors import CollectiveError, PeerLostError, UsageError
from ronde.tuning import AutotuneOptions

_FAST_ENGINES = ("auto", "shared_memory")  # they reduce so few bytes in the same way
_MAX_PLANS = 1024
_MOST_SKIPPED = 64
_FIND_LOSS_WITHIN_S = 1.5
"""After tensors could not be moved: who is gone, and not only who noticed."""
_HAS_JOINED, _HAS_GIVEN_UP, _ASKS = -1, 0, 1  # for a communicator
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


@dataclass(frozen=True, slots=True)
class CoordinationOptions:
    """How a coordinator works; equal on all ranks."""

    fusion_threshold_bytes: int = 128 << 20  # tensors are fused up to this; 0: none
    tuning: AutotuneOptions | None = None  # finds a better threshold
    # Submissions that nobody waits for yet gather so long (Horovod's cycle time).
    gather_time_s: float = 0.001
    cache_capacity: int = 1024  # requests remembered; 0 for none
    is_group_alone: bool = False  # do not fuse a group with anything else
    stall_warning_s: float = 60.0  # warn of what has waited for so long; 0 for never
    stall_shutdown_s: float = 0.0  # end the job after so long; 0 for never


class _FastPlan(NamedTuple):
    """How a request is reduced; ranks show theirs in views of even and odd rounds."""

    kernel: ReduceKernel
    prescale: float
    views: list[list[Tensor]]


class FastPath:
    """One rank's part; one thread at a time, save for ``rounds.wait``."""

    def __init__(self, rounds: ExchangeRounds, rank: int, size: int) -> None:
        self.rounds = rounds
        self._rank, self._size = rank, size
        self._scratch = Scratch()
        self._plans: dict[int, _FastPlan | None] = {}
        self._under_way: tuple[Entry, _FastPlan] | None = None
        self._num_skipped = 0
        self._num_left = 0

    def start(self, entry: Entry, tag: int, request: Request) -> bool:
        """Show the others an operation; return whether that was possible.

        ``tag`` is the request's number in the cache, the same on all ranks; not 0.
        """
        rounds = self.rounds
        if (
            self._num_left
            or self._under_way
            or rounds.has_waiter
            or not rounds.is_complete(rounds.number)
        ):
            return False
        plans = self._plans
        if tag not in plans:
            if len(plans) >= _MAX_PLANS:
                plans.clear()
            plans[tag] = self._plan(request)
        plan = plans[tag]
        if plan is None:
            return False
        source, output = entry.operation.tensors[0], entry.operation.outputs[0]
        for tensor in (source, output):
            # Its memory must be its elements, one after the other.
            if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                return False
        own = plan.views[rounds.number + 1 & 1][self._rank]
        own.copy_(source if source.dim() == 1 else source.view(-1))
        if plan.prescale != 1.0:
            scale_(own, plan.prescale)
        self._under_way = entry, plan
        rounds.take_part(tag)
        return True

    def finish(self, *, is_late: bool = False) -> tuple[Entry, bool] | None:
        """End the round if all have come to it; if ``is_late``, have others answer.

        Returns what this rank showed, and whether it is over now, or else is to go the
        ordinary way; None where nothing ended.
        """
        if self._under_way is None:
            return None
        rounds = self.rounds
        number = rounds.number
        if not rounds.is_complete(number):
            if not is_late:
                return None
            rounds.request_answers()
            if not rounds.is_complete(number):
                return None
        rounds.rest()
        (entry, plan), self._under_way = self._under_way, None
        if not rounds.is_unanimous():
            self._skip()
            return entry, False
        self._num_skipped = 0
        output = entry.operation.outputs[0]
        try:
            with writing_to((output,)):
                flat = output if output.dim() == 1 else output.view(-1)
                plan.kernel.combine(plan.views[number & 1], flat)
        except Exception as error:  # noqa: BLE001 - of this rank alone: out of memory
            entry.fail(error)
        if not entry.is_over:
            entry.succeed((output,))
        return entry, True

    def refuse(self) -> None:
        # Nobody can be ahead of a round that is not complete.
        if self.rounds.is_awaited():
            self.rounds.take_part(REFUSED)
            self._skip()

    def ran(self) -> None:
        if self._num_left:
            self._num_left -= 1

    def _skip(self) -> None:
        self._num_skipped = min(2 * self._num_skipped or 1, _MOST_SKIPPED)
        self._num_left = self._num_skipped

    def _plan(self, request: Request) -> _FastPlan | None:
        """Return how an all-reduce is done; None where that is not done here."""
        if len(request.shapes) != 1 or request.device != "cpu":
            return None
        dtype = request.torch_dtypes[0]
        numel = torch.Size(request.shapes[0]).numel()
        op, postscale = request.reduce_op, request.postscale
        if not 0 < numel * dtype.itemsize <= ROUND_BYTES:
            return None
        try:
            require_reducible(dtype, op, request.prescale, postscale)
        except UsageError:
            return None
        kernel = ReduceKernel(dtype, op, self._size, postscale, self._scratch)
        return _FastPlan(kernel, request.prescale, self.rounds.views(dtype, numel))


class CoordinatorState:
    """One rank's agreement and what comes of it; one thread at a time."""

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
        """Begin; ``ranks`` are the set's among all, or empty for all."""
        self.submitted: deque[Entry] = deque()  # to the node; any thread may append
        # Called when a stall ends the job, for what is not in the table.
        self.on_stop: Callable[[], None] | None = None
        self.execution = Execution(
            communicator,
            set_id=set_id,
            threshold_bytes=options.fusion_threshold_bytes,
            is_group_alone=options.is_group_alone,
        )
        self._communicator = communicator
        self._channel = channel
        self._waits = waits
        self._table = waits.table(set_id)
        self._ranks = ranks or tuple(range(communicator.size))
        self._tuning: FusionTuning | None = None
        self._inspector: Inspector | None = None
        warning_s, shutdown_s = options.stall_warning_s, options.stall_shutdown_s
        self._stall_warning_s = warning_s
        self._stall_repeat_s = warning_s
        if shutdown_s:
            self._stall_repeat_s = min(warning_s, shutdown_s / 4, 5.0)
        self._next_ask_s = 0.0
        self._node = Node(channel.tree)
        if channel.tree.parent is None:
            self._node = root = RootNode(channel.tree, options.cache_capacity)
            self._inspector = Inspector(root, warning_s, shutdown_s)
            if options.tuning is not None:
                change = partial(root.order, "tune")
                threshold_bytes = options.fusion_threshold_bytes
                self._tuning = FusionTuning(threshold_bytes, options.tuning, change)
        self.fast_path: FastPath | None = None
        if (
            channel.rounds is not None
            and communicator.engine in _FAST_ENGINES
            and options.tuning is None
        ):
            rank, size = communicator.rank, communicator.size
            self.fast_path = FastPath(channel.rounds, rank, size)
        self._lost: set[int] = set()
        self._num_connected = 0
        self.ask_all = partial(self._node.report, "ask")
        self._actions: dict[str, Callable[..., None]] = {
            "connect": self._connect,
            "fail": self._fail_name,
            "joined": self._all_joined,
            "lost": self._lose,
            "report": self._report,
            "give_way": self._give_way,
            "stop": self._stop,
            "tune": partial(setattr, self.execution, "threshold_bytes"),
        }

    def progress(self) -> bool:
        """Do all that needs no waiting; return whether something came of it."""
        has_changed = False
        commands = self._node.commands
        while self._exchange():
            has_changed = True
            while commands:
                command = commands.popleft()
                if isinstance(command, RunCommand):
                    self._run(command)
                else:
                    self._actions[command.verb](*command.values)
        return has_changed

    def start_fast(self, entry: Entry) -> ExchangeRounds | None:
        """Have an operation take the fast path, if it can; return the path's rounds."""
        # A timeline shows what ranks agree on, a round that gave way is driven only by
        # ordinary waits, and several operations had better travel together.
        if (
            self.fast_path is None
            or entry.operation.kind is not OpKind.ALLREDUCE
            or self.submitted
            or self.execution.recorder is not None
            or self._waits.has_put_off
            or not self._table.has_one()
        ):
            return None
        cache = self._node.cache
        known = cache.find(entry.name)
        if known is None or not known[1].matches(entry.operation):
            return None
        tag = cache.epoch << 32 | known[0] + 1
        is_started = self.fast_path.start(entry, tag, known[1])
        return self.fast_path.rounds if is_started else None

    def finish_fast(self, *, is_late: bool = False) -> None:
        """End what is on the fast path, if it can be: see ``FastPath.finish``."""
        ended = self.fast_path and self.fast_path.finish(is_late=is_late)
        if not ended:
            return
        entry, is_over = ended
        if is_over:
            self._table.take(entry.name)
            self._node.cache.use(entry.name)
        else:
            self.submitted.append(entry)

    def look(self) -> None:
        """Look after neighbours and stalls; ``progress`` is to follow."""
        self._report_losses()
        if self._stall_warning_s:
            now = time.monotonic()
            oldest_s = next(iter(self._table.waiting().values()), 0.0)
            if oldest_s >= self._stall_warning_s and now >= self._next_ask_s:
                self._next_ask_s = now + self._stall_repeat_s
                self.ask_all(STALLS)
        if self._inspector is not None:
            self._inspector.look()

    def _exchange(self) -> bool:
        """Take messages in and send some; return whether there are commands."""
        node, channel = self._node, self._channel
        for sender, message in channel.receive():
            node.receive(sender, message)
        if self.fast_path is not None:
            self.finish_fast()
            if self.fast_path.rounds.is_asked():
                self.fast_path.refuse()
        if self.submitted:
            recorder = self.execution.recorder
            if recorder is not None:
                recorder.cycle(time.monotonic_ns())
            while self.submitted:
                self._submit(self.submitted.popleft())
        if isinstance(node, RootNode) and node.inquiries and self._inspector:
            self._inspector.look()
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
        entries = [self._table.take(request.name) for request in run.requests]
        try:
            self.execution.run(run, entries)
        except CollectiveError as error:
            self._give_up(entries, error)
            return
        except Exception as error:  # noqa: BLE001 - of this rank alone: out of memory
            self._break_down(entries, error)
            return
        if self.fast_path is not None:
            self.fast_path.ran()
        if self._tuning is not None and not self._tuning.is_over:
            own = [entry for entry in entries if entry is not None]
            num_bytes = sum(t.nbytes for each in own for t in each.operation.tensors)
            self._tuning.ran([each.name for each in own], num_bytes, time.monotonic())

    def _connect(self, name: str) -> None:
        """Make a communicator, if every rank still asks for it.

        The root still counts a rank that has given up, and one that has joined.
        """
        if self._table.failure is not None:
            return
        entry = self._table.find(name)
        absent = _HAS_JOINED if self._table.has_joined else _HAS_GIVEN_UP
        vote = torch.tensor([absent if entry is None else _ASKS], device="cpu")
        try:
            self._communicator.all_reduce(vote, ReduceOp.MIN).wait()
        except CollectiveError as error:
            self._give_up([entry], error)
            return
        number, self._num_connected = self._num_connected, self._num_connected + 1
        if entry is None:
            return
        if vote.item() == _HAS_GIVEN_UP:
            self.submitted.append(entry)  # and it may ask again
            return
        self._table.take(name)
        make = entry.operation.connect
        if vote.item() == _HAS_JOINED or make is None:
            entry.fail(CollectiveError(_JOINED_WITHOUT % name))
            return
        try:
            with torch.inference_mode(mode=False):  # it outlives the call
                entry.succeed((make(number), number))
        except CollectiveError as error:
            entry.fail(error)
        except Exception as error:  # noqa: BLE001 - see ``_run``
            self._break_down([entry], error)

    def _fail_name(self, name: str, text: str) -> None:
        _fail([self._table.take(name)], CollectiveError(text))

    def _all_joined(self, last: int) -> None:
        self._table.all_joined()
        if entry := self._table.take("join.noname"):
            entry.succeed(last)

    def _lose(self, rank: int, reason: str, is_orderly: bool) -> None:  # noqa: FBT001
        how = "has shut down" if is_orderly else "is gone"
        text = f"{SHUT_DOWN}\nRank {self._ranks[rank]} {how}: {reason}."
        self._table.fail(PeerLostError(text))

    def _report(self, kind: str, number: int, points: list[list[Any]]) -> None:
        rank = self._node.tree.rank
        if kind == STALLS:
            answer = StallReport.of(rank, self._table)
        else:
            answer = self._waits.answer([SyncPoint(*point) for point in points])
        self._node.report("answer", kind, number, rank, answer)

    def _give_way(
        self, chosen: list[tuple[int, list[int]]], where: list[tuple[int, str]]
    ) -> None:
        own = self._node.tree.rank
        others = [f"rank {rank} waits in {name}" for rank, name in where if rank != own]
        self._waits.give_way(dict(chosen).get(own, []), ", ".join(others))

    def _stop(self, text: str) -> None:
        self._table.fail(CollectiveError(f"{SHUT_DOWN}\n{text}"))
        if self.on_stop is not None:
            self.on_stop()

    def _give_up(self, entries: Sequence[Entry | None], error: CollectiveError) -> None:
        """End all after tensors could not be moved; say who is gone, if one is."""
        # First, so that a rank that waits for tensors of this one can answer, too.
        self._communicator.abort()
        deadline = time.monotonic() + _FIND_LOSS_WITHIN_S
        while self._table.failure is None and time.monotonic() < deadline:
            self._report_losses()
            self._exchange()
            for command in self._node.commands:
                is_run = isinstance(command, RunCommand)
                if not is_run and command.verb == "lost" and not self._table.failure:
                    self._lose(*command.values)
            self._channel.wait(_FIND_LOSS_WITHIN_S / 10, is_eager=True)
        failure = self._table.failure
        if failure is None:
            failure = PeerLostError(f"{SHUT_DOWN}\n{error}")
            self._leave(str(error), failure)
        _fail(entries, failure)

    def _break_down(self, entries: Sequence[Entry | None], error: Exception) -> None:
        """End all after an error that no other rank has: they must not wait for us."""
        reason = f"{type(error).__name__}: {error}"
        self._leave(reason, CollectiveError(f"{SHUT_DOWN}\n{reason}"))
        self._communicator.abort()
        _fail(entries, error)

    def _leave(self, reason: str, failure: CollectiveError) -> None:
        """Announce that this rank takes part no more; fail all of its own."""
        self._node.lose(self._node.tree.rank, reason, is_orderly=False)
        self._exchange()
        self._table.fail(failure)

    def _report_losses(self) -> None:
        for rank, reason, is_orderly in self._channel.find_losses():
            if rank not in self._lost:
                self._lost.add(rank)
                self._node.lose(rank, reason, is_orderly=is_orderly)


def _fail(entries: Sequence[Entry | None], failure: Exception) -> None:
    for entry in entries:
        if entry is not None:
            entry.fail(failure)
