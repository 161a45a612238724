"""One rank's part of a schedule, cut into pieces and put in the order of posting.

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

from collections.abc import Iterator
from dataclasses import dataclass

from ronde.collectives.schedule import Action, Chunks, Schedule, Step

_LOOKAHEAD = 4
_MAX_TAG = 1 << 14
"""MPI promises tags up to 32,767. Messages of equal tag arrive in order."""


@dataclass(frozen=True, slots=True)
class Message:
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
        tag: As in ``Message``.
    """

    step: Step
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
) -> tuple[Message, ...]:
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
        Message(
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
    step: Step, index: int, chunks: Chunks, num_pieces: int
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
    step: Step, index: int, chunks: Chunks, piece_numel: int
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
