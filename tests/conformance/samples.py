"""Reproducible inputs of all ranks, and the expected results of reductions.

The expected values come from Python's own integers and from float64, not from the code
under test.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ronde.collectives import ReduceOp

HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32, torch.float64]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
INTEGERS = SIGNED + UNSIGNED
COMPLEX = [torch.complex64, torch.complex128]
MOVED_ONLY = [torch.float8_e4m3fn, torch.float8_e5m2]
ALL = [*FLOATS, *INTEGERS, torch.bool, *COMPLEX, *MOVED_ONLY]
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4, 5), (0,), (4, 0)]


def checks_in(names: dict[str, Any]) -> list[Callable[[Any, str], None]]:
    """Return the functions of a module that check a communicator on a device."""
    functions = [each for each in names.values() if inspect.isfunction(each)]
    signature = ["communicator", "device"]
    return [f for f in functions if [*inspect.signature(f).parameters] == signature]


ALL_CASES, THIRD, FEW = "all", "third", "few"
_kept = [ALL_CASES]


def keep(share: str) -> None:
    """Make :func:`cases` return this share from now on, in this process."""
    _kept[0] = share


def cases(size: int, *axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return all combinations on three ranks, and on others a third of them.

    Every value of an axis occurs, and every pair of values if there is a third axis.
    After ``keep(THIRD)`` it is a third on three ranks, too. After ``keep(FEW)`` every
    value occurs in as many cases as the longest axis has.
    """
    lists = [list(axis) for axis in axes]
    if _kept[0] == FEW:
        longest = max(map(len, lists))
        return [tuple(axis[i % len(axis)] for axis in lists) for i in range(longest)]
    return [
        tuple(value for _, value in case)
        for case in itertools.product(*map(enumerate, lists))
        if (size == 3 and _kept[0] == ALL_CASES)
        or sum(index for index, _ in case) % 3 == size % 3
    ]


def sample(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rank: int,
    seed: int = 0,
    device: str = "cpu",
) -> Tensor:
    """Return the input of ``rank``; integers fill a quarter of their range."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype in INTEGERS:
        info = torch.iinfo(dtype)
        low, high = int(info.min) // 4, int(info.max) // 4
        numbers = torch.randint(low, high + 1, shape, generator=generator)
        return numbers.to(dtype).to(device)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool().to(device)
    if dtype in COMPLEX:
        return torch.randn(shape, dtype=dtype, generator=generator).to(device)
    numbers = torch.randn(shape, dtype=torch.float64, generator=generator)
    return numbers.to(dtype).to(device)


def layouts(tensor: Tensor) -> dict[str, Tensor]:
    """Return tensors of equal elements with different layouts."""
    found = {"contiguous": tensor.clone()}
    if tensor.ndim >= 2:
        found["transposed"] = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
        found["strided"] = wide[..., ::2].copy_(tensor)
    if tensor.ndim == 4:
        found["channels_last"] = tensor.contiguous(memory_format=torch.channels_last)
    return found


def expected_integers(
    inputs: list[Tensor], op: ReduceOp, prescale: float, postscale: float
) -> Tensor:
    """Reduce with Python's integers, wrapped as the dtype wraps."""
    dtype, shape = inputs[0].dtype, inputs[0].shape
    fold = _FOLDS[op]
    columns = zip(*(t.flatten().tolist() for t in inputs), strict=True)
    results: list[int] = []
    for column in columns:
        scaled = [_scaled(number, prescale) for number in column]
        results.append(_scaled(_wrapped(fold(scaled), dtype), postscale))
    return _from_integers(results, dtype).reshape(shape)


def error_bound(
    inputs: list[Tensor], op: ReduceOp, prescale: float, postscale: float
) -> Tensor:
    """Return the largest rounding error of each element of a float reduction.

    Each of the at most ``size + 3`` operations (the sum's, two scalings, the division,
    the last rounding) errs by at most half an eps of the largest value it may see: for
    sums the sum of magnitudes, for products their product.
    """
    eps = torch.finfo(inputs[0].dtype).eps
    magnitudes = torch.stack([t.abs().double() for t in inputs]) * abs(prescale)
    is_product = op is ReduceOp.PRODUCT
    largest = magnitudes.prod(0) if is_product else magnitudes.sum(0)
    tiny = torch.finfo(inputs[0].dtype).smallest_normal
    return (len(inputs) + 3) * (eps * largest + tiny) * max(1.0, abs(postscale))


def expected_floats(
    inputs: list[Tensor], op: ReduceOp, prescale: float, postscale: float
) -> Tensor:
    """Reduce in float64, or complex128."""
    wide = torch.complex128 if inputs[0].is_complex() else torch.float64
    stack = torch.stack([t.to(wide) for t in inputs]) * prescale
    reduced = {
        ReduceOp.SUM: lambda: stack.sum(0),
        ReduceOp.AVERAGE: lambda: stack.sum(0) / len(inputs),
        ReduceOp.PRODUCT: lambda: stack.prod(0),
        ReduceOp.MIN: lambda: stack.amin(0),
        ReduceOp.MAX: lambda: stack.amax(0),
    }[op]()
    return reduced * postscale


class Reduced:
    """The expected result of a reduction, computed once for many checks."""

    def __init__(
        self,
        inputs: list[Tensor],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        self._inputs = [t.cpu() for t in inputs]
        self._case = (op, prescale, postscale)
        self._dtype = inputs[0].dtype
        if self._dtype is torch.bool:
            stack = torch.stack(self._inputs)
            self._expected = stack.any(0) if op is ReduceOp.MAX else stack.all(0)
        elif self._dtype in INTEGERS:
            self._expected = expected_integers(self._inputs, *self._case)
        else:
            self._expected = expected_floats(self._inputs, *self._case)
            self._bound = error_bound(self._inputs, *self._case)

    def check(self, result: Tensor) -> None:
        """Compare a result with the expected one, up to rounding."""
        assert result.dtype == self._dtype
        result = result.cpu()
        op, prescale, postscale = self._case
        told = (
            f"{op} of {self._dtype} {tuple(result.shape)}, scales {prescale} "
            f"{postscale}"
        )
        assert result.shape == self._expected.shape, told
        if self._dtype is torch.bool:
            assert torch.equal(result, self._expected), told
        elif self._dtype in INTEGERS:
            # Not every unsigned type can be compared, but its bytes can.
            same = torch.equal(_bytes(result), _bytes(self._expected))
            assert same, f"{told}: {result} is not {self._expected}"
        else:
            self._check_floats(result, told)

    def _check_floats(self, result: Tensor, told: str) -> None:
        op, prescale, postscale = self._case
        error = (result.to(self._expected.dtype) - self._expected).abs()
        if op in (ReduceOp.MIN, ReduceOp.MAX) and prescale == postscale == 1.0:
            assert torch.equal(result.double(), self._expected), told
        assert bool((error <= self._bound).all()), (
            f"{told}: {result} is not {self._expected}"
        )


def assert_reduced(
    result: Tensor,
    inputs: list[Tensor],
    op: ReduceOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> None:
    """Compare a result with the reduction of the inputs, up to rounding."""
    Reduced(inputs, op, prescale, postscale).check(result)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _average(numbers: list[int]) -> int:
    total = sum(numbers)
    quotient = abs(total) // len(numbers)
    return quotient if total >= 0 else -quotient


_FOLDS: dict[ReduceOp, Callable[[list[int]], int]] = {
    ReduceOp.SUM: sum,
    ReduceOp.AVERAGE: _average,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    ReduceOp.PRODUCT: math.prod,
}


def _scaled(number: int, factor: float) -> int:
    return number if factor == 1.0 else math.trunc(float(number) * factor)


def _wrapped(number: int, dtype: torch.dtype) -> int:
    info = torch.iinfo(dtype)
    return (number - int(info.min)) % 2**info.bits + int(info.min)


def _from_integers(numbers: list[int], dtype: torch.dtype) -> Tensor:
    if dtype is not torch.uint64:
        return torch.tensor(numbers, dtype=torch.int64).to(dtype)
    signed = [_wrapped(number, torch.int64) for number in numbers]
    return torch.tensor(signed, dtype=torch.int64).view(torch.uint64)
