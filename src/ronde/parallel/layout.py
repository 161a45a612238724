"""The division of a job's ranks into axes, with torchtitan's names and order.

Ranks are in row-major order: tp is innermost, so that its ranks are consecutive and
``ronde run`` puts them on one host; pp is outermost.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from ronde.errors import UsageError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes, outermost first, in the order of a mesh's dimensions."""

_FORM = "Write it as pp=2,dp_shard=4,tp=8; -1 stands for the ranks left."


class RankLayout(NamedTuple):
    """The number of ranks, of nodes, and of ranks per node."""

    num_ranks: int  # n, at least 2.
    num_nodes: int  # N, at least 1.
    ranks_per_node: int  # g; the largest where nodes differ.

    @property
    def others(self) -> float:
        """The share of the data that is on other ranks, (n-1)/n."""
        return (self.num_ranks - 1) / self.num_ranks


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of the axes; -1, for at most one axis, means the remaining ranks.

    Raises:
        UsageError: A size is invalid, or more than one is -1.
    """

    pp: int = 1  # Pipeline stages.
    dp_replicate: int = 1  # Copies of the weights.
    dp_shard: int = 1  # Parts of each copy.
    cp: int = 1  # Parts of each sequence.
    tp: int = 1  # Parts of each layer.

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1 and size != -1:
                raise UsageError(f"{axis} must be at least 1, or -1, got {size}.")
        if len(self._open) > 1:
            raise UsageError(
                f"only one axis may be -1, got {' and '.join(self._open)}. Give the "
                "sizes of the others."
            )

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read ``pp=2,dp_shard=4,tp=8``; axes that are not named have size 1."""
        sizes: dict[str, int] = {}
        for word in text.split(","):
            axis, sign, size = (part.strip() for part in word.partition("="))
            if axis not in AXES:
                rule = f"must be {', '.join(AXES[:-1])} or {AXES[-1]}"
                raise UsageError(f"axis {rule}, got {axis!r}. {_FORM}")
            if axis in sizes:
                raise UsageError(f"{axis} is given twice. {_FORM}")
            if not sign or not re.fullmatch("-1|0*[1-9][0-9]{0,8}", size, re.ASCII):
                raise UsageError(
                    f"{axis} must be a whole number of at least 1, or -1, got {size!r}."
                    f" {_FORM}"
                )
            sizes[axis] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        parts = [f"{axis}={size}" for axis, size in self.sizes.items() if size != 1]
        return ",".join(parts) or "dp_shard=1"

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(AXES, astuple(self), strict=True))

    @property
    def _open(self) -> list[str]:
        return [axis for axis, size in self.sizes.items() if size == -1]

    @property
    def num_ranks(self) -> int:
        if self._open:
            raise UsageError(
                f"layout must not contain -1, got {self}. Call "
                "resolve(world_size) first."
            )
        return math.prod(astuple(self))

    def resolve(self, world_size: int) -> "Layout":
        """Return a layout with -1 replaced by the size for ``world_size`` ranks.

        Raises:
            UsageError: The sizes do not fit the number of ranks.
        """
        if not self._open:
            if self.num_ranks != world_size:
                raise UsageError(
                    f"{'*'.join(AXES)} must be the number of ranks, {world_size}, got "
                    f"{_product(self.sizes.values())}. "
                    f"{self._cure(world_size)}"
                )
            return self
        [axis] = self._open
        others = {name: size for name, size in self.sizes.items() if name != axis}
        num_others = math.prod(others.values())
        if world_size < 1 or world_size % num_others:
            raise UsageError(
                f"{'*'.join(others)} must divide the number of ranks, as {axis} is -1: "
                f"{_product(others.values())}, got {world_size} ranks. Use a multiple "
                f"of {num_others} ranks, or other sizes."
            )
        return replace(self, **{axis: world_size // num_others})

    def _cure(self, world_size: int) -> str:
        others = self.num_ranks // self.dp_shard
        if world_size >= others and world_size % others == 0:
            return f"dp_shard={world_size // others} fits."
        return f"Use {self.num_ranks} ranks, or other sizes."

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each group along an axis, ordered by first rank.

        The ranks of a group differ only in their coordinate along this axis.
        """
        size = self.sizes[axis]
        stride = math.prod(astuple(self)[AXES.index(axis) + 1 :])
        outer = range(0, self.num_ranks, size * stride)
        return tuple(
            tuple(range(first, first + size * stride, stride))
            for start in outer
            for first in range(start, start + stride)
        )

    def coordinates(self, rank: int) -> dict[str, int]:
        if not 0 <= rank < self.num_ranks:
            raise UsageError(f"rank must be in 0..{self.num_ranks - 1}, got {rank}.")
        found: dict[str, int] = {}
        for axis, size in reversed(self.sizes.items()):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in AXES}


def _product(sizes: Iterable[int]) -> str:
    sizes = tuple(sizes)
    return f"{'*'.join(map(str, sizes))} = {math.prod(sizes)}"
