"""What a coordinator does under its lock: messages in and out, agreed steps taken."""

import time
from collections import deque
from collections.abc import Callable

import torch

from ronde.collectives import Communicator, ReduceOp
from ronde.collectives.recent import Recent
from ronde.coordination.control.channel import Channel
from ronde.coordination.entries import Entry
from ronde.coordination.execution import Execution
from ronde.coordination.fast_path import ENGINES, FastPath
from ronde.coordination.fusion_tuning import FusionTuning
from ronde.coordination.inquiry import Inquiry
from ronde.coordination.inspector import Inspector
from ronde.coordination.node import Node
from ronde.coordination.operations import Kind
from ronde.coordination.options import CoordinationOptions
from ronde.coordination.requests import Memory, Request
from ronde.coordination.root import Root
from ronde.coordination.steps import (
    Asked,
    Connect,
    Failed,
    Gone,
    Inquired,
    Joined,
    Question,
    Run,
    Step,
    Stopped,
    ToldToGiveWay,
    Tuned,
)
from ronde.coordination.waits import Place, Waits
from ronde.errors import CollectiveError, PeerLostError

_FIND_LOSS_WITHIN_S = 1.5
"""After tensors could not be moved: who is gone, and not only who noticed."""
JOIN_NAME = "join.noname"
_HAS_JOINED, _HAS_GIVEN_UP, _ASKS = -1, 0, 1
"""Whether a rank asks for a communicator that all are said to ask for."""
SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks "
    "or an attempt to allreduce, allgather or broadcast a tensor after one of the "
    "ranks finished execution. If the shutdown was caused by an exception, you should "
    "see the exception in the log before the first shutdown message."
)
_JOINED_WITHOUT = (
    "%s must be there on every rank before one joins, got one that joins without it. "
    "Make optimizers before any rank joins."
)


class Proceedings:
    """One rank's agreement and what comes of it; one thread at a time.

    Attributes:
        execution: Carries out what was agreed.
        submitted: What the node has not been told of yet; any thread may append.
        on_stop: Called when the job is to end, for what is not in the table.
    """

    def __init__(
        self,
        communicator: Communicator,
        channel: Channel,
        waits: Waits,
        options: CoordinationOptions,
        *,
        set_id: int,
        ranks: tuple[int, ...],
    ) -> None:
        """Begin: see ``Coordinator``."""
        self.submitted: deque[Entry] = deque()
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
        self._ranks = ranks
        tree = channel.tree
        is_root = tree.parent is None
        self._node = Root(tree, options.cache_capacity) if is_root else Node(tree)
        self._tuning: FusionTuning | None = None
        if is_root and options.tuning is not None:
            default_bytes = options.fusion_threshold_bytes
            self._tuning = FusionTuning(default_bytes, options.tuning, self.tune)
        self._inspector = Inspector(self._node, options)
        self._inquiry = Inquiry(self._node) if isinstance(self._node, Root) else None
        rounds = channel.rounds if communicator.engine in ENGINES else None
        self.fast_path: FastPath | None = None
        if rounds is not None and options.tuning is None:
            self.fast_path = FastPath(rounds, communicator.rank, communicator.size)
        self._memories = Recent[str, Memory](options.cache_capacity)
        self._lost: set[int] = set()
        self._num_connected = 0

    def carry_on(self) -> bool:
        """Do all that can be done without waiting; say whether something came of it."""
        is_news = False
        while self._exchange():
            is_news = True
            while self._node.steps:
                self._take(self._node.steps.popleft())
        return is_news

    def start_fast(self, entry: Entry) -> bool:
        """Have an operation take the fast path; say whether it is on it.

        A timeline is to show what ranks agree on, and what has given way to wait in
        the ordinary way; several operations had better travel together.
        """
        if (
            self.fast_path is None
            or entry.operation.kind is not Kind.ALLREDUCE
            or self.submitted
            or self.execution.recorder is not None
            or self._waits.has_put_off
            or not self._table.has_one()
        ):
            return False
        known = self._node.find(entry.name)
        if known is None or not self._fits(entry, known[1]):
            return False
        return self.fast_path.start(entry, self._node.tag(known[0]), known[1])

    def finish_fast(self, *, is_late: bool = False) -> None:
        """End what is on the fast path, if it can be: see ``FastPath.finish``."""
        ended = self.fast_path and self.fast_path.finish(is_late=is_late)
        if not ended:
            return
        entry, is_over = ended
        if is_over:
            self._table.take(entry.name)
            self._node.used(entry.name)
        else:
            self.submitted.append(entry)

    def look(self) -> None:
        """Look after neighbours and stalls; ``carry_on`` is to follow."""
        self._report_losses()
        oldest_s = next(iter(self._table.waiting().values()), None)
        self._inspector.look(oldest_s)
        if self._inquiry is not None:
            self._inquiry.look()

    def ask(self) -> None:
        """Have the root look for ranks that wait for each other."""
        self._node.say("ask")

    def tune(self, fusion_threshold_bytes: int) -> None:
        """Have all ranks fuse up to so many bytes; only rank 0 of the set can."""
        if isinstance(self._node, Root):
            self._node.tune(fusion_threshold_bytes)

    def _exchange(self) -> bool:
        """Take messages in and send some; say whether there is something to do."""
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
                self._introduce(self.submitted.popleft())
        if self._inquiry is not None and self._inquiry.has_heard():
            self._inquiry.look()
        for to, message in node.flush():
            channel.send(to, message)
        return bool(node.steps)

    def _introduce(self, entry: Entry) -> None:
        """Tell the node of a submission."""
        operation, name = entry.operation, entry.name
        if operation.kind is Kind.JOIN:
            self._table.has_joined = True
            self._node.join()
            return
        known = self._node.find(name)
        if known is None:
            self._node.submit(Request.of(operation, name))
        elif self._fits(entry, known[1]):
            self._node.hit(*known)
        else:
            self._node.change(known[0], Request.of(operation, name))

    def _fits(self, entry: Entry, request: Request) -> bool:
        """Say whether an operation is what the cached request of its name asks for."""
        operation, name = entry.operation, entry.name
        memory = self._memories.get(name)
        if memory is None or memory.request is not request:
            if Request.of(operation, name).text != request.text:
                return False
            if memory is not None:
                self._memories.remove(name)
            self._memories.put(name, Memory(request, operation))
            return True
        return memory.fits(operation)

    def _take(self, step: Step) -> None:
        """Carry a step out."""
        match step:
            case Run():
                self._run(step)
            case Connect():
                self._connect(step.name)
            case Failed():
                _fail([self._table.take(step.name)], CollectiveError(step.text))
            case Joined():
                self._table.has_joined = False
                self._table.restart_numbers()
                entry = self._table.take(JOIN_NAME)
                if entry is not None:
                    entry.succeed(step.last)
            case Gone():
                self._table.fail(self._loss(step))
            case Asked() | Inquired() | ToldToGiveWay():
                self._obey_inquiry(step)
            case Stopped():
                self._stop(step.text)
            case Tuned():
                self.execution.threshold_bytes = step.fusion_threshold_bytes

    def _obey_inquiry(self, question: Question) -> None:
        waits, rank = self._waits, self._node.tree.rank
        if isinstance(question, ToldToGiveWay):
            self._give_way(question)
        elif isinstance(question, Asked):
            self._inspector.answer(
                question.number,
                self._table.waiting(),
                has_joined=self._table.has_joined,
            )
        elif not question.places:
            self._node.say("answer", question.number, rank, waits.blocked(), [])
        else:
            places = [Place(*place) for place in question.places]
            self._node.say("answer", question.number, rank, *waits.compare(places))

    def _give_way(self, step: ToldToGiveWay) -> None:
        own = dict(step.told).get(self._node.tree.rank, [])
        others = [
            f"rank {rank} waits in {name}"
            for rank, name in step.where
            if rank != self._node.tree.rank
        ]
        self._waits.tell(own, ", ".join(others))

    def _stop(self, text: str) -> None:
        self._table.fail(CollectiveError(f"{SHUT_DOWN}\n{text}"))
        if self.on_stop is not None:
            self.on_stop()

    def _run(self, run: Run) -> None:
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
        if self._tuning is not None:
            self._tune(self._tuning, entries)

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
        if vote.item() == _HAS_JOINED:
            entry.fail(CollectiveError(_JOINED_WITHOUT % name))
            return
        try:
            entry.connect(number)
        except CollectiveError as error:
            entry.fail(error)
        except Exception as error:  # noqa: BLE001 - see ``_run``
            self._break_down([entry], error)

    def _tune(self, tuning: FusionTuning, entries: list[Entry | None]) -> None:
        own = [entry for entry in entries if entry is not None]
        num_bytes = sum(t.nbytes for entry in own for t in entry.operation.tensors)
        tuning.ran([entry.name for entry in own], num_bytes, time.monotonic())
        if tuning.is_over:
            self._tuning = None

    def _give_up(self, entries: list[Entry | None], error: CollectiveError) -> None:
        """End all after tensors could not be moved; say who is gone, if one is."""
        deadline = time.monotonic() + _FIND_LOSS_WITHIN_S
        while self._table.failure is None and time.monotonic() < deadline:
            self._report_losses()
            self._exchange()
            for step in self._node.steps:
                if isinstance(step, Gone) and not self._table.failure:
                    self._table.fail(self._loss(step))
            self._channel.wait(_FIND_LOSS_WITHIN_S / 10, is_eager=True)
        failure = self._table.failure
        if failure is None:
            failure = PeerLostError(f"{SHUT_DOWN}\n{error}")
            self._leave(str(error), failure)
        self._communicator.abort()
        _fail(entries, failure)

    def _break_down(self, entries: list[Entry | None], error: Exception) -> None:
        """End all after an error that no other rank has: they must not wait for us."""
        reason = f"{type(error).__name__}: {error}"
        self._leave(reason, CollectiveError(f"{SHUT_DOWN}\n{reason}"))
        self._communicator.abort()
        _fail(entries, error)

    def _leave(self, reason: str, failure: CollectiveError) -> None:
        """Tell the others that this rank takes part no more; fail all of its own."""
        self._node.lose(self._node.tree.rank, reason, is_orderly=False)
        self._exchange()
        self._table.fail(failure)

    def _loss(self, gone: Gone) -> PeerLostError:
        rank = self._ranks[gone.rank]
        how = "has shut down" if gone.is_orderly else "is gone"
        return PeerLostError(f"{SHUT_DOWN}\nRank {rank} {how}: {gone.reason}.")

    def _report_losses(self) -> None:
        for loss in self._channel.find_losses():
            if loss.rank not in self._lost:
                self._lost.add(loss.rank)
                self._node.lose(loss.rank, loss.reason, is_orderly=loss.is_orderly)


def _fail(entries: list[Entry | None], failure: Exception) -> None:
    """End operations that were under way."""
    for entry in entries:
        if entry is not None and not entry.is_over:
            entry.fail(failure)
