"""A way between two elements, and how near it keeps."""

from enum import StrEnum
from typing import NamedTuple


class PathKind(StrEnum):
    """The farthest step of a path; nearer ones are smaller.

    The words and their order are NCCL's.
    """

    LOC = "LOC"
    """The element itself."""

    NVL = "NVL"
    """NVLink or xGMI, through its switches or directly."""

    NVB = "NVB"
    """NVLink by way of another GPU."""

    C2C = "C2C"
    """The link between a GPU and the processor in its package."""

    PIX = "PIX"
    """At most one PCI switch."""

    PXB = "PXB"
    """Several PCI switches."""

    P2C = "P2C"
    """C2C to the processor, and PCI from it."""

    PXN = "PXN"
    """Another GPU passes on to its adapter."""

    PHB = "PHB"
    """The processor's own PCI host bridge."""

    SYS = "SYS"
    """The links between processors."""

    NET = "NET"
    """A network."""

    DIS = "DIS"
    """None."""

    @property
    def rank(self) -> int:
        """Its place in the order, from 0, nearest first."""
        return _RANKS[self]

    def __lt__(self, other: str) -> bool:
        """Return whether it is nearer than another kind."""
        return self.rank < PathKind(other).rank

    def __le__(self, other: str) -> bool:
        """Return whether it is as near as another kind."""
        return self.rank <= PathKind(other).rank

    def __gt__(self, other: str) -> bool:
        """Return whether it is farther than another kind."""
        return self.rank > PathKind(other).rank

    def __ge__(self, other: str) -> bool:
        """Return whether it is no nearer than another kind."""
        return self.rank >= PathKind(other).rank


_RANKS = {kind: rank for rank, kind in enumerate(PathKind)}


class Path(NamedTuple):
    """A way from one element to another.

    Attributes:
        kind: Of its farthest step.
        gb_per_s: Of its narrowest step, in one direction.
        num_hops: Steps.
        route: Names of what it passes, both ends with it.
    """

    kind: PathKind
    gb_per_s: float
    num_hops: int
    route: tuple[str, ...]
