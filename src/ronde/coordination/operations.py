"""What a rank asks its coordinator for."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from ronde.collectives import Communicator, ReduceOp


class Kind(IntEnum):
    """The operations that ranks agree on, with the numbers they travel as."""

    ALLREDUCE = 0
    ADASUM = 1
    ALLGATHER = 2
    BROADCAST = 3
    ALLTOALL = 4
    REDUCESCATTER = 5
    BARRIER = 6
    JOIN = 7
    CONNECT = 8

    @property
    def word(self) -> str:
        """What names on the wire begin with. Adasum shares its with allreduce."""
        return _WORDS[self]


_WORDS = {
    kind: "allreduce" if kind is Kind.ADASUM else kind.name.lower() for kind in Kind
}


class Operation(NamedTuple):
    """One submission: a tensor, or a group of tensors that is ready as a whole.

    Attributes:
        kind: What to do.
        tensors: What goes in, detached; may have any layout. Several form a group.
        name: As the user gave it, without the operation; empty for none.
        outputs: For ALLREDUCE, ADASUM and BROADCAST where the results go, one each, of
            the inputs' shapes: the inputs themselves to work in place. Else empty.
        is_group: Whether names on the wire begin with ``grouped_``.
        reduce_op: For ALLREDUCE and REDUCESCATTER.
        prescale: See ``Communicator.all_reduce``.
        postscale: See ``Communicator.all_reduce``.
        root: For BROADCAST: the rank in the set to copy from.
        splits: For ALLTOALL: rows for each rank of the set; None splits evenly.
        connect: For CONNECT: makes a communicator of the set, from a number that is
            equal on all ranks and used once; collective.
    """

    kind: Kind
    tensors: tuple[Tensor, ...] = ()
    name: str = ""
    outputs: tuple[Tensor, ...] = ()
    is_group: bool = False
    reduce_op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: Sequence[int] | None = None
    connect: Callable[[int], Communicator] | None = None
