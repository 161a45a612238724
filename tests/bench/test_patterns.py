"""The inputs of which the result is known, against plain Python's own arithmetic."""

import functools
import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, strategies as st

from ronde.bench import (
    DTYPES,
    OPS,
    TOLERANCE,
    ReductionInputs,
    premultiplier,
    random_bytes,
)

CPU = torch.device("cpu")
COUNT = 40
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def numbers(tensor: torch.Tensor) -> list[Fraction]:
    """Return the elements as Python's own numbers, exactly."""
    if tensor.dtype.is_floating_point:
        return [Fraction(value) for value in tensor.double().tolist()]
    return [Fraction(value) for value in tensor.tolist()]


def wrapped(value: int, dtype) -> int:
    modulus = 2 ** (8 * dtype.num_bytes)
    value %= modulus
    is_negative = not dtype.is_unsigned and value >= modulus // 2
    return value - modulus if is_negative else value


def plain(op: str, columns: list[tuple[Fraction, ...]], dtype) -> list[Fraction]:
    """Reduce with Fractions; integers wrap, averages of integers truncate."""
    results = []
    for column in columns:
        match op:
            case "sum":
                value = sum(column)
            case "mulsum":
                value = sum(x * premultiplier(r) for r, x in enumerate(column))
            case "prod":
                value = math.prod(column)
            case "min" | "max":
                value = min(column) if op == "min" else max(column)
            case _:
                value = sum(column) / len(column)
        if not dtype.is_float:
            value = Fraction(wrapped(math.trunc(value), dtype))
        results.append(value)
    return results


cases = st.tuples(
    st.sampled_from(sorted(DTYPES)),
    st.sampled_from(OPS),
    st.sampled_from([1, 2, 3, 4, 5, 8, 17, 64, 130]),
    st.integers(0, 5),
    st.sampled_from([0, 1, 65535, 2**32 - 5, 2**33 + 1]),
)


@given(cases)
def test_results_are_those_of_exact_arithmetic(case):
    name, op, size, seed, start = case
    dtype = DTYPES[name]
    reduction = ReductionInputs(dtype, op, size, seed, CPU)
    inputs = [numbers(reduction.input_of(r, start, COUNT)) for r in range(size)]
    result = reduction.result(start, COUNT)
    exact = plain(op, list(zip(*inputs, strict=True)), dtype)
    assert result.dtype is getattr(torch, dtype.torch_name)
    if reduction.is_exact:
        assert numbers(result) == exact
    else:
        nearest = torch.tensor([float(x) for x in exact], dtype=torch.float64)
        assert torch.equal(result, nearest.to(result.dtype))


@given(cases)
def test_no_partial_sum_or_product_is_ever_rounded(case):
    """Whatever subset is reduced first, the type holds it exactly."""
    name, op, size, seed, start = case
    dtype = DTYPES[name]
    if not dtype.is_float or op not in ("sum", "prod", "mulsum", "avg"):
        return
    reduction = ReductionInputs(dtype, op, size, seed, CPU)
    inputs = [numbers(reduction.input_of(r, start, COUNT)) for r in range(size)]
    torch_dtype = getattr(torch, dtype.torch_name)
    for ranks in (range(size), range(size - 1, -1, -1), range(0, size, 2)):
        for column in zip(*(inputs[r] for r in ranks), strict=True):
            factors = [premultiplier(r) if op == "mulsum" else 1 for r in ranks]
            scaled = [x * f for x, f in zip(column, factors, strict=True)]
            combine = math.prod if op == "prod" else sum
            total = combine(scaled)
            held = torch.tensor(float(total), dtype=torch.float64).to(torch_dtype)
            assert Fraction(held.double().item()) == total


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("op", OPS)
def test_every_rank_and_index_matters(name, op):
    """A result of other ranks, or of other indices, is not taken for the right one."""
    reduction = ReductionInputs(DTYPES[name], op, 4, 1, CPU)
    bits = SIGNED[DTYPES[name].num_bytes]
    right = reduction.result(0, 4096).view(bits)
    moved = reduction.result(512, 4096).view(bits)
    reseeded = ReductionInputs(DTYPES[name], op, 4, 2, CPU).result(0, 4096).view(bits)
    own = [reduction.input_of(r, 0, 4096).view(bits) for r in range(4)]
    # One byte has few values, and few of them are a fp8's integers.
    least = 0.05 if DTYPES[name].num_bytes == 1 else 0.4
    for other in (moved, reseeded):
        assert (right != other).double().mean() > least
    for left, after in itertools.pairwise(own):
        assert (left != after).double().mean() > least


def test_sums_are_never_zero():
    for name in ("half", "float", "bfloat16", "double", "f8e4m3", "f8e5m2"):
        for size in (1, 2, 3, 64, 200):
            total = ReductionInputs(DTYPES[name], "sum", size, 0, CPU).result(0, 5000)
            assert bool((total.double() != 0).all())


def test_parts_are_equal_to_the_whole():
    for name, op in (("float", "sum"), ("int8", "prod"), ("double", "prod")):
        reduction = ReductionInputs(DTYPES[name], op, 3, 0, CPU)
        for first in (0, 2**32 - 50):
            whole = reduction.result(first, 100)
            parts = [reduction.result(first + s, 25) for s in range(0, 100, 25)]
            assert torch.equal(whole, torch.cat(parts))


@given(st.integers(0, 100), st.integers(0, 60), st.integers(0, 3))
def test_bytes_are_one_string(start, count, rank):
    whole = random_bytes(1, rank, 0, 200, CPU)
    part = random_bytes(1, rank, start, count, CPU)
    assert part.tolist() == whole[start : start + count].tolist()


def test_bytes_hold_nan_with_payload():
    values = random_bytes(0, 0, 0, 4 << 16, CPU).view(torch.float32)
    is_nan = values.isnan()
    assert bool(is_nan.any())
    assert values[is_nan].view(torch.int32).unique().numel() > 10


def test_an_average_of_three_is_near_whatever_the_order():
    reduction = ReductionInputs(DTYPES["float"], "avg", 3, 0, CPU)
    inputs = [reduction.input_of(r, 0, 1000) for r in range(3)]
    right = reduction.result(0, 1000).view(torch.int32)
    summed = functools.reduce(torch.add, inputs) / 3
    scaled = functools.reduce(torch.add, [x * (1 / 3) for x in inputs])
    for other in (summed, scaled):
        distance = (other.view(torch.int32).long() - right.long()).abs()
        assert int(distance.max()) <= TOLERANCE
