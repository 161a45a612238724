"""The collectives that can be measured: what they move, and what a row says of it.

Pure, and without torch. Elements are counted for one rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from ronde.errors import UsageError

_CHUNK_BYTES = 16
"""What is split among the ranks is split at multiples of this."""


class Spread(StrEnum):
    """How the bytes of a row are given to the ranks."""

    WHOLE = "whole"
    """Every rank has all of them."""
    SHARED_SEND = "shared_send"
    """Every rank sends a share and may receive all."""
    SHARED_RECEIVE = "shared_receive"
    """Every rank may send all and receives a share."""
    SPLIT = "split"
    """Every rank sends all, a share to each rank, and receives as much."""
    MATRIX = "matrix"
    """Every pair of ranks has its own share."""


class Factor(StrEnum):
    """What busbw is of algbw, for n ranks."""

    ONE = "1"
    REDUCED = "2(n-1)/n"
    SHARED = "(n-1)/n"

    def value_for(self, size: int) -> float:
        """Return the factor; 0 for one rank, but for ``ONE``."""
        if self is Factor.ONE:
            return 1.0
        return (2 if self is Factor.REDUCED else 1) * (size - 1) / size


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as nccl-tests measures it.

    Attributes:
        name: As ``ronde bench`` spells it.
        spread: How a row's bytes are given to the ranks.
        factor: From algbw to busbw.
        has_op: It reduces.
        has_root: One rank is special.
        is_in_place_checked: The in-place half can be verified.
        redop: The cell where ``has_op`` is False.
        emulation: What it is made of, where no engine has it; or empty.
    """

    name: str
    spread: Spread
    factor: Factor
    has_op: bool = False
    has_root: bool = False
    is_in_place_checked: bool = True
    redop: str = "none"
    emulation: str = ""

    @property
    def binary_name(self) -> str:
        """The name of nccl-tests' program."""
        return f"{self.name}_perf"


@dataclass(frozen=True, slots=True)
class Shape:
    """How many elements one rank gives and gets.

    Attributes:
        count: The argument of the call, as the row shows it.
        send: Elements to send, at most, over all ranks alike.
        receive: Elements to receive, likewise.
        send_offset: In place, rank r's input begins at r times this.
        receive_offset: In place, rank r's result begins at r times this.
    """

    count: int
    send: int
    receive: int
    send_offset: int = 0
    receive_offset: int = 0

    @property
    def span(self) -> int:
        """Elements of the buffer that the call touches."""
        return max(self.send, self.receive)


_GATHERED = (Spread.SHARED_SEND, Factor.SHARED)
_SCATTERED = (Spread.SHARED_RECEIVE, Factor.SHARED)
_SPLIT = (Spread.SPLIT, Factor.SHARED)

COLLECTIVES: Mapping[str, Collective] = MappingProxyType(
    {
        each.name: each
        for each in (
            Collective("all_reduce", Spread.WHOLE, Factor.REDUCED, has_op=True),
            Collective("all_gather", *_GATHERED),
            Collective("reduce_scatter", *_SCATTERED, has_op=True),
            Collective("broadcast", Spread.WHOLE, Factor.ONE, has_root=True),
            Collective(
                "reduce",
                Spread.WHOLE,
                Factor.ONE,
                has_op=True,
                has_root=True,
                emulation="reduce_scatter, then every rank sends its share to the root",
            ),
            Collective(
                "alltoall", Spread.SPLIT, Factor.SHARED, is_in_place_checked=False
            ),
            Collective(
                "alltoallv", Spread.MATRIX, Factor.SHARED, is_in_place_checked=False
            ),
            Collective(
                "gather",
                *_GATHERED,
                has_root=True,
                emulation="every rank sends to the root",
            ),
            Collective(
                "scatter",
                *_SCATTERED,
                has_root=True,
                emulation="the root sends to every rank",
            ),
            Collective("sendrecv", Spread.WHOLE, Factor.ONE, is_in_place_checked=False),
            Collective("hypercube", Spread.SHARED_SEND, Factor.ONE, redop=""),
        )
    }
)

_OTHER_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "all_to_all": "alltoall",
    "all_to_allv": "alltoallv",
    "bcast": "broadcast",
}


def find_collective(name: str) -> Collective:
    """Return a test by its name, or by that of nccl-tests' program.

    Raises:
        UsageError: There is none.
    """
    short = name.removesuffix("_perf")
    short = _OTHER_NAMES.get(short, short)
    if short not in COLLECTIVES:
        raise UsageError(
            f"collective must be one of {', '.join(COLLECTIVES)}, got {name!r}. "
            "Type: ronde bench --help"
        )
    return COLLECTIVES[short]


def shape_of(test: Collective, num_bytes: int, item_bytes: int, size: int) -> Shape:
    """Return what one rank gives and gets in a row of ``num_bytes``.

    Shares are rounded down to 16 bytes, so small rows may be empty. For ``MATRIX`` see
    ``traffic.shape_of_matrix``; here it is an even share.

    Args:
        test: What is measured.
        num_bytes: What the sweep asks for.
        item_bytes: Of one element.
        size: Number of ranks.
    """
    total = num_bytes // item_bytes
    if test.spread is Spread.WHOLE:
        return Shape(total, total, total)
    per_chunk = _CHUNK_BYTES // item_bytes
    share = total // size // per_chunk * per_chunk
    if test.spread is Spread.SHARED_SEND:
        return Shape(share, share, share * size, send_offset=share)
    if test.spread is Spread.SHARED_RECEIVE:
        return Shape(share, share * size, share, receive_offset=share)
    return Shape(share, share * size, share * size)


def is_possible(test: Collective, size: int) -> bool:
    """Say whether so many ranks can do it: a hypercube needs a power of two."""
    return test.name != "hypercube" or size & (size - 1) == 0


def base_bytes(test: Collective, shape: Shape, item_bytes: int, size: int) -> int:
    """Return the bytes that algbw divides by the time."""
    if test.name == "hypercube":
        return (size - 1) * shape.count * item_bytes
    return shape.span * item_bytes
