"""Collectives, types and operations that can be measured; does not import torch.

Element counts are per rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from ronde.errors import UsageError
from ronde.memory import AvailableMemory
from ronde.units import format_size


@dataclass(frozen=True, slots=True)
class DType:
    """A data type that nccl-tests can measure."""

    name: str  # nccl-tests' name, such as ``half``
    torch_name: str  # name of torch's dtype
    num_bytes: int  # size of an element
    significand_bits: int = 0  # of floats, with the hidden bit; 0 for integers
    max_exponent: int = 0  # of floats: all values below 2**max_exponent are finite

    @property
    def is_float(self) -> bool:
        return self.significand_bits > 0

    @property
    def is_unsigned(self) -> bool:
        return self.name.startswith("u")


_ALL = (
    DType("int8", "int8", 1),
    DType("uint8", "uint8", 1),
    DType("int32", "int32", 4),
    DType("uint32", "uint32", 4),
    DType("int64", "int64", 8),
    DType("uint64", "uint64", 8),
    DType("half", "float16", 2, 11, 15),
    DType("float", "float32", 4, 24, 127),
    DType("double", "float64", 8, 53, 1023),
    DType("bfloat16", "bfloat16", 2, 8, 127),
    # The largest number is 1.75 * 2**8: exponent 8 does not allow every significand.
    DType("f8e4m3", "float8_e4m3fn", 1, 4, 7),
    DType("f8e5m2", "float8_e5m2", 1, 3, 15),
)

DTYPES: Mapping[str, DType] = MappingProxyType({each.name: each for each in _ALL})
"""Types by nccl-tests' name, in the order of ``-d all``."""

_ALIASES = {each.torch_name: each for each in _ALL} | {"bf16": DTYPES["bfloat16"]}

OPS = ("sum", "prod", "max", "min", "avg", "mulsum")

_OP_ALIASES = {"product": "prod", "average": "avg"}


def parse_dtypes(text: str) -> tuple[DType, ...]:
    if text == "all":
        return _ALL
    dtype = DTYPES.get(text) or _ALIASES.get(text)
    if dtype is None:
        raise UsageError(f"must be all or one of {', '.join(DTYPES)}, got {text!r}")
    return (dtype,)


def parse_ops(text: str) -> tuple[str, ...]:
    if text == "all":
        return OPS
    name = _OP_ALIASES.get(text, text)
    if name not in OPS:
        raise UsageError(f"must be all or one of {', '.join(OPS)}, got {text!r}")
    return (name,)


_CHUNK_BYTES = 16  # each rank's share is a multiple of this


class Spread(StrEnum):
    """Division of a row's bytes among the ranks' buffers."""

    WHOLE = "whole"  # every rank's buffers hold all bytes
    SHARED_SEND = "shared_send"  # every rank sends a share and may receive all
    SHARED_RECEIVE = "shared_receive"  # every rank may send all and receives a share
    SPLIT = "split"  # every rank sends each rank a share
    MATRIX = "matrix"  # every pair of ranks has its own share


class Factor(StrEnum):
    """Ratio of busbw to algbw for n ranks."""

    ONE = "1"
    REDUCED = "2(n-1)/n"
    SHARED = "(n-1)/n"

    def value_for(self, size: int) -> float:
        if self is Factor.ONE:
            return 1.0
        return (2 if self is Factor.REDUCED else 1) * (size - 1) / size


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective as nccl-tests measures it."""

    name: str
    spread: Spread
    factor: Factor  # busbw divided by algbw
    has_op: bool = False
    has_root: bool = False
    is_in_place_checked: bool = True  # results in place can be verified
    redop: str = "none"  # the cell's text if ``has_op`` is False
    emulation: str = ""  # the calls that replace it if no engine has it

    @property
    def binary_name(self) -> str:
        return f"{self.name}_perf"


@dataclass(frozen=True, slots=True)
class Shape:
    """Element counts of a rank's call and of its buffers."""

    count: int  # the argument of the call, as the row shows it
    send: int  # most elements that any rank sends
    receive: int  # most elements that any rank receives
    send_offset: int = 0  # in place, rank r's input begins at r * send_offset
    receive_offset: int = 0  # in place, rank r's begins at r * receive_offset

    @property
    def span(self) -> int:
        return max(self.send, self.receive)


_GATHERED = (Spread.SHARED_SEND, Factor.SHARED)
_SCATTERED = (Spread.SHARED_RECEIVE, Factor.SHARED)
_SPLIT = (Spread.SPLIT, Factor.SHARED)

_ALL_TESTS = (
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
    Collective("alltoall", *_SPLIT, is_in_place_checked=False),
    Collective("alltoallv", Spread.MATRIX, Factor.SHARED, is_in_place_checked=False),
    Collective(
        "gather", *_GATHERED, has_root=True, emulation="every rank sends to the root"
    ),
    Collective(
        "scatter", *_SCATTERED, has_root=True, emulation="the root sends to every rank"
    ),
    Collective("sendrecv", Spread.WHOLE, Factor.ONE, is_in_place_checked=False),
    Collective("hypercube", Spread.SHARED_SEND, Factor.ONE, redop=""),
)

COLLECTIVES: Mapping[str, Collective] = MappingProxyType(
    {each.name: each for each in _ALL_TESTS}
)
_OTHER_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "all_to_all": "alltoall",
    "all_to_allv": "alltoallv",
    "bcast": "broadcast",
}


def find_collective(name: str) -> Collective:
    short = name.removesuffix("_perf")
    short = _OTHER_NAMES.get(short, short)
    if short not in COLLECTIVES:
        raise UsageError(
            f"collective must be one of {', '.join(COLLECTIVES)}, got {name!r}. "
            "Type: ronde bench --help"
        )
    return COLLECTIVES[short]


def shape_of(test: Collective, num_bytes: int, item_bytes: int, size: int) -> Shape:
    # Shares are rounded down to 16 bytes, so small rows may be empty. ``MATRIX`` gets
    # an even share here: see ``shape_of_matrix``.
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
    return test.name != "hypercube" or size.bit_count() == 1


def base_bytes(test: Collective, shape: Shape, item_bytes: int, size: int) -> int:
    if test.name == "hypercube":
        return (size - 1) * shape.count * item_bytes
    return shape.span * item_bytes


def premultiplier(rank: int) -> int:
    return 1 + rank % 2  # for ``mulsum``


Matrix = tuple[tuple[int, ...], ...]  # ``matrix[i][j]`` bytes go from rank i to rank j


def traffic_matrix(total_bytes: int, size: int) -> Matrix:
    """Return the traffic of ``alltoallv``, proportional to each pair's distance."""
    if size == 1:
        return ((_chunks(total_bytes),),)
    sum_of_distances = size * (size - 1) // 2
    row = [_chunks(d * total_bytes // sum_of_distances) for d in range(size)]
    return tuple(tuple(row[(j - i) % size] for j in range(size)) for i in range(size))


def in_elements(matrix: Matrix, item_bytes: int) -> Matrix:
    return tuple(tuple(b // item_bytes for b in row) for row in matrix)


def shape_of_matrix(matrix: Matrix, item_bytes: int, count: int) -> Shape:
    sent = max(sum(row) for row in matrix) // item_bytes
    received = max(sum(column) for column in zip(*matrix, strict=True)) // item_bytes
    return Shape(count, sent, received)


def _chunks(num_bytes: int) -> int:
    return num_bytes // _CHUNK_BYTES * _CHUNK_BYTES


_GIB = 1 << 30
_RESERVE_PER_BYTES = 16 * _GIB
_MAX_RESERVE_BYTES = 4 * _GIB


def largest_row(free_bytes: int, num_sharing: int, *, is_checked: bool) -> int:
    """Return the largest row size for which a rank has enough memory.

    The reserve is 1 GiB, plus 1 GiB for every started 16 GiB of memory, up to 4 GiB;
    at most half of the memory is reserved. A row needs two buffers, and a third one
    to verify results.
    Source: nccl-tests.
    """
    started = -(-free_bytes // _RESERVE_PER_BYTES)
    reserve = min(started * _GIB, _MAX_RESERVE_BYTES) + _GIB
    usable = free_bytes - min(reserve, free_bytes // 2)
    return usable // num_sharing // (3 if is_checked else 2)


def require_room(min_bytes: int, largest_bytes: int, memory: AvailableMemory) -> None:
    if min_bytes > largest_bytes:
        raise UsageError(
            f"-b must be at most {largest_bytes} ({format_size(largest_bytes)}), got "
            f"{min_bytes}: larger buffers do not fit into {memory.source}, "
            f"{memory.num_bytes} bytes. Give -b {largest_bytes} or less."
        )
