"""Schedules of collectives: the sends and receives of each rank in each round.

An engine executes a schedule, a test interprets it, and ``pricing`` adds up its loads.
A rank's steps are computed on demand; the loads are known without the steps.

``docs/algorithms.md`` explains and compares the algorithms. Sources: for the ring,
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009; for two trees, each of which carries half of the vector, Sanders,
Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
2009; for halving and doubling on any number of ranks, Träff, "Optimal, non-pipelined
reduce-scatter and allreduce algorithms", 2024 (arXiv:2410.14234), and for its
broadcast, Chan et al., "Collective communication: theory, practice, and experience",
2007.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from ronde.errors import UsageError


class Action(StrEnum):
    """The effect of a step on its chunks: they are sent, reduced into or replaced."""

    SEND = "send"
    REDUCE = "reduce"  # receive and combine with this rank's elements
    COPY = "copy"  # receive and replace this rank's elements


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """One rank's send or receive of consecutive chunks."""

    action: Action
    peer: int
    first: int  # the first of ``count`` chunks
    count: int = 1

    @property
    def is_receive(self) -> bool:
        return self.action is not Action.SEND


Round = tuple[ScheduleStep, ...]
"""Concurrent steps of one rank. A rank sends the values from before the round, and does
not write to chunks that it sends."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """A vector cut into consecutive ranges of elements, some of which may be empty."""

    num_chunks: int
    numel: int
    offsets: tuple[int, ...] | None = None
    """Start of each chunk, and the end of the last; None for an even split, in which
    the first chunks get the extra elements."""

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> "Chunks":
        offsets = (0, *itertools.accumulate(sizes))
        return cls(len(sizes), offsets[-1], offsets)

    def start(self, chunk: int) -> int:
        """Return the index of a chunk's first element; the end for ``num_chunks``."""
        if self.offsets is not None:
            return self.offsets[chunk]
        base, extra = divmod(self.numel, self.num_chunks)
        return chunk * base + min(chunk, extra)

    def span(self, first: int, count: int = 1) -> tuple[int, int]:
        return self.start(first), self.start(first + count)

    def largest(self, count: int = 1) -> int:
        """Return the largest total of ``count`` cyclically consecutive chunks."""
        if self.offsets is None:
            base, extra = divmod(self.numel, self.num_chunks)
            return count * base + min(count, extra)
        twice = (*self.offsets, *(self.numel + offset for offset in self.offsets[1:]))
        return max(twice[r + count] - twice[r] for r in range(self.num_chunks))


class Load(NamedTuple):
    """A number of consecutive rounds, and the load of the busiest rank in each."""

    num_rounds: int
    numel: int  # most elements that a rank sends or receives in a round
    distance: int = 1  # between the ranks of a message
    is_sparse: bool = False  # of 2 * ``distance`` ranks, one sends or receives it
    is_reduced: bool = False  # ranks reduce the elements that they receive

    def num_crossing(self, group: int) -> int:
        """Return the number of ranks in a group that send to other groups in a round.

        A group is ``group`` consecutive ranks. For a tree it is an estimate: if the
        number of ranks is no power of two, some rounds have twice as many.
        """
        if not self.is_sparse:
            return min(self.distance, group)
        if group % (4 * self.distance) == 0:
            return 0  # whole subtrees
        return 2 if group & (group - 1) else 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rounds of one collective of ``size`` ranks."""

    name: str
    size: int
    chunks: Chunks
    loads: tuple[Load, ...]
    of_rank: Callable[[int], Iterable[Round]]  # includes empty rounds
    # All that the busiest rank does, in rounds that overlap if chunks are sent in
    # pieces; empty if a rank is busy in each round, so that pieces save nothing.
    overlapping: tuple[Load, ...] = ()

    @property
    def num_rounds(self) -> int:
        return sum(load.num_rounds for load in self.loads)


def _in_turn(
    name: str,
    chunks: Chunks,
    loads: tuple[Load, ...],
    *parts: Callable[[int, int], Iterator[Round]],
) -> Schedule:
    """Return a schedule of the rounds that ``parts(rank, size)`` yield in turn."""
    size = chunks.num_chunks

    def of_rank(rank: int) -> Iterable[Round]:
        return itertools.chain.from_iterable(part(rank, size) for part in parts)

    return Schedule(name, size, chunks, loads, of_rank)


# The ring.


def ring_all_reduce(size: int, numel: int) -> Schedule:
    """Reduce one share on each rank, then gather the shares: ``2 (n-1)`` rounds."""
    chunks = Chunks(size, numel)
    gather = Load(size - 1, chunks.largest())
    loads = (gather._replace(is_reduced=True), gather)
    return _in_turn("ring all_reduce", chunks, loads, _collect, _distribute)


def ring_reduce_scatter(chunks: Chunks) -> Schedule:
    """Reduce chunk r on rank r: ``n - 1`` rounds."""
    loads = (Load(chunks.num_chunks - 1, chunks.largest(), is_reduced=True),)
    return _in_turn("ring reduce_scatter", chunks, loads, _collect)


def ring_all_gather(chunks: Chunks) -> Schedule:
    """Copy chunk r from rank r to all ranks: ``n - 1`` rounds."""
    loads = (Load(chunks.num_chunks - 1, chunks.largest()),)
    return _in_turn("ring all_gather", chunks, loads, _distribute)


def ring_broadcast(size: int, numel: int, root: int) -> Schedule:
    """Pass the vector from neighbour to neighbour: ``n - 1`` rounds."""
    # Efficient if the vector is sent in many pieces, so that all links are busy.

    def of_rank(rank: int) -> Iterator[Round]:
        position = (rank - root) % size
        for index in range(size - 1):
            if index == position:
                yield (ScheduleStep(Action.SEND, (rank + 1) % size, 0),)
            elif index == position - 1:
                yield (ScheduleStep(Action.COPY, (rank - 1) % size, 0),)
            else:
                yield ()

    loads = (Load(size - 1, numel),)
    chunks, each = Chunks(1, numel), (Load(1, numel),)
    return Schedule("ring broadcast", size, chunks, loads, of_rank, each)


def _collect(rank: int, size: int) -> Iterator[Round]:
    """Pass partial sums around the ring until each rank has its chunk's full sum."""
    for index in range(size - 1):
        yield _pass_on(Action.REDUCE, rank, size, (rank - index - 1) % size)


def _distribute(rank: int, size: int) -> Iterator[Round]:
    for index in range(size - 1):
        yield _pass_on(Action.COPY, rank, size, (rank - index) % size)


def _pass_on(action: Action, rank: int, size: int, sent: int) -> Round:
    return (
        ScheduleStep(Action.SEND, (rank + 1) % size, sent),
        ScheduleStep(action, (rank - 1) % size, (sent - 1) % size),
    )


# Two trees.


def tree_all_reduce(size: int, numel: int) -> Schedule:
    """Reduce to the roots of both trees, then broadcast: ``2 floor(log2 n)`` rounds."""
    trees = _BinaryTree(size), _BinaryTree(size, is_mirrored=True)
    depth = trees[0].depth

    def of_rank(rank: int) -> Iterator[Round]:
        rounds: list[list[ScheduleStep]] = [[] for _ in range(2 * depth)]
        for chunk, tree in enumerate(trees):
            for index, action, peer in tree.to_root(rank + 1):
                rounds[index].append(ScheduleStep(action, peer - 1, chunk))
            for index, action, peer in tree.from_root(rank + 1):
                rounds[depth + index].append(ScheduleStep(action, peer - 1, chunk))
        return map(tuple, rounds)

    chunks = Chunks(len(trees), numel)
    half = chunks.largest()
    # Most nodes have two children that send.
    to_root = tuple(
        _tree_load(height, half * (2 if 3 << height <= size else 1), is_reduced=True)
        for height in range(depth)
    )
    loads = to_root + _spread_loads(trees[0], chunks)
    # An inner rank of one tree is a leaf of the other.
    down = _tree_load(depth, 2 * half)
    each = down._replace(is_reduced=True), down
    return Schedule("tree all_reduce", size, chunks, loads, of_rank, each)


def tree_broadcast(size: int, numel: int, root: int) -> Schedule:
    """Send half of the vector down each tree: ``1 + floor(log2 (n-1))`` rounds."""
    # The trees contain all ranks except ``root``, which sends to their roots.
    trees = _BinaryTree(size - 1), _BinaryTree(size - 1, is_mirrored=True)
    num_rounds = 1 + trees[0].depth

    def of_rank(rank: int) -> Iterator[Round]:
        rounds: list[list[ScheduleStep]] = [[] for _ in range(num_rounds)]
        own = (rank - root) % size
        for chunk, tree in enumerate(trees if num_rounds else ()):
            if not own:
                top = (tree.root + root) % size
                rounds[0].append(ScheduleStep(Action.SEND, top, chunk))
                continue
            if own == tree.root:
                rounds[0].append(ScheduleStep(Action.COPY, root, chunk))
            for index, action, other in tree.from_root(own):
                peer = (other + root) % size
                rounds[1 + index].append(ScheduleStep(action, peer, chunk))
        return map(tuple, rounds)

    chunks = Chunks(len(trees), numel)
    first = _tree_load(max(0, trees[0].depth), numel)
    first_loads = (first,) if num_rounds else ()
    loads = (*first_loads, *_spread_loads(trees[0], chunks))
    return Schedule("tree broadcast", size, chunks, loads, of_rank, (first,))


class _BinaryTree(NamedTuple):
    """A binary tree of the members 1 to ``size``, numbered by in-order traversal."""

    # The height of a node is its number of trailing zero bits: odd nodes are leaves. In
    # the mirrored tree even members are leaves. It is reversed for an even size and
    # shifted by one for an odd size.

    size: int
    is_mirrored: bool = False

    @property
    def depth(self) -> int:
        """Length of the longest path from the root; -1 for an empty tree."""
        return self.size.bit_length() - 1

    @property
    def root(self) -> int:
        return self._mirror(1 << self.depth, -1)

    def to_root(self, member: int) -> Iterator[tuple[int, Action, int]]:
        """Yield round, action and peer of each step of ``member`` in a reduction."""
        node = self._mirror(member, 1)
        for child in self._children(node):
            yield _height(child), Action.REDUCE, self._mirror(child, -1)
        parent = self._parent(node)
        if parent is not None:
            yield _height(node), Action.SEND, self._mirror(parent, -1)

    def from_root(self, member: int) -> Iterator[tuple[int, Action, int]]:
        """Yield round, action and peer of each step of ``member`` in a broadcast."""
        node = self._mirror(member, 1)
        parent = above = self._parent(node)
        level = 0
        while above is not None:
            level, above = level + 1, self._parent(above)
        if parent is not None:
            yield level - 1, Action.COPY, self._mirror(parent, -1)
        for child in self._children(node):
            yield level, Action.SEND, self._mirror(child, -1)

    def _children(self, node: int) -> list[int]:
        reach = (node & -node) // 2
        found = [node - reach] if reach else []
        while reach and node + reach > self.size:
            reach //= 2
        return [*found, node + reach] if reach else found

    def _parent(self, node: int) -> int | None:
        reach = node & -node
        while reach <= self.size:
            above = node - reach if node & (2 * reach) else node + reach
            if above <= self.size:
                return above
            node, reach = above, 2 * reach
        return None

    def _mirror(self, member: int, by: int) -> int:
        """Return the node of a member, or with ``by=-1`` the member of a node."""
        if not self.is_mirrored:
            return member
        if self.size % 2:
            return (member - 1 + by) % self.size + 1
        return self.size + 1 - member


def _height(node: int) -> int:
    return (node & -node).bit_length() - 1


def _spread_loads(tree: _BinaryTree, chunks: Chunks) -> tuple[Load, ...]:
    # The root has one child if the size is a power of two.
    has_one_child = tree.size == 1 << max(0, tree.depth)
    half, top = chunks.largest(), tree.depth - 1
    return tuple(
        _tree_load(height, half if has_one_child and height == top else 2 * half)
        for height in range(top, -1, -1)
    )


def _tree_load(height: int, numel: int, *, is_reduced: bool = False) -> Load:
    return Load(1, numel, 1 << height, is_sparse=True, is_reduced=is_reduced)


# Halving and doubling.


def halving_doubling_all_reduce(size: int, numel: int) -> Schedule:
    """Reduce one share on each rank, then gather: ``2 ceil(log2 n)`` rounds."""
    chunks = Chunks(size, numel)
    loads = _halving_loads(chunks, is_reduced=True) + _halving_loads(chunks)[::-1]
    return _in_turn("halving_doubling all_reduce", chunks, loads, _halve, _double)


def halving_doubling_reduce_scatter(chunks: Chunks) -> Schedule:
    """Reduce chunk r on rank r: ``ceil(log2 n)`` rounds."""
    loads = _halving_loads(chunks, is_reduced=True)
    return _in_turn("halving_doubling reduce_scatter", chunks, loads, _halve)


def halving_doubling_all_gather(chunks: Chunks) -> Schedule:
    """Copy chunk r from rank r to all ranks: ``ceil(log2 n)`` rounds."""
    name = "halving_doubling all_gather"
    return _in_turn(name, chunks, _halving_loads(chunks)[::-1], _double)


def halving_doubling_broadcast(size: int, numel: int, root: int) -> Schedule:
    """Scatter the chunks, then gather them: ``2 ceil(log2 n)`` rounds."""
    chunks = Chunks(size, numel)

    def of_rank(rank: int) -> Iterator[Round]:
        # Ranks and chunks are relative to the root here.
        position = (rank - root) % size
        for steps in (*_scatter(position, size), *_double(position, size)):
            yield tuple(replace(s, peer=(s.peer + root) % size) for s in steps)

    # The root sends the most chunks, and the largest ones.
    scatter = tuple(
        Load(1, chunks.start(live) - chunks.start(kept), kept, is_sparse=True)
        for live, kept in _distances(size)
    )
    loads = scatter + _halving_loads(chunks)[::-1]
    return Schedule("halving_doubling broadcast", size, chunks, loads, of_rank)


def _distances(size: int) -> list[tuple[int, int]]:
    """Return the numbers of chunks left to reduce before and after each halving."""
    found: list[tuple[int, int]] = []
    while size > 1:
        kept = (size + 1) // 2
        found.append((size, kept))
        size = kept
    return found


def _halve(rank: int, size: int) -> Iterator[Round]:
    # The live chunks, those still to reduce, begin with this rank's own. Their second
    # half is sent to the rank that owns the first chunk of that half.
    for live, kept in _distances(size):
        to, source = (rank + kept) % size, (rank - kept) % size
        yield (
            *_of_runs(Action.SEND, to, rank + kept, live - kept, size),
            *_of_runs(Action.REDUCE, source, rank, live - kept, size),
        )


def _double(rank: int, size: int) -> Iterator[Round]:
    """Gather all chunks on every rank: the rounds of ``_halve`` in reverse."""
    for live, kept in reversed(_distances(size)):
        to, source = (rank - kept) % size, (rank + kept) % size
        yield (
            *_of_runs(Action.SEND, to, rank, live - kept, size),
            *_of_runs(Action.COPY, source, rank + kept, live - kept, size),
        )


def _of_runs(
    action: Action, peer: int, first: int, count: int, num_chunks: int
) -> Iterator[ScheduleStep]:
    """Yield one step for consecutive chunks, or two steps if they wrap around."""
    first %= num_chunks
    fitting = min(count, num_chunks - first)
    yield ScheduleStep(action, peer, first, fitting)
    if fitting < count:
        yield ScheduleStep(action, peer, 0, count - fitting)


def _scatter(position: int, size: int) -> Iterator[Round]:
    """Scatter the chunks from position 0: chunk p goes to position p."""
    # The second half of a position's chunks goes to the position of the first of them.
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


def _halving_loads(chunks: Chunks, *, is_reduced: bool = False) -> tuple[Load, ...]:
    return tuple(
        Load(1, chunks.largest(live - kept), kept, is_reduced=is_reduced)
        for live, kept in _distances(chunks.num_chunks)
    )


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A named set of functions, one per collective, that make its schedules."""

    name: str
    all_reduce: Callable[[int, int], Schedule]  # size, numel
    reduce_scatter: Callable[[Chunks], Schedule]  # one chunk for each rank
    all_gather: Callable[[Chunks], Schedule]  # one chunk for each rank
    broadcast: Callable[[int, int, int], Schedule]  # size, numel, root


_RING = ring_all_reduce, ring_reduce_scatter, ring_all_gather, ring_broadcast
# Trees have no advantage when every rank has a chunk of its own.
_TREE = tree_all_reduce, ring_reduce_scatter, ring_all_gather, tree_broadcast
_HALVING_DOUBLING = (
    halving_doubling_all_reduce,
    halving_doubling_reduce_scatter,
    halving_doubling_all_gather,
    halving_doubling_broadcast,
)
ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "ring": Algorithm("ring", *_RING),
        "tree": Algorithm("tree", *_TREE),
        "halving_doubling": Algorithm("halving_doubling", *_HALVING_DOUBLING),
    }
)


def find_algorithm(name: str) -> Algorithm:
    if name not in ALGORITHMS:
        raise UsageError(
            f"algorithm must be one of {', '.join(ALGORITHMS)}, got {name!r}."
        )
    return ALGORITHMS[name]
