"""Collectives by schedules, over another engine's point-to-point calls.

Note [Stages]
    Chunks are cut into pieces of a cache's size, the same on both sides of a message.
    What round r does with piece j of a chunk has stage r + j: while one piece is being
    reduced, those after it are on their way, and those before it are a round further.
    A piece depends only on the same piece in earlier rounds, so on lower stages.

    A rank posts in order of stages, some ahead of it (``_LOOKAHEAD``) but none before
    the stages that it depends on are over, and waits only for what it depends on. That
    cannot deadlock: of all ranks that wait, take one at the lowest stage h. It waits
    for a message of a stage below h, which its peer has not posted; so the peer waits
    at a stage below h, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ronde.collectives.algorithms import find_algorithm
from ronde.collectives.arithmetic import put_back
from ronde.collectives.engine import Engine, ReduceOp, Work
from ronde.collectives.lane import Lane, LaneEngine
from ronde.collectives.schedule import Action, Chunks, Schedule, ScheduleStep

PIECE_BYTES = 512 * 1024
"""The longest message: long enough that posting it costs little beside sending it."""
_MAX_FREE = 32
_LOOKAHEAD = 4
_MAX_TAG = 1 << 14
"""MPI promises tags up to 32,767. Messages of equal tag arrive in order."""


class ScheduledMessage(NamedTuple):
    """One message, as one of its two ranks sees it."""

    action: Action
    peer: int
    start: int
    stop: int
    tag: int
    needs: tuple[int, ...]
    """Earlier messages of the program that must be complete before it is posted."""


@dataclass(slots=True)
class _Draft:
    """A message whose place in the program is not known yet."""

    step: ScheduleStep
    stage: int
    """See Note [Stages]."""
    span: tuple[int, int]
    cells: tuple[tuple[int, int], ...]
    """Names of the parts of the vector that it touches."""
    needs: "list[_Draft]"
    tag: int = 0

    @property
    def posting(self) -> tuple[int, bool, int, int]:
        """Return what the program is sorted by: receives come before sends."""
        earliest = max((need.stage + 1 for need in self.needs), default=0)
        stage = max(self.stage - _LOOKAHEAD, earliest)
        return stage, not self.step.is_receive, self.stage, self.span[0]


def compile_program(
    schedule: Schedule, rank: int, piece_numel: int
) -> tuple[ScheduledMessage, ...]:
    """Return the messages of one rank in the order in which to post them."""
    drafts = sorted(
        _drafts(schedule, rank, piece_numel),
        key=lambda draft: (draft.stage, *draft.span),
    )
    counts: dict[tuple[int, bool], int] = {}
    for draft in drafts:
        # Both ranks of a pair count their messages in the same order.
        way = (draft.step.peer, draft.step.is_receive)
        draft.tag = counts.get(way, 0) % _MAX_TAG
        counts[way] = draft.tag + 1
    _connect(drafts)
    drafts.sort(key=lambda draft: draft.posting)
    places = {id(draft): place for place, draft in enumerate(drafts)}
    return tuple(
        ScheduledMessage(
            draft.step.action,
            draft.step.peer,
            *draft.span,
            draft.tag,
            tuple(sorted(places[id(need)] for need in draft.needs)),
        )
        for draft in drafts
    )


def _drafts(schedule: Schedule, rank: int, piece_numel: int) -> Iterator[_Draft]:
    chunks = schedule.chunks
    num_pieces = -(-chunks.largest() // piece_numel)
    for index, steps in enumerate(schedule.of_rank(rank)):
        for step in steps:
            if num_pieces > 1:
                yield from _pieces(step, index, chunks, num_pieces)
            else:
                yield from _groups(step, index, chunks, piece_numel)


def _pieces(
    step: ScheduleStep, index: int, chunks: Chunks, num_pieces: int
) -> Iterator[_Draft]:
    """Cut each chunk into ``num_pieces``."""
    for chunk in range(step.first, step.first + step.count):
        start, stop = chunks.span(chunk)
        for piece in range(num_pieces):
            first = start + (stop - start) * piece // num_pieces
            last = start + (stop - start) * (piece + 1) // num_pieces
            if first < last:
                yield _Draft(step, index + piece, (first, last), ((chunk, piece),), [])


def _groups(
    step: ScheduleStep, index: int, chunks: Chunks, piece_numel: int
) -> Iterator[_Draft]:
    """Put small chunks that follow each other into one message."""
    per_group = max(1, piece_numel // max(1, chunks.largest()))
    end = step.first + step.count
    for chunk in range(step.first, end, per_group):
        count = min(per_group, end - chunk)
        start, stop = chunks.span(chunk, count)
        if start < stop:
            cells = tuple((cell, 0) for cell in range(chunk, chunk + count))
            yield _Draft(step, index, (start, stop), cells, [])


def _connect(drafts: list[_Draft]) -> None:
    """Find what each message depends on.

    A send needs what was received into its elements before; a receive needs the sends
    that still read them. Sums may come in any number at a time: they arrive beside the
    vector and are added in the order of the program.
    """
    arriving: dict[tuple[int, int], list[_Draft]] = {}
    leaving: dict[tuple[int, int], list[_Draft]] = {}
    for draft in drafts:
        action = draft.step.action
        for cell in draft.cells:
            before = arriving.setdefault(cell, [])
            readers = leaving.setdefault(cell, [])
            if action is Action.SEND:
                _need(draft, before)
                readers.append(draft)
                continue
            _need(draft, readers)
            if action is Action.COPY:
                _need(draft, before)
                before.clear()
            else:
                _need(draft, [one for one in before if one.step.action is Action.COPY])
            readers.clear()
            before.append(draft)


def _need(draft: _Draft, others: list[_Draft]) -> None:
    known = {id(need) for need in draft.needs}
    draft.needs += [other for other in others if id(other) not in known]


@lru_cache(maxsize=512)
def _program(
    place: tuple[int, int],
    algorithm: str,
    collective: str,
    extent: tuple[int, ...],
    element_bytes: int,
) -> tuple[ScheduledMessage, ...]:
    """Return a rank's program, compiled once: training runs the same in every step.

    ``extent`` is the number of elements (and the root), or one number a rank.
    """
    rank, size = place
    schedules = find_algorithm(algorithm)
    if collective == "all_reduce":
        schedule = schedules.all_reduce(size, extent[0])
    elif collective == "broadcast":
        schedule = schedules.broadcast(size, extent[0], extent[1])
    elif collective == "all_gather":
        schedule = schedules.all_gather(Chunks.of_sizes(extent))
    else:
        schedule = schedules.reduce_scatter(Chunks.of_sizes(extent))
    return compile_program(schedule, rank, PIECE_BYTES // element_bytes)


class _Run:
    """One program under way, over an engine that does nothing else.

    ``free`` is memory for messages that are added to the vector.
    """

    def __init__(
        self,
        engine: Engine,
        free: list[Tensor],
        program: Sequence[ScheduledMessage],
        vector: Tensor,
        op: ReduceOp,
    ) -> None:
        self._engine = engine
        self._free = free
        self._program = program
        self._vector = vector
        self._op = op
        self._works: dict[int, Work[Any]] = {}
        self._arrivals: dict[int, Tensor] = {}

    def run(self) -> None:
        """Send, receive and reduce until the program is over.

        Raises:
            CollectiveError: A message failed; others may still be under way.
        """
        for index, message in enumerate(self._program):
            for need in message.needs:
                self._complete(need)
            self._works[index] = self._post(index, message)
        for index in sorted(self._works):
            self._complete(index)

    def _post(self, index: int, message: ScheduledMessage) -> Work[Any]:
        tensor = self._vector[message.start : message.stop]
        if message.action is Action.SEND:
            return self._engine.send(tensor, message.peer, message.tag)
        if message.action is Action.REDUCE:
            if self._free:
                memory = self._free.pop()
            else:
                with torch.inference_mode(mode=False):
                    memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")
            self._arrivals[index] = memory
            tensor = memory.view(tensor.dtype)[: tensor.numel()]
        return self._engine.recv(tensor, message.peer, message.tag)

    def _complete(self, index: int) -> None:
        """Wait for a message and add what it brought, unless that was done."""
        work = self._works.pop(index, None)
        if work is None:
            return
        work.wait()
        memory = self._arrivals.pop(index, None)
        if memory is not None:
            message = self._program[index]
            own = self._vector[message.start : message.stop]
            _combine_(own, memory.view(own.dtype)[: own.numel()], self._op)
            if len(self._free) < _MAX_FREE:
                self._free.append(memory)


def _combine_(own: Tensor, arrived: Tensor, op: ReduceOp) -> None:
    """Reduce two ranks' elements into ``own``; AVERAGE adds."""
    if op in (ReduceOp.SUM, ReduceOp.AVERAGE):
        own.add_(arrived)
    elif op is ReduceOp.PRODUCT:
        own.mul_(arrived)
    else:
        extreme = torch.minimum if op is ReduceOp.MIN else torch.maximum
        extreme(own, arrived, out=own)


class ScheduledEngine(LaneEngine):
    """Follows an algorithm's schedules.

    It sends and receives over a clone of another engine, whose own calls do what has no
    schedule.
    """

    name = "scheduled"

    def __init__(self, inner: Engine, algorithm: str = "ring") -> None:
        """Take an engine over; collective.

        Raises:
            UsageError: There is no such algorithm.
        """
        self.algorithm = find_algorithm(algorithm).name
        self._messages = inner.clone()
        self._free: list[Tensor] = []
        super().__init__(inner, Lane(self._messages))

    def gather_numbers(self, own: Tensor, call: str) -> Tensor:
        gathered = own.new_empty((self.size, own.numel()))
        gathered[self.rank] = own
        sizes = (own.nbytes,) * self.size
        vector = gathered.view(-1).view(torch.uint8)
        # So short a message goes in the fewest rounds, whatever the algorithm is.
        place = self.rank, self.size
        program = _program(place, "halving_doubling", "all_gather", sizes, 1)
        run = _Run(self._messages, self._free, program, vector, ReduceOp.SUM)
        self._submit(call, run.run).wait()
        return gathered

    def clone(self) -> "ScheduledEngine":
        return ScheduledEngine(self._world.clone(), self.algorithm)

    def _run(
        self,
        collective: str,
        extent: Sequence[int],
        vector: Tensor,
        op: ReduceOp = ReduceOp.SUM,
    ) -> None:
        place, itemsize = (self.rank, self.size), vector.element_size()
        program = _program(place, self.algorithm, collective, tuple(extent), itemsize)
        _Run(self._messages, self._free, program, vector, op).run()

    def _reduce(self, vector: Tensor, op: ReduceOp) -> None:
        self._run("all_reduce", (vector.numel(),), vector, op)

    def _reduce_parts(
        self, vector: Tensor, counts: Sequence[int], op: ReduceOp
    ) -> Tensor:
        copy = vector.clone()
        self._run("reduce_scatter", counts, copy, op)
        return torch.split(copy, list(counts))[self.rank]

    def _gather(self, out: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        put_back(own, torch.split(out, list(counts))[self.rank])
        self._run("all_gather", counts, out)

    def _copy(self, data: Tensor, root: int) -> None:
        self._run("broadcast", (data.numel(), root), data)
