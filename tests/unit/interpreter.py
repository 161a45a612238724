"""Schedules carried out on plain lists, to see what every rank ends with.

An element is the set of the ranks whose contributions are in it, as the bits of a
number: no contribution may come twice.
"""

from collections import Counter

from ronde.collectives import Action, Round, Schedule, ScheduleStep

Vectors = list[list[int]]


def run(schedule: Schedule, vectors: Vectors) -> None:
    """Carry all rounds out, in place, and see that no rank breaks their rules."""
    parts = [list(schedule.of_rank(rank)) for rank in range(schedule.size)]
    for steps_by_rank in zip(*parts, strict=True):
        _require_matches(steps_by_rank)
        _require_apart(steps_by_rank)
        before = [list(vector) for vector in vectors]
        for rank, steps in enumerate(steps_by_rank):
            for step in steps:
                if step.is_receive:
                    start, stop = schedule.chunks.span(step.first, step.count)
                    arrived = before[step.peer][start:stop]
                    if step.action is Action.REDUCE:
                        arrived = _sum(vectors[rank][start:stop], arrived)
                    vectors[rank][start:stop] = arrived


def _sum(own: list[int], arrived: list[int]) -> list[int]:
    for mine, theirs in zip(own, arrived, strict=True):
        assert not mine & theirs, "a contribution comes twice"
    return [mine | theirs for mine, theirs in zip(own, arrived, strict=True)]


def _require_matches(steps_by_rank: tuple[Round, ...]) -> None:
    """Every message has a sender and a receiver."""
    sent: Counter[tuple[int, int, int, int]] = Counter()
    received: Counter[tuple[int, int, int, int]] = Counter()
    for rank, steps in enumerate(steps_by_rank):
        for step in steps:
            assert step.peer != rank
            if step.is_receive:
                received[step.peer, rank, step.first, step.count] += 1
            else:
                sent[rank, step.peer, step.first, step.count] += 1
    assert sent == received


def _require_apart(steps_by_rank: tuple[Round, ...]) -> None:
    """No rank writes what it sends, nor copies over what it receives."""
    for steps in steps_by_rank:
        written: list[range] = []
        for step in steps:
            chunks = range(step.first, step.first + step.count)
            if step.is_receive:
                written.append(chunks)
        sent = {
            chunk
            for step in steps
            if not step.is_receive
            for chunk in range(step.first, step.first + step.count)
        }
        assert not any(sent.intersection(chunks) for chunks in written)


def numel_of(schedule: Schedule, step: ScheduleStep) -> int:
    start, stop = schedule.chunks.span(step.first, step.count)
    return stop - start


def num_sent(schedule: Schedule, rank: int) -> int:
    """Return how many elements a rank sends."""
    steps = (step for steps in schedule.of_rank(rank) for step in steps)
    return sum(numel_of(schedule, step) for step in steps if not step.is_receive)
