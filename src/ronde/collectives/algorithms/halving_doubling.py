"""Recursive halving and doubling, for any number of ranks.

Each round halves what is left to be reduced, or doubles what is gathered: as few rounds
as there can be, and a ring's bytes. Best for short and middling messages.

Instead of a butterfly, which needs a power of two, the ranks stand in a circle and talk
over distances that are halved and rounded up, so no rank is left over. Source: Träff,
"Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024
(arXiv:2410.14234); for broadcast: van de Geijn's scatter and all-gather, as in Chan,
Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and
experience", 2007.
"""

from collections.abc import Iterator

from ronde.collectives.schedule import (
    Action,
    Chunks,
    Load,
    Round,
    Schedule,
    Step,
    renamed,
    runs_of,
)


def all_reduce(size: int, numel: int) -> Schedule:
    """Reduce a share on each rank, then gather: ``2 ceil(log2 n)`` rounds."""
    chunks = Chunks(size, numel)

    def part(rank: int) -> Iterator[Round]:
        yield from _halve(rank, size)
        yield from _double(rank, size)

    loads = _halving_loads(chunks)
    return Schedule(
        "halving_doubling all_reduce", size, chunks, loads + loads[::-1], part
    )


def reduce_scatter(chunks: Chunks) -> Schedule:
    """Reduce chunk r on rank r: ``ceil(log2 n)`` rounds."""
    size = chunks.num_chunks
    return Schedule(
        "halving_doubling reduce_scatter",
        size,
        chunks,
        _halving_loads(chunks),
        lambda rank: _halve(rank, size),
    )


def all_gather(chunks: Chunks) -> Schedule:
    """Copy chunk r, which rank r has, to all: ``ceil(log2 n)`` rounds."""
    size = chunks.num_chunks
    return Schedule(
        "halving_doubling all_gather",
        size,
        chunks,
        _halving_loads(chunks)[::-1],
        lambda rank: _double(rank, size),
    )


def broadcast(size: int, numel: int, root: int) -> Schedule:
    """Scatter the chunks, then gather them: ``2 ceil(log2 n)`` rounds."""
    chunks = Chunks(size, numel)

    def part(rank: int) -> Iterator[Round]:
        # Ranks are counted from the root here; so are the chunks.
        position = (rank - root) % size
        for steps in (*_scatter(position, size), *_double(position, size)):
            yield renamed(steps, lambda peer: (peer + root) % size)

    loads = _scatter_loads(chunks) + _halving_loads(chunks)[::-1]
    return Schedule("halving_doubling broadcast", size, chunks, loads, part)


def _distances(size: int) -> list[tuple[int, int]]:
    """Return, for each halving, how many chunks are live before and after it."""
    found: list[tuple[int, int]] = []
    live = size
    while live > 1:
        kept = (live + 1) // 2
        found.append((live, kept))
        live = kept
    return found


def _halve(rank: int, size: int) -> Iterator[Round]:
    """Reduce chunk ``rank`` here.

    Of the live chunks, which begin with this rank's own, the further half is sent to
    the rank that stands where it begins.
    """
    for live, kept in _distances(size):
        yield _exchange(
            Action.REDUCE,
            send=((rank + kept) % size, rank + kept),
            receive=((rank - kept) % size, rank),
            count=live - kept,
            size=size,
        )


def _double(rank: int, size: int) -> Iterator[Round]:
    """Gather all chunks here: ``_halve`` backwards."""
    for live, kept in reversed(_distances(size)):
        yield _exchange(
            Action.COPY,
            send=((rank - kept) % size, rank),
            receive=((rank + kept) % size, rank + kept),
            count=live - kept,
            size=size,
        )


def _exchange(
    action: Action,
    *,
    send: tuple[int, int],
    receive: tuple[int, int],
    count: int,
    size: int,
) -> Round:
    """Send and receive ``count`` chunks, each given as the peer and the first chunk."""
    sent = [Step(Action.SEND, send[0], *run) for run in runs_of(send[1], count, size)]
    got = [Step(action, receive[0], *run) for run in runs_of(receive[1], count, size)]
    return (*sent, *got)


def _scatter(position: int, size: int) -> Iterator[Round]:
    """Give chunk p to position p, from position 0.

    Whoever holds chunks from its own on sends the further half to where it begins.
    """
    begin, live = 0, size
    for _ in _distances(size):
        kept = (live + 1) // 2
        middle = begin + kept
        steps: list[Step] = []
        if live > 1 and position == begin:
            steps.append(Step(Action.SEND, middle, middle, live - kept))
        elif live > 1 and position == middle:
            steps.append(Step(Action.COPY, begin, middle, live - kept))
        if position < middle:
            live = kept
        else:
            begin, live = middle, live - kept
        yield tuple(steps)


def _halving_loads(chunks: Chunks) -> tuple[Load, ...]:
    return tuple(
        Load(1, chunks.largest(live - kept))
        for live, kept in _distances(chunks.num_chunks)
    )


def _scatter_loads(chunks: Chunks) -> tuple[Load, ...]:
    """Return the scatter's: no rank holds more, or larger, chunks than the root."""
    loads: list[Load] = []
    for live, kept in _distances(chunks.num_chunks):
        start, stop = chunks.span(kept, live - kept)
        loads.append(Load(1, stop - start))
    return tuple(loads)
