"""Programs: in any order of arrival every rank finishes with the right result.

An element is the set of the ranks whose contributions are in it, as the bits of a
number: no contribution may come twice.
"""

import random
from collections import deque

from hypothesis import given, strategies as st
from tests.unit.interpreter import num_sent

from ronde.collectives import (
    ALGORITHMS,
    Action,
    Chunks,
    Schedule,
    ScheduledMessage,
    ScheduleStep,
    compile_program,
)

names = st.sampled_from(sorted(ALGORITHMS))
sizes = st.integers(1, 17)
Vectors = list[list[int]]


class Network:
    """All ranks' programs under way, with messages that take any time they like.

    A message travels only once both ends are posted, as the strictest engines do; a
    rank that waits does nothing else.
    """

    def __init__(self, schedule: Schedule, vectors: Vectors, piece_numel: int) -> None:
        ranks = range(schedule.size)
        self.programs = [compile_program(schedule, r, piece_numel) for r in ranks]
        self.vectors = vectors
        self.positions = [0 for _ in ranks]
        self.posted: dict[tuple[int, int, int, bool], deque[int]] = {}
        self.arrived: list[dict[int, list[int]]] = [{} for _ in ranks]
        self.complete: list[set[int]] = [set() for _ in ranks]

    def run(self, order: random.Random) -> None:
        """Let ranks and messages go on in a random order until all is over."""
        while True:
            moves = [(self.advance, r) for r in self.ready()] + [
                (self.deliver, way) for way in self.travelling()
            ]
            if not moves:
                break
            move, which = order.choice(moves)
            move(which)
        for rank, program in enumerate(self.programs):
            assert self.positions[rank] == len(program), "a rank waits for ever"
            for index in range(len(program)):
                self.finish(rank, index)

    def ready(self) -> list[int]:
        return [r for r in range(len(self.programs)) if self.can_advance(r)]

    def can_advance(self, rank: int) -> bool:
        if self.positions[rank] == len(self.programs[rank]):
            return False
        message = self.programs[rank][self.positions[rank]]
        return all(
            need in self.complete[rank] or need in self.arrived[rank]
            for need in message.needs
        )

    def advance(self, rank: int) -> None:
        index = self.positions[rank]
        message = self.programs[rank][index]
        for need in message.needs:
            assert need < index
            self.finish(rank, need)
        self.positions[rank] += 1
        self.posted.setdefault(way_of(rank, message), deque()).append(index)

    def travelling(self) -> list[tuple[int, int, int]]:
        return [
            way[:3]
            for way, sent in self.posted.items()
            if way[3] and sent and self.posted.get((*way[:3], False))
        ]

    def deliver(self, way: tuple[int, int, int]) -> None:
        source, target, _ = way
        sent = self.posted[*way, True].popleft()
        received = self.posted[*way, False].popleft()
        message = self.programs[source][sent]
        mirror = self.programs[target][received]
        assert (message.start, message.stop) == (mirror.start, mirror.stop)
        # The bytes are read when they leave, not when they were posted.
        values = self.vectors[source][message.start : message.stop]
        self.arrived[source][sent] = []
        self.arrived[target][received] = values
        if mirror.action is Action.COPY:
            self.vectors[target][mirror.start : mirror.stop] = values

    def finish(self, rank: int, index: int) -> None:
        if index in self.complete[rank]:
            return
        values = self.arrived[rank].pop(index)
        self.complete[rank].add(index)
        message = self.programs[rank][index]
        if message.action is Action.REDUCE:
            own = self.vectors[rank][message.start : message.stop]
            assert not any(a & b for a, b in zip(own, values, strict=True))
            self.vectors[rank][message.start : message.stop] = [
                a | b for a, b in zip(own, values, strict=True)
            ]


def way_of(rank: int, message: ScheduledMessage) -> tuple[int, int, int, bool]:
    if message.action is Action.SEND:
        return rank, message.peer, message.tag, True
    return message.peer, rank, message.tag, False


@given(names, sizes, st.integers(0, 60), st.integers(1, 12), st.randoms())
def test_all_reduce_gets_through(name, size, numel, piece_numel, order):
    schedule = ALGORITHMS[name].all_reduce(size, numel)
    vectors = [[1 << rank] * numel for rank in range(size)]
    network = Network(schedule, vectors, piece_numel)
    network.run(order)
    assert vectors == [[(1 << size) - 1] * numel] * size


@given(
    names,
    st.lists(st.integers(0, 14), min_size=1, max_size=17),
    st.integers(1, 12),
    st.randoms(),
)
def test_uneven_chunks_get_through(name, counts, piece_numel, order):
    chunks, size = Chunks.of_sizes(counts), len(counts)
    schedule = ALGORITHMS[name].reduce_scatter(chunks)
    vectors = [[1 << rank] * chunks.numel for rank in range(size)]
    Network(schedule, vectors, piece_numel).run(order)
    for rank in range(size):
        start, stop = chunks.span(rank)
        assert vectors[rank][start:stop] == [(1 << size) - 1] * counts[rank]
    schedule = ALGORITHMS[name].all_gather(chunks)
    expected = [1 << rank for rank, count in enumerate(counts) for _ in range(count)]
    vectors = [list(expected) for _ in counts]
    for rank, vector in enumerate(vectors):
        start, stop = chunks.span(rank)
        vector[:start] = [0] * start
        vector[stop:] = [0] * (len(vector) - stop)
    Network(schedule, vectors, piece_numel).run(order)
    assert vectors == [expected] * size


@given(
    names,
    sizes,
    st.integers(0, 60),
    st.integers(1, 12),
    st.randoms(),
    st.data(),
)
def test_broadcast_gets_through(name, size, numel, piece_numel, order, data):
    root = data.draw(st.integers(0, size - 1))
    schedule = ALGORITHMS[name].broadcast(size, numel, root)
    vectors = [[1 << rank] * numel for rank in range(size)]
    Network(schedule, vectors, piece_numel).run(order)
    assert vectors == [[1 << root] * numel] * size


@given(names, st.integers(2, 20), st.integers(1, 500), st.integers(1, 50))
def test_pieces_are_no_longer_than_asked(name, size, numel, piece_numel):
    schedule = ALGORITHMS[name].all_reduce(size, numel)
    program = compile_program(schedule, size // 2, piece_numel)
    assert all(0 < m.stop - m.start <= piece_numel for m in program)
    sent = sum(m.stop - m.start for m in program if m.action is Action.SEND)
    assert sent == num_sent(schedule, size // 2)


@given(st.integers(1, 4), st.randoms())
def test_what_is_sent_is_not_overwritten_on_its_way(piece_numel, order):
    """Rank 0 passes its vector on and then takes rank 2's, which waits for nobody."""
    parts = {
        0: [(ScheduleStep(Action.SEND, 1, 0),), (ScheduleStep(Action.COPY, 2, 0),)],
        1: [(ScheduleStep(Action.COPY, 0, 0),), ()],
        2: [(), (ScheduleStep(Action.SEND, 0, 0),)],
    }
    schedule = Schedule("three", 3, Chunks(1, 4), (), parts.__getitem__)
    vectors = [[rank] * 4 for rank in range(3)]
    Network(schedule, vectors, piece_numel).run(order)
    assert vectors == [[2] * 4, [0] * 4, [2] * 4]
