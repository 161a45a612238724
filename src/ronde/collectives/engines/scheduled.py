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
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ronde.collectives.algorithms import ALGORITHMS, find_algorithm
from ronde.collectives.engine import Engine, ReduceOp, Work
from ronde.collectives.lane import Lane, LaneEngine
from ronde.collectives.schedule import Action, Chunks, Schedule, ScheduleStep

_LOOKAHEAD = 4
_MAX_TAG = 1 << 14
"""MPI promises tags up to 32,767. Messages of equal tag arrive in order."""


@dataclass(frozen=True, slots=True)
class ScheduledMessage:
    """One message, as one of its two ranks sees it.

    Attributes:
        action: What this rank does.
        peer: The other rank.
        start: The first element of the vector.
        stop: The element after the last.
        tag: Tells it from the other messages between the two.
        needs: Earlier messages of the program that must be complete before it is
            posted.
    """

    action: Action
    peer: int
    start: int
    stop: int
    tag: int
    needs: tuple[int, ...]


@dataclass(slots=True)
class _Draft:
    """A message whose place in the program is not known yet.

    Attributes:
        step: Of which it is a piece.
        stage: See Note [Stages].
        span: Its elements.
        cells: Names of the parts of the vector that it touches.
        needs: The drafts on which it depends.
        tag: As in ``ScheduledMessage``.
    """

    step: ScheduleStep
    stage: int
    span: tuple[int, int]
    cells: tuple[tuple[int, int], ...]
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
    """Return the messages of one rank in the order in which to post them.

    Args:
        schedule: What to do.
        rank: Whose part.
        piece_numel: The most elements of a message; equal on all ranks.
    """
    drafts = sorted(
        _drafts(schedule, rank, piece_numel),
        key=lambda draft: (draft.stage, *draft.span),
    )
    _number(drafts)
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


def _number(drafts: list[_Draft]) -> None:
    """Tag the messages; both ranks of a pair count them in the same order."""
    counts: dict[tuple[int, bool], int] = {}
    for draft in drafts:
        way = (draft.step.peer, draft.step.is_receive)
        draft.tag = counts.get(way, 0) % _MAX_TAG
        counts[way] = draft.tag + 1


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


Program = tuple[ScheduledMessage, ...]


@dataclass(frozen=True, slots=True)
class Programs:
    """What one rank does in each collective of an algorithm.

    Attributes:
        algorithm: Its name.
        rank: This process.
        size: Number of processes.
        piece_bytes: The longest message.
    """

    algorithm: str
    rank: int
    size: int
    piece_bytes: int

    def all_reduce(self, numel: int, element_bytes: int) -> Program:
        """Return the program for a vector of ``numel`` elements."""
        return _compiled(self, "all_reduce", (numel,), element_bytes)

    def reduce_scatter(self, sizes: tuple[int, ...], element_bytes: int) -> Program:
        """Return the program for chunks of ``sizes`` elements, one a rank."""
        return _compiled(self, "reduce_scatter", sizes, element_bytes)

    def all_gather(self, sizes: tuple[int, ...]) -> Program:
        """Return the program for chunks of ``sizes`` bytes, one a rank."""
        return _compiled(self, "all_gather", sizes, 1)

    def broadcast(self, num_bytes: int, root: int) -> Program:
        """Return the program for a vector of bytes."""
        return _compiled(self, "broadcast", (num_bytes, root), 1)

    def schedule_of(self, collective: str, extent: tuple[int, ...]) -> Schedule:
        """Return the schedule behind a program."""
        algorithm = ALGORITHMS[self.algorithm]
        if collective == "all_reduce":
            return algorithm.all_reduce(self.size, extent[0])
        if collective == "broadcast":
            return algorithm.broadcast(self.size, extent[0], extent[1])
        chunks = Chunks.of_sizes(extent)
        if collective == "all_gather":
            return algorithm.all_gather(chunks)
        return algorithm.reduce_scatter(chunks)


@lru_cache(maxsize=512)
def _compiled(
    programs: Programs, collective: str, extent: tuple[int, ...], element_bytes: int
) -> Program:
    schedule = programs.schedule_of(collective, extent)
    return compile_program(
        schedule, programs.rank, programs.piece_bytes // element_bytes
    )


PIECE_BYTES = 512 * 1024
"""The longest message: long enough that posting it costs little beside sending it."""
_MAX_FREE = 32


class ScheduleExecutor:
    """Carries out one program at a time, over an engine that does nothing else."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._free: list[Tensor] = []

    def run(
        self,
        program: Sequence[ScheduledMessage],
        vector: Tensor,
        op: ReduceOp = ReduceOp.SUM,
    ) -> None:
        """Send, receive and reduce until the program is over.

        Args:
            program: This rank's.
            vector: Contiguous, of one dimension, on the CPU; changed in place.
            op: What a REDUCE does; AVERAGE adds.

        Raises:
            CollectiveError: A message failed; others may still be under way.
        """
        run = _Run(self, program, vector, op)
        for index in range(len(program)):
            run.post(index)
        run.complete_all()

    def post(self, message: ScheduledMessage, tensor: Tensor) -> Work[Any]:
        """Start a message that comes from or goes to ``tensor``."""
        if message.action is Action.SEND:
            return self._engine.send(tensor, message.peer, message.tag)
        return self._engine.recv(tensor, message.peer, message.tag)

    def borrow(self) -> Tensor:
        """Return memory for one message."""
        if self._free:
            return self._free.pop()
        with torch.inference_mode(mode=False):
            return torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")

    def give_back(self, memory: Tensor) -> None:
        """Keep memory for a later message."""
        if len(self._free) < _MAX_FREE:
            self._free.append(memory)


class _Run:
    """One program under way."""

    def __init__(
        self,
        executor: ScheduleExecutor,
        program: Sequence[ScheduledMessage],
        vector: Tensor,
        op: ReduceOp,
    ) -> None:
        self._executor = executor
        self._program = program
        self._vector = vector
        self._op = op
        self._works: dict[int, Work[Any]] = {}
        self._arrivals: dict[int, Tensor] = {}

    def post(self, index: int) -> None:
        """Start a message once all that it needs is complete."""
        message = self._program[index]
        for need in message.needs:
            self.complete(need)
        tensor = self._vector[message.start : message.stop]
        if message.action is Action.REDUCE:
            memory = self._arrivals[index] = self._executor.borrow()
            tensor = memory.view(tensor.dtype)[: tensor.numel()]
        self._works[index] = self._executor.post(message, tensor)

    def complete(self, index: int) -> None:
        """Wait for a message and add what it brought, unless that was done."""
        work = self._works.pop(index, None)
        if work is None:
            return
        work.wait()
        memory = self._arrivals.pop(index, None)
        if memory is not None:
            message = self._program[index]
            own = self._vector[message.start : message.stop]
            combine_(own, memory.view(own.dtype)[: own.numel()], self._op)
            self._executor.give_back(memory)

    def complete_all(self) -> None:
        """Wait for all messages that nothing needed."""
        for index in sorted(self._works):
            self.complete(index)


def combine_(own: Tensor, arrived: Tensor, op: ReduceOp) -> None:
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

    Attributes:
        algorithm: Name of the algorithm.
    """

    name = "scheduled"

    def __init__(self, inner: Engine, algorithm: str = "ring") -> None:
        """Take an engine over; collective.

        Args:
            inner: What moves the messages; closed with this one.
            algorithm: One of ``ALGORITHMS``, equal on all ranks.

        Raises:
            UsageError: There is no such algorithm.
        """
        self.algorithm = find_algorithm(algorithm).name
        self._programs = Programs(algorithm, inner.rank, inner.size, PIECE_BYTES)
        messages = inner.clone()
        self._executor = ScheduleExecutor(messages)
        super().__init__(inner, Lane(messages))

    def gather_numbers(self, own: Tensor, call: str) -> Tensor:
        """Return every rank's vector of numbers; blocks."""
        gathered = own.new_empty((self.size, own.numel()))
        gathered[self.rank] = own
        # So short a message is told in the fewest rounds, whatever the algorithm is.
        programs = replace(self._programs, algorithm="halving_doubling")
        program = programs.all_gather((own.nbytes,) * self.size)
        vector = gathered.view(-1).view(torch.uint8)
        self._submit(call, lambda: self._executor.run(program, vector)).wait()
        return gathered

    def clone(self) -> "ScheduledEngine":
        """Make another of the same ranks: see ``Engine``."""
        return ScheduledEngine(self._world.clone(), self.algorithm)

    def _reduce(self, vector: Tensor, op: ReduceOp) -> None:
        program = self._programs.all_reduce(vector.numel(), vector.element_size())
        self._executor.run(program, vector, op)

    def _reduce_parts(
        self, vector: Tensor, counts: Sequence[int], op: ReduceOp
    ) -> Tensor:
        copy = vector.clone()
        program = self._programs.reduce_scatter(tuple(counts), vector.element_size())
        self._executor.run(program, copy, op)
        return torch.split(copy, list(counts))[self.rank]

    def _gather(self, out: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        place = torch.split(out, list(counts))[self.rank]
        if place.data_ptr() != own.data_ptr():
            place.copy_(own)
        self._executor.run(self._programs.all_gather(tuple(counts)), out)

    def _copy(self, data: Tensor, root: int) -> None:
        self._executor.run(self._programs.broadcast(data.numel(), root), data)
