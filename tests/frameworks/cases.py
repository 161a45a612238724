"""The cases that every front end passes: one table, whose results NumPy computes.

A case is an operation on the arrays of all ranks. Values are small integers, so that
every order of additions has one result; ``random`` ones have a tolerance.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ronde import session

Array = np.ndarray
SHAPES = ((), (1,), (7,), (3, 2), (0, 3), (2, 1, 5))
FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("uint8", "int8", "int32", "int64")
COMPLEX = ("complex64", "complex128")
MOVED = ("bool", "uint16", "int16", "uint32", "uint64")
"""Only gathered, broadcast and exchanged, as not every framework adds them."""
OPS: dict[str, tuple[int, Callable[..., Array]]] = {
    "Sum": (session.Sum, np.sum),
    "Average": (session.Average, np.mean),
    "Min": (session.Min, np.min),
    "Max": (session.Max, np.max),
    "Product": (session.Product, np.prod),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One operation of the table.

    ``make`` returns the arrays of one of ``size`` ranks, and ``expect`` the results of
    rank ``rank`` from the arrays of all. A single array is no group.
    """

    name: str
    operation: str
    make: Callable[[int, int], list[Array]]
    expect: Callable[[list[list[Array]], int], list[Array]]
    options: Callable[[int, int], Mapping[str, Any]] = lambda rank, size: {}
    dtype: str = "float32"
    is_group: bool = False
    is_ragged: bool = False  # shapes differ between ranks
    is_same: bool = True  # results are equal on all ranks
    tolerance: float = 0.0  # relative
    on_set: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call that raises a ``ValueError`` before anything is sent."""

    name: str
    operation: str
    array: Array
    options: Mapping[str, Any] = field(default_factory=dict)


def values(shape: tuple[int, ...], dtype: str, rank: int) -> Array:
    """Return small integers of either sign that differ by rank."""
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5 + rank % 3 + 1
    if np.dtype(dtype_of(dtype)).kind not in "ub":
        numbers = numbers * (-1) ** numbers
    if dtype == "bool":
        numbers = numbers % 2
    return np.asarray(numbers).astype(dtype_of(dtype))


def dtype_of(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes  # with TensorFlow and JAX

    return np.dtype(ml_dtypes.bfloat16)


def reduced(name: str, arrays: list[Array], pre: float = 1.0, post: float = 1.0):
    """Return the reduction; averages of integers truncate."""
    dtype = arrays[0].dtype
    wide = np.complex128 if dtype.kind == "c" else np.float64
    stack = np.stack([array.astype(wide) * pre for array in arrays])
    result = OPS[name][1](stack, axis=0) * post
    return (
        np.trunc(result).astype(dtype) if dtype.kind in "iu" else result.astype(dtype)
    )


def of_all(name: str, **factors: float):
    return lambda given, rank: [
        reduced(name, list(arrays), **factors) for arrays in zip(*given, strict=True)
    ]


def joined(given: list[list[Array]], rank: int) -> list[Array]:
    return [np.concatenate(arrays) for arrays in zip(*given, strict=True)]


def own_rows(name: str):
    def expect(given: list[list[Array]], rank: int) -> list[Array]:
        whole = of_all(name)(given, rank)
        return [np.array_split(each, len(given))[rank] for each in whole]

    return expect


def splits_of(rank: int, size: int) -> list[int]:
    return [(rank + to) % 3 for to in range(size)]


def exchanged(given: list[list[Array]], rank: int) -> list[Array]:
    """Return the rows for ``rank`` and their counts; the last row is not sent."""
    size, parts = len(given), []
    for sender, (array,) in enumerate(given):
        ends = np.cumsum([0, *splits_of(sender, size)])
        parts.append(array[ends[rank] : ends[rank + 1]])
    counts = np.array([len(part) for part in parts], np.int32)
    return [np.concatenate(parts), counts]


def reductions() -> Iterator[Case]:
    def of(shape: tuple[int, ...], dtype: str):
        return lambda rank, size: [values(shape, dtype, rank)]

    def by(op: str, **factors: float):
        return lambda rank, size: {"op": OPS[op][0], **factors}

    def random(rank: int, size: int) -> list[Array]:
        return [np.random.default_rng(rank).standard_normal(1000, np.float32)]

    for shape in SHAPES:
        name = f"allreduce {list(shape)}"
        yield Case(name, "allreduce", of(shape, "float32"), of_all("Sum"), by("Sum"))
    for dtype in FLOATS + INTEGERS + COMPLEX:
        make = of((3, 2), dtype)
        yield Case(f"sum {dtype}", "allreduce", make, of_all("Sum"), by("Sum"), dtype)
    for op in ("Average", "Min", "Max", "Product"):
        for dtype in ("float64", "int32"):
            case = (of((5,), dtype), of_all(op), by(op), dtype)
            yield Case(f"{op} {dtype}", "allreduce", *case, tolerance=1e-15)
    yield Case(
        "scaled",
        "allreduce",
        of((4,), "float32"),
        of_all("Sum", pre=0.5, post=4.0),
        by("Sum", prescale_factor=0.5, postscale_factor=4.0),
    )
    # Terms have a magnitude of at most 5; a sum of three rounds twice.
    yield Case(
        "random", "allreduce", random, of_all("Sum"), by("Sum"), tolerance=3 * 2**-24
    )
    yield Case(
        "sum of a group",
        "grouped_allreduce",
        lambda rank, size: [values(shape, "float32", rank) for shape in SHAPES],
        of_all("Sum"),
        by("Sum"),
        is_group=True,
    )
    for dtype in ("float32", "float64", "int32"):
        yield Case(
            f"rows {dtype}",
            "reducescatter",
            lambda rank, size, dtype=dtype: [values((2 * size + 1, 2), dtype, rank)],
            own_rows("Sum"),
            by("Sum"),
            dtype,
            is_same=False,
        )
    yield Case(
        "rows of a group",
        "grouped_reducescatter",
        lambda rank, size: [values((size * n,), "float32", rank) for n in (1, 3)],
        own_rows("Average"),
        by("Average"),
        is_group=True,
        is_same=False,
        tolerance=2**-23,
    )


def movements() -> Iterator[Case]:
    for dtype in FLOATS + INTEGERS + COMPLEX + MOVED:
        yield Case(
            f"gathered {dtype}",
            "allgather",
            lambda rank, size, dtype=dtype: [values((2, 3), dtype, rank)],
            joined,
            dtype=dtype,
        )
        yield Case(
            f"last {dtype}",
            "broadcast",
            lambda rank, size, dtype=dtype: [values((3,), dtype, rank)],
            lambda given, rank: given[-1],
            lambda rank, size: {"root_rank": size - 1},
            dtype,
        )
    for shape in ((), (0, 3), (2, 1, 5)):
        yield Case(
            f"first {list(shape)}",
            "broadcast",
            lambda rank, size, shape=shape: [values(shape, "float32", rank)],
            lambda given, rank: given[0],
            lambda rank, size: {"root_rank": 0},
        )
    yield Case(
        "ragged",
        "allgather",
        lambda rank, size: [values((rank, 2), "float32", rank)],
        joined,
        is_ragged=True,
    )
    yield Case(
        "group gathered",
        "grouped_allgather",
        lambda rank, size: [values((n + 1,), "float32", rank) for n in range(3)],
        joined,
        is_group=True,
    )
    for dtype in ("float32", "int64", "bool", "uint16"):
        yield Case(
            f"even {dtype}",
            "alltoall",
            lambda rank, size, dtype=dtype: [values((2 * size, 2), dtype, rank)],
            lambda given, rank: [
                np.concatenate([a[2 * rank : 2 * rank + 2] for (a,) in given])
            ],
            dtype=dtype,
            is_same=False,
        )
    yield Case(
        "uneven",
        "alltoall",
        lambda rank, size: [values((sum(splits_of(rank, size)) + 1,), "int32", rank)],
        exchanged,
        lambda rank, size: {"splits": splits_of(rank, size)},
        "int32",
        is_ragged=True,
        is_same=False,
    )


def on_sets() -> Iterator[Case]:
    def make(rank: int, size: int) -> list[Array]:
        return [values((3, 2), "float32", rank)]

    average = lambda rank, size: {"op": session.Average}  # noqa: E731
    yield Case(
        "sum of a set", "allreduce", make, of_all("Average"), average, on_set=True
    )
    yield Case("gathered by a set", "allgather", make, joined, on_set=True)


CASES = [*reductions(), *movements(), *on_sets()]
REFUSALS = [
    Refusal("sum of bool", "allreduce", np.ones(2, np.bool_), {"op": session.Sum}),
    Refusal("unknown op", "allreduce", np.ones(2, np.float32), {"op": 17}),
    Refusal("unknown root", "broadcast", np.ones(2, np.float32), {"root_rank": 99}),
    Refusal("many splits", "alltoall", np.ones(2, np.float32), {"splits": [1] * 99}),
]
