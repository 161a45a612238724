"""Two binary trees, each of which carries half of the vector.

A rank that has children in one tree is a leaf of the other, so each sends and receives
about as much as in a ring, but in rounds that grow with the logarithm of the ranks:
best for middling messages on many ranks, when they are cut into pieces. Source:
Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction
and scan", 2009.
"""

from collections.abc import Iterator
from dataclasses import dataclass

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
    """Reduce to the roots, then broadcast from them: ``2 floor(log2 n)`` rounds."""
    trees = _two_trees(size)
    depth = trees[0].depth

    def part(rank: int) -> Iterator[Round]:
        rounds: list[list[Step]] = [[] for _ in range(2 * depth)]
        for chunk, tree in enumerate(trees):
            _reduce(tree, rank + 1, chunk, rounds[:depth])
            _spread(tree, rank + 1, chunk, rounds[depth:])
        for steps in rounds:
            yield renamed(tuple(steps), lambda place: place - 1)

    chunks = Chunks(len(trees), numel)
    loads = _reduce_loads(trees[0], chunks) + _spread_loads(trees[0], chunks)
    return Schedule("tree all_reduce", size, chunks, loads, part)


def broadcast(size: int, numel: int, root: int) -> Schedule:
    """Give each tree's root its half, and on: ``1 + floor(log2 (n-1))`` rounds.

    The trees are those of all other ranks.
    """
    trees = _two_trees(size - 1)
    num_rounds = 1 + trees[0].depth

    def part(rank: int) -> Iterator[Round]:
        rounds: list[list[Step]] = [[] for _ in range(num_rounds)]
        place = (rank - root) % size
        for chunk, tree in enumerate(trees if num_rounds else ()):
            if not place:
                rounds[0].append(Step(Action.SEND, tree.root, chunk))
                continue
            if place == tree.root:
                rounds[0].append(Step(Action.COPY, 0, chunk))
            _spread(tree, place, chunk, rounds[1:])
        for steps in rounds:
            yield renamed(tuple(steps), lambda place: (place + root) % size)

    chunks = Chunks(len(trees), numel)
    loads = (Load(min(1, num_rounds), numel), *_spread_loads(trees[0], chunks))
    return Schedule("tree broadcast", size, chunks, loads, part)


@dataclass(frozen=True, slots=True)
class _Tree:
    """A binary tree in order over the places 1 to ``num_places``.

    A place's height is the number of zeros that end it in binary: odd places are
    leaves, and all that is left of a place is as high as can be.

    Attributes:
        num_places: How many.
        is_mirrored: The tree is turned round, which makes the even places leaves; of
            an odd number of places it is shifted by one instead.
    """

    num_places: int
    is_mirrored: bool = False

    @property
    def depth(self) -> int:
        """Length of the longest way from the root; -1 where there is no place."""
        return self.num_places.bit_length() - 1

    @property
    def root(self) -> int:
        """The place above all others."""
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
        while True:
            above = node - reach if node & (2 * reach) else node + reach
            if reach > self.num_places:
                return None
            if above <= self.num_places:
                return above
            node, reach = above, 2 * reach

    def _turned(self, place: int) -> int:
        if not self.is_mirrored:
            return place
        if self.num_places % 2:
            return place % self.num_places + 1
        return self.num_places + 1 - place

    def _turned_back(self, node: int) -> int:
        if not self.is_mirrored:
            return node
        if self.num_places % 2:
            return (node - 2) % self.num_places + 1
        return self.num_places + 1 - node


def _two_trees(num_places: int) -> tuple[_Tree, _Tree]:
    return _Tree(num_places), _Tree(num_places, is_mirrored=True)


def _reduce(tree: _Tree, place: int, chunk: int, rounds: list[list[Step]]) -> None:
    """Enter what ``place`` does to bring the sum to the root: peers are places."""
    for child in tree.children(place):
        rounds[tree.height(child)].append(Step(Action.REDUCE, child, chunk))
    parent = tree.parent(place)
    if parent is not None:
        rounds[tree.height(place)].append(Step(Action.SEND, parent, chunk))


def _spread(tree: _Tree, place: int, chunk: int, rounds: list[list[Step]]) -> None:
    """Enter what ``place`` does to bring the root's to all: peers are places."""
    level = tree.level(place)
    parent = tree.parent(place)
    if parent is not None:
        rounds[level - 1].append(Step(Action.COPY, parent, chunk))
    for child in tree.children(place):
        rounds[level].append(Step(Action.SEND, child, chunk))


def _reduce_loads(tree: _Tree, chunks: Chunks) -> tuple[Load, ...]:
    """Return what comes from the children of one height, most often two."""
    return tuple(
        Load(1, chunks.largest() * (2 if 3 << height <= tree.num_places else 1))
        for height in range(tree.depth)
    )


def _spread_loads(tree: _Tree, chunks: Chunks) -> tuple[Load, ...]:
    """Return what goes to the children from one level, most often two.

    A root has one child where the number of places is a power of two.
    """
    is_root_lean = tree.num_places == 1 << max(0, tree.depth)
    return tuple(
        Load(1, chunks.largest() * (1 if level == 0 and is_root_lean else 2))
        for level in range(tree.depth)
    )
