"""Collectives that run schedules of another engine's point-to-point messages.

Note [Stages]
    Chunks are cut into pieces of about a cache's size, the same on both sides of a
    message. Piece j of a chunk in round r has stage r + j: while one piece is reduced,
    later pieces are in transit and earlier ones are a round ahead. A piece depends only
    on the same piece in earlier rounds, which has lower stages.

    A rank posts messages in order of stages, some stages ahead (``_LOOKAHEAD``), but
    not before their dependencies are complete, and waits only for dependencies. This
    cannot deadlock. Suppose it did, and h is the lowest stage at which a rank waits.
    That rank waits for a message of a stage below h that its peer has not posted. So
    the peer waits at a stage below h, a contradiction.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ronde.collectives.algorithms import (
    Action,
    Chunks,
    Schedule,
    ScheduleStep,
    find_algorithm,
)
from ronde.collectives.arithmetic import KERNELS, put_back
from ronde.collectives.engine import Engine, PostMessage, ReduceOp, WaitForMessage
from ronde.collectives.lane import LaneEngine

PIECE_BYTES = 512 * 1024  # large enough that the cost of posting hardly matters
_MAX_FREE = 32
_LOOKAHEAD = 4
_MAX_TAG = 1 << 14  # MPI guarantees 32,767; messages of equal tag arrive in order


class ScheduledMessage(NamedTuple):
    """One rank's send or receive, and the messages on which it depends."""

    action: Action
    peer: int
    start: int
    stop: int
    tag: int
    needs: tuple[int, ...]  # indices of messages that must be complete first


@dataclass(slots=True)
class _Draft:
    step: ScheduleStep
    stage: int  # see Note [Stages]
    span: tuple[int, int]
    cells: tuple[tuple[int, int], ...]  # chunks and pieces that the message carries
    needs: "list[_Draft]"
    tag: int = 0

    @property
    def posting(self) -> tuple[int, bool, int, int]:
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
    positions = {id(draft): index for index, draft in enumerate(drafts)}
    return tuple(
        ScheduledMessage(
            draft.step.action,
            draft.step.peer,
            *draft.span,
            draft.tag,
            tuple(sorted(positions[id(need)] for need in draft.needs)),
        )
        for draft in drafts
    )


def _drafts(schedule: Schedule, rank: int, piece_numel: int) -> Iterator[_Draft]:
    """Yield messages of one piece: part of a long chunk, or several short chunks."""
    chunks = schedule.chunks
    largest = max(1, chunks.largest())
    num_together = max(1, piece_numel // largest)
    num_pieces = -(-largest // piece_numel)
    for index, steps in enumerate(schedule.of_rank(rank)):
        for step in steps:
            end = step.first + step.count
            for chunk in range(step.first, end, num_together):
                some = range(chunk, min(chunk + num_together, end))
                start, stop = chunks.span(chunk, len(some))
                cuts = [
                    start + (stop - start) * n // num_pieces
                    for n in range(num_pieces + 1)
                ]
                for piece, span in enumerate(pairwise(cuts)):
                    if span[0] < span[1]:
                        cells = tuple((cell, piece) for cell in some)
                        yield _Draft(step, index + piece, span, cells, [])


def _connect(drafts: list[_Draft]) -> None:
    # A send depends on earlier receives of its elements, and a receive depends on
    # earlier sends of the elements that it overwrites. Summands are received into other
    # memory and added in the order of the program.
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
    rank: int,
    size: int,
    algorithm: str,
    collective: str,
    extent: tuple[int, ...],
    element_bytes: int,
) -> tuple[ScheduledMessage, ...]:
    """Return a rank's messages in one collective.

    ``extent`` is the vector's length, with the root for a broadcast, or the length of
    each rank's part.
    """
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


@dataclass(slots=True)
class _Run:
    """One execution of a program; ``free`` holds buffers for received summands."""

    free: list[Tensor]
    program: Sequence[ScheduledMessage]
    vector: Tensor
    op: ReduceOp
    works: dict[int, Any] = field(default_factory=dict[int, Any])
    arrivals: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def run(self, post: PostMessage, wait: WaitForMessage) -> None:
        for index, message in enumerate(self.program):
            for need in message.needs:
                self._complete(need, wait)
            call, tensor = self._prepare(index, message)
            data = tensor.view(torch.uint8)
            self.works[index] = post(call, data, message.peer, message.tag)
        for index in sorted(self.works):
            self._complete(index, wait)

    def _prepare(self, index: int, message: ScheduledMessage) -> tuple[str, Tensor]:
        tensor = self.vector[message.start : message.stop]
        if message.action is Action.SEND:
            return "send", tensor
        if message.action is Action.REDUCE:
            if self.free:
                memory = self.free.pop()
            else:
                with torch.inference_mode(mode=False):
                    memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")
            self.arrivals[index] = memory
            tensor = memory.view(tensor.dtype)[: tensor.numel()]
        return "recv", tensor

    def _complete(self, index: int, wait: WaitForMessage) -> None:
        """Wait for a message and reduce received elements, unless already done."""
        work = self.works.pop(index, None)
        if work is None:
            return
        wait(work)
        memory = self.arrivals.pop(index, None)
        if memory is not None:
            message = self.program[index]
            own = self.vector[message.start : message.stop]
            arrived = memory.view(own.dtype)[: own.numel()]
            KERNELS[self.op](own, arrived, out=own)
            if len(self.free) < _MAX_FREE:
                self.free.append(memory)


class ScheduledEngine(LaneEngine):
    """Runs an algorithm's schedules with messages of another engine."""

    name = "scheduled"

    def __init__(self, inner: Engine, algorithm: str = "ring") -> None:
        self.algorithm = find_algorithm(algorithm).name
        self._messages = inner.clone()
        self._free: list[Tensor] = []
        super().__init__(inner, self._messages)

    def gather_numbers(self, own: Tensor, call: str) -> Tensor:
        gathered = own.new_empty((self.size, own.numel()))
        gathered[self.rank] = own
        sizes = (own.nbytes,) * self.size
        vector = gathered.view(-1).view(torch.uint8)
        # It has the fewest rounds, which counts for such short messages.
        fewest = "halving_doubling"
        self._submit(
            call, lambda: self._run("all_gather", sizes, vector, by=fewest)
        ).wait()
        return gathered

    def clone(self) -> "ScheduledEngine":
        return ScheduledEngine(self._world.clone(), self.algorithm)

    def _run(
        self,
        collective: str,
        extent: Sequence[int],
        vector: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        by: str = "",
    ) -> None:
        how = by or self.algorithm, collective, tuple(extent), vector.element_size()
        program = _program(self.rank, self.size, *how)
        run = _Run(self._free, program, vector, op)
        self._messages.run_messages(collective, run.run)

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
