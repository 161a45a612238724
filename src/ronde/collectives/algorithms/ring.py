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
    renamed,
)


def all_reduce(size: int, numel: int) -> Schedule:
    """Reduce a share on each rank, then hand the shares round: ``2 (n-1)`` rounds."""
    chunks = Chunks(size, numel)

    def part(rank: int) -> Iterator[Round]:
        yield from collect(rank, size)
        yield from distribute(rank, size)

    loads = (Load(2 * (size - 1), chunks.largest()),)
    return Schedule("ring all_reduce", size, chunks, loads, part)


def reduce_scatter(chunks: Chunks) -> Schedule:
    """Reduce chunk r on rank r: ``n - 1`` rounds."""
    size = chunks.num_chunks
    loads = (Load(size - 1, chunks.largest()),)
    return Schedule(
        "ring reduce_scatter", size, chunks, loads, lambda rank: collect(rank, size)
    )


def all_gather(chunks: Chunks) -> Schedule:
    """Copy chunk r, which rank r has, to all: ``n - 1`` rounds."""
    size = chunks.num_chunks
    loads = (Load(size - 1, chunks.largest()),)
    return Schedule(
        "ring all_gather", size, chunks, loads, lambda rank: distribute(rank, size)
    )


def broadcast(size: int, numel: int, root: int) -> Schedule:
    """Pass the whole from neighbour to neighbour: ``n - 1`` rounds.

    It pays where the vector is cut into many pieces, so that all links are busy.
    """

    def part(rank: int) -> Iterator[Round]:
        for steps in chain((rank - root) % size, size):
            yield renamed(steps, lambda position: (position + root) % size)

    loads = (Load(size - 1, numel),)
    return Schedule("ring broadcast", size, Chunks(1, numel), loads, part)


def collect(rank: int, size: int) -> Iterator[Round]:
    """Yield the rounds of ``reduce_scatter``: sums are passed on.

    In the last round chunk ``rank`` becomes whole here.
    """
    for index in range(size - 1):
        sent = (rank - index - 1) % size
        yield _pass_on(
            Action.REDUCE,
            (rank + 1) % size,
            (rank - 1) % size,
            sent,
            (sent - 1) % size,
        )


def distribute(rank: int, size: int) -> Iterator[Round]:
    """Yield the rounds of ``all_gather``: whole chunks are passed on."""
    for index in range(size - 1):
        sent = (rank - index) % size
        yield _pass_on(
            Action.COPY,
            (rank + 1) % size,
            (rank - 1) % size,
            sent,
            (sent - 1) % size,
        )


def chain(position: int, size: int) -> Iterator[Round]:
    """Yield the rounds of ``broadcast``: one chunk goes from position 0 to the last."""
    for index in range(size - 1):
        if index == position:
            yield (Step(Action.SEND, position + 1, 0),)
        elif index == position - 1:
            yield (Step(Action.COPY, position - 1, 0),)
        else:
            yield ()


def _pass_on(
    action: Action, send_to: int, receive_from: int, sent: int, received: int
) -> Round:
    """Return the round in which a rank passes one chunk on and gets another."""
    return (Step(Action.SEND, send_to, sent), Step(action, receive_from, received))
