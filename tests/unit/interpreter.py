"""The numbers of elements that ranks send in a schedule."""

from ronde.collectives import Schedule, ScheduleStep


def numel_of(schedule: Schedule, step: ScheduleStep) -> int:
    start, stop = schedule.chunks.span(step.first, step.count)
    return stop - start


def num_sent(schedule: Schedule, rank: int) -> int:
    """Return how many elements a rank sends."""
    steps = (step for steps in schedule.of_rank(rank) for step in steps)
    return sum(numel_of(schedule, step) for step in steps if not step.is_receive)


def heaviest(schedule: Schedule) -> list[int]:
    """Return the most elements that a rank sends or receives, round by round."""
    totals = [0] * schedule.num_rounds
    for rank in range(schedule.size):
        for index, steps in enumerate(schedule.of_rank(rank)):
            for is_receive in (False, True):
                moved = sum(
                    numel_of(schedule, step)
                    for step in steps
                    if step.is_receive is is_receive
                )
                totals[index] = max(totals[index], moved)
    return totals


def crossings(schedule: Schedule, group: int) -> list[list[list[int]]]:
    """Return the elements that groups of consecutive ranks send and receive.

    The result has an entry for each round, group and direction. Messages within a group
    do not count.
    """
    num_groups = -(-schedule.size // group)
    totals = [[[0, 0] for _ in range(num_groups)] for _ in range(schedule.num_rounds)]
    for rank in range(schedule.size):
        for index, steps in enumerate(schedule.of_rank(rank)):
            for step in steps:
                if step.peer // group != rank // group:
                    both = totals[index][rank // group]
                    both[step.is_receive] += numel_of(schedule, step)
    return totals
