"""The ring: every rank talks to its two neighbours only.

All links carry the same at the same time, and no rank sends more than the collective
needs: best for large messages. Source: Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009.
"""

from collections.abc import Iterator

from ronde.collectives.schedule import (
    Action,
    Chunks,
    Load,
    Round,
    Schedule,
    Step,
    ring_steps,
)


def all_reduce(size: int, numel: int) -> Schedule:
    """Reduce a share on each rank, then hand the shares round: ``2 (n-1)`` rounds."""
    chunks = Chunks(size, numel)

    def part(rank: int) -> Iterator[Round]:
        yield from _collect(rank, size)
        yield from _distribute(rank, size)

    loads = (Load(2 * (size - 1), chunks.largest()),)
    return Schedule("ring all_reduce", size, chunks, loads, part)


def reduce_scatter(chunks: Chunks) -> Schedule:
    """Reduce chunk r on rank r: ``n - 1`` rounds."""
    size = chunks.num_chunks
    loads = (Load(size - 1, chunks.largest()),)
    return Schedule(
        "ring reduce_scatter", size, chunks, loads, lambda rank: _collect(rank, size)
    )


def all_gather(chunks: Chunks) -> Schedule:
    """Copy chunk r, which rank r has, to all: ``n - 1`` rounds."""
    size = chunks.num_chunks
    loads = (Load(size - 1, chunks.largest()),)
    return Schedule(
        "ring all_gather", size, chunks, loads, lambda rank: _distribute(rank, size)
    )


def broadcast(size: int, numel: int, root: int) -> Schedule:
    """Pass the whole from neighbour to neighbour: ``n - 1`` rounds.

    It pays where the vector is cut into many pieces, so that all links are busy.
    """

    def part(rank: int) -> Iterator[Round]:
        position = (rank - root) % size
        for index in range(size - 1):
            steps: list[Step] = []
            if index == position:
                steps.append(Step(Action.SEND, (rank + 1) % size, 0))
            elif index == position - 1:
                steps.append(Step(Action.COPY, (rank - 1) % size, 0))
            yield tuple(steps)

    loads = (Load(size - 1, numel),)
    return Schedule("ring broadcast", size, Chunks(1, numel), loads, part)


def _collect(rank: int, size: int) -> Iterator[Round]:
    """Pass sums on; in the last round chunk ``rank`` becomes whole here."""
    for index in range(size - 1):
        sent = (rank - index - 1) % size
        yield ring_steps(
            Action.REDUCE,
            (rank + 1) % size,
            (rank - 1) % size,
            sent,
            (sent - 1) % size,
        )


def _distribute(rank: int, size: int) -> Iterator[Round]:
    """Pass whole chunks on, beginning with one's own."""
    for index in range(size - 1):
        sent = (rank - index) % size
        yield ring_steps(
            Action.COPY,
            (rank + 1) % size,
            (rank - 1) % size,
            sent,
            (sent - 1) % size,
        )
