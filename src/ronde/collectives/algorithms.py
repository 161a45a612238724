"""The algorithms: pure functions that return schedules.

The ring: every rank talks to its two neighbours only. All links carry the same at the
same time, and no rank sends more than the collective needs: best for large messages.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009.

Two binary trees, each of which carries half of the vector. A rank that has children in
one tree is a leaf of the other, so each sends and receives about as much as in a ring,
but in rounds that grow with the logarithm of the ranks: best for middling messages on
many ranks, when they are cut into pieces. Source: Sanders, Speck and Träff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan", 2009.

Recursive halving and doubling, for any number of ranks.

Each round halves what is left to be reduced, or doubles what is gathered: as few rounds
as there can be, and a ring's bytes. Best for short and middling messages.

Instead of a butterfly, which needs a power of two, the ranks stand in a circle and talk
over distances that are halved and rounded up, so no rank is left over. Source: Träff,
"Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024
(arXiv:2410.14234); for broadcast: van de Geijn's scatter and all-gather, as in Chan,
Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and
experience", 2007.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from ronde.collectives.schedule import (
    Action,
    Chunks,
    Load,
    Round,
    Schedule,
    ScheduleStep,
    renamed,
    runs_of,
)
from ronde.errors import UsageError

# The ring.


def ring_all_reduce(size: int, numel: int) -> Schedule:
    """Reduce a share on each rank, then hand the shares round: ``2 (n-1)`` rounds."""
    chunks = Chunks(size, numel)

    def part(rank: int) -> Iterator[Round]:
        yield from _collect(rank, size)
        yield from _distribute(rank, size)

    loads = (Load(2 * (size - 1), chunks.largest()),)
    return Schedule("ring all_reduce", size, chunks, loads, part)


def ring_reduce_scatter(chunks: Chunks) -> Schedule:
    """Reduce chunk r on rank r: ``n - 1`` rounds."""
    size = chunks.num_chunks
    loads = (Load(size - 1, chunks.largest()),)
    return Schedule(
        "ring reduce_scatter", size, chunks, loads, lambda rank: _collect(rank, size)
    )


def ring_all_gather(chunks: Chunks) -> Schedule:
    """Copy chunk r, which rank r has, to all: ``n - 1`` rounds."""
    size = chunks.num_chunks
    loads = (Load(size - 1, chunks.largest()),)
    return Schedule(
        "ring all_gather", size, chunks, loads, lambda rank: _distribute(rank, size)
    )


def ring_broadcast(size: int, numel: int, root: int) -> Schedule:
    """Pass the whole from neighbour to neighbour: ``n - 1`` rounds.

    It pays where the vector is cut into many pieces, so that all links are busy.
    """

    def part(rank: int) -> Iterator[Round]:
        position = (rank - root) % size
        for index in range(size - 1):
            if index == position:
                yield (ScheduleStep(Action.SEND, (rank + 1) % size, 0),)
            elif index == position - 1:
                yield (ScheduleStep(Action.COPY, (rank - 1) % size, 0),)
            else:
                yield ()

    loads = (Load(size - 1, numel),)
    return Schedule("ring broadcast", size, Chunks(1, numel), loads, part)


def _collect(rank: int, size: int) -> Iterator[Round]:
    """Pass sums on; in the last round chunk ``rank`` becomes whole here."""
    for index in range(size - 1):
        yield _pass_on(Action.REDUCE, rank, size, (rank - index - 1) % size)


def _distribute(rank: int, size: int) -> Iterator[Round]:
    """Pass whole chunks on."""
    for index in range(size - 1):
        yield _pass_on(Action.COPY, rank, size, (rank - index) % size)


def _pass_on(action: Action, rank: int, size: int, sent: int) -> Round:
    return (
        ScheduleStep(Action.SEND, (rank + 1) % size, sent),
        ScheduleStep(action, (rank - 1) % size, (sent - 1) % size),
    )


# Two trees.


def tree_all_reduce(size: int, numel: int) -> Schedule:
    """Reduce to the roots, then broadcast from them: ``2 floor(log2 n)`` rounds."""
    trees = _BinaryTree(size), _BinaryTree(size, is_mirrored=True)
    depth = trees[0].depth

    def part(rank: int) -> Iterator[Round]:
        rounds: list[list[ScheduleStep]] = [[] for _ in range(2 * depth)]
        for chunk, tree in enumerate(trees):
            _reduce(tree, rank + 1, chunk, rounds[:depth])
            _spread(tree, rank + 1, chunk, rounds[depth:])
        for steps in rounds:
            yield renamed(tuple(steps), lambda place: place - 1)

    chunks = Chunks(len(trees), numel)
    # A height has two children that send, most often.
    to_root = tuple(
        Load(1, chunks.largest() * (2 if 3 << height <= size else 1))
        for height in range(depth)
    )
    loads = to_root + _spread_loads(trees[0], chunks)
    return Schedule("tree all_reduce", size, chunks, loads, part)


def tree_broadcast(size: int, numel: int, root: int) -> Schedule:
    """Give each tree's root its half, and on: ``1 + floor(log2 (n-1))`` rounds.

    The trees are those of all other ranks.
    """
    trees = _BinaryTree(size - 1), _BinaryTree(size - 1, is_mirrored=True)
    num_rounds = 1 + trees[0].depth

    def part(rank: int) -> Iterator[Round]:
        rounds: list[list[ScheduleStep]] = [[] for _ in range(num_rounds)]
        place = (rank - root) % size
        for chunk, tree in enumerate(trees if num_rounds else ()):
            if not place:
                rounds[0].append(ScheduleStep(Action.SEND, tree.root, chunk))
                continue
            if place == tree.root:
                rounds[0].append(ScheduleStep(Action.COPY, 0, chunk))
            _spread(tree, place, chunk, rounds[1:])
        for steps in rounds:
            yield renamed(tuple(steps), lambda place: (place + root) % size)

    chunks = Chunks(len(trees), numel)
    loads = (Load(min(1, num_rounds), numel), *_spread_loads(trees[0], chunks))
    return Schedule("tree broadcast", size, chunks, loads, part)


class _BinaryTree(NamedTuple):
    """A binary tree in order over the places 1 to ``num_places``.

    A place's height is the number of zeros that end it in binary: odd places are
    leaves, and all that is left of a place is as high as can be. Mirrored, the tree is
    turned round, which makes the even places leaves; of an odd number of places it is
    shifted by one instead.
    """

    num_places: int
    is_mirrored: bool = False

    @property
    def depth(self) -> int:
        """Length of the longest way from the root; -1 where there is no place."""
        return self.num_places.bit_length() - 1

    @property
    def root(self) -> int:
        return self._turned_back(1 << self.depth)

    def height(self, place: int) -> int:
        """Return the length of the longest way down."""
        node = self._turned(place)
        return (node & -node).bit_length() - 1

    def parent(self, place: int) -> int | None:
        """Return the place above; None for the root."""
        above = self._parent(self._turned(place))
        return None if above is None else self._turned_back(above)

    def level(self, place: int) -> int:
        """Return the length of the way from the root."""
        level, above = 0, self._parent(self._turned(place))
        while above is not None:
            level, above = level + 1, self._parent(above)
        return level

    def children(self, place: int) -> list[int]:
        """Return the places below, at most two."""
        node = self._turned(place)
        reach = (node & -node) // 2
        if not reach:
            return []
        found = [node - reach]
        while reach and node + reach > self.num_places:
            reach //= 2
        if reach:
            found.append(node + reach)
        return [self._turned_back(child) for child in found]

    def _parent(self, node: int) -> int | None:
        reach = node & -node
        while reach <= self.num_places:
            above = node - reach if node & (2 * reach) else node + reach
            if above <= self.num_places:
                return above
            node, reach = above, 2 * reach
        return None

    def _turned(self, place: int) -> int:
        if not self.is_mirrored:
            return place
        if self.num_places % 2:
            return place % self.num_places + 1
        return self.num_places + 1 - place

    def _turned_back(self, node: int) -> int:
        if self.is_mirrored and self.num_places % 2:
            return (node - 2) % self.num_places + 1
        return self._turned(node)


_Rounds = list[list[ScheduleStep]]


def _reduce(tree: _BinaryTree, place: int, chunk: int, rounds: _Rounds) -> None:
    """Enter what ``place`` does to bring the sum to the root: peers are places."""
    for child in tree.children(place):
        step = ScheduleStep(Action.REDUCE, child, chunk)
        rounds[tree.height(child)].append(step)
    parent = tree.parent(place)
    if parent is not None:
        step = ScheduleStep(Action.SEND, parent, chunk)
        rounds[tree.height(place)].append(step)


def _spread(tree: _BinaryTree, place: int, chunk: int, rounds: _Rounds) -> None:
    """Enter what ``place`` does to bring the root's to all: peers are places."""
    level = tree.level(place)
    parent = tree.parent(place)
    if parent is not None:
        rounds[level - 1].append(ScheduleStep(Action.COPY, parent, chunk))
    for child in tree.children(place):
        rounds[level].append(ScheduleStep(Action.SEND, child, chunk))


def _spread_loads(tree: _BinaryTree, chunks: Chunks) -> tuple[Load, ...]:
    """Return what goes to the children from one level, most often two.

    A root has one child where the number of places is a power of two.
    """
    is_root_lean = tree.num_places == 1 << max(0, tree.depth)
    return tuple(
        Load(1, chunks.largest() * (1 if level == 0 and is_root_lean else 2))
        for level in range(tree.depth)
    )


# Halving and doubling.


def halving_doubling_all_reduce(size: int, numel: int) -> Schedule:
    """Reduce a share on each rank, then gather: ``2 ceil(log2 n)`` rounds."""
    chunks = Chunks(size, numel)

    def part(rank: int) -> Iterator[Round]:
        yield from _halve(rank, size)
        yield from _double(rank, size)

    loads = _halving_loads(chunks)
    return Schedule(
        "halving_doubling all_reduce", size, chunks, loads + loads[::-1], part
    )


def halving_doubling_reduce_scatter(chunks: Chunks) -> Schedule:
    """Reduce chunk r on rank r: ``ceil(log2 n)`` rounds."""
    size, loads = chunks.num_chunks, _halving_loads(chunks)
    name = "halving_doubling reduce_scatter"
    return Schedule(name, size, chunks, loads, lambda rank: _halve(rank, size))


def halving_doubling_all_gather(chunks: Chunks) -> Schedule:
    """Copy chunk r, which rank r has, to all: ``ceil(log2 n)`` rounds."""
    size, loads = chunks.num_chunks, _halving_loads(chunks)[::-1]
    name = "halving_doubling all_gather"
    return Schedule(name, size, chunks, loads, lambda rank: _double(rank, size))


def halving_doubling_broadcast(size: int, numel: int, root: int) -> Schedule:
    """Scatter the chunks, then gather them: ``2 ceil(log2 n)`` rounds."""
    chunks = Chunks(size, numel)

    def part(rank: int) -> Iterator[Round]:
        # Ranks are counted from the root here; so are the chunks.
        position = (rank - root) % size
        for steps in (*_scatter(position, size), *_double(position, size)):
            yield renamed(steps, lambda peer: (peer + root) % size)

    # No rank holds more, or larger, chunks than the root.
    spans = [chunks.span(kept, live - kept) for live, kept in _distances(size)]
    scatter = tuple(Load(1, stop - start) for start, stop in spans)
    loads = scatter + _halving_loads(chunks)[::-1]
    return Schedule("halving_doubling broadcast", size, chunks, loads, part)


def _distances(size: int) -> list[tuple[int, int]]:
    """Return, for each halving, how many chunks are live before and after it."""
    found: list[tuple[int, int]] = []
    while size > 1:
        kept = (size + 1) // 2
        found.append((size, kept))
        size = kept
    return found


def _halve(rank: int, size: int) -> Iterator[Round]:
    """Reduce chunk ``rank`` here.

    Of the live chunks, which begin with this rank's own, the further half is sent to
    the rank that stands where it begins.
    """
    for live, kept in _distances(size):
        to, source = (rank + kept) % size, (rank - kept) % size
        sent = runs_of(rank + kept, live - kept, size)
        received = runs_of(rank, live - kept, size)
        yield (
            *(ScheduleStep(Action.SEND, to, *run) for run in sent),
            *(ScheduleStep(Action.REDUCE, source, *run) for run in received),
        )


def _double(rank: int, size: int) -> Iterator[Round]:
    """Gather all chunks here: ``_halve`` backwards."""
    for live, kept in reversed(_distances(size)):
        to, source = (rank - kept) % size, (rank + kept) % size
        sent = runs_of(rank, live - kept, size)
        received = runs_of(rank + kept, live - kept, size)
        yield (
            *(ScheduleStep(Action.SEND, to, *run) for run in sent),
            *(ScheduleStep(Action.COPY, source, *run) for run in received),
        )


def _scatter(position: int, size: int) -> Iterator[Round]:
    """Give chunk p to position p, from position 0.

    Whoever holds chunks from its own on sends the further half to where it begins.
    """
    begin, live = 0, size
    for _ in _distances(size):
        kept = (live + 1) // 2
        middle = begin + kept
        steps: list[ScheduleStep] = []
        if live > 1 and position == begin:
            steps.append(ScheduleStep(Action.SEND, middle, middle, live - kept))
        elif live > 1 and position == middle:
            steps.append(ScheduleStep(Action.COPY, begin, middle, live - kept))
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


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A schedule for each collective."""

    name: str
    all_reduce: Callable[[int, int], Schedule]
    """Takes the number of ranks and of elements."""
    reduce_scatter: Callable[[Chunks], Schedule]
    """Takes one chunk a rank, which that rank is to have."""
    all_gather: Callable[[Chunks], Schedule]
    """Takes one chunk a rank, which that rank has."""
    broadcast: Callable[[int, int, int], Schedule]
    """Takes the number of ranks and of elements, and the root."""


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "ring": Algorithm(
            "ring",
            ring_all_reduce,
            ring_reduce_scatter,
            ring_all_gather,
            ring_broadcast,
        ),
        # A tree cannot save anything where every rank's chunk goes a way of its own.
        "tree": Algorithm(
            "tree",
            tree_all_reduce,
            ring_reduce_scatter,
            ring_all_gather,
            tree_broadcast,
        ),
        "halving_doubling": Algorithm(
            "halving_doubling",
            halving_doubling_all_reduce,
            halving_doubling_reduce_scatter,
            halving_doubling_all_gather,
            halving_doubling_broadcast,
        ),
    }
)
"""The algorithms that run on any ranks, wherever they are."""


def find_algorithm(name: str) -> Algorithm:
    if name not in ALGORITHMS:
        raise UsageError(
            f"algorithm must be one of {', '.join(ALGORITHMS)}, got {name!r}."
        )
    return ALGORITHMS[name]
