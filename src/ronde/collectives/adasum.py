"""Adasum: a sum that does not overshoot where the ranks' gradients agree.

For two vectors: (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b: their sum where they are
orthogonal, their mean where they are parallel. For more, pairwise along a binary tree.

The vectors are halved and the distance doubled at each level, so that every rank works
on an equal part; the products are summed over all ranks that hold parts of the pair.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2021.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ronde.collectives.arithmetic import dense, put_back
from ronde.collectives.communicator import Communicator
from ronde.errors import UsageError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CHUNK = 1 << 16
"""Elements that are held in float64 at a time."""
_TINY = sys.float_info.min**0.5
"""A squared norm below this is taken for zero, and its coefficient is 1."""


def adasum(
    communicator: Communicator, tensor: Tensor, lengths: Sequence[int] = ()
) -> Tensor:
    """Combine ``tensor`` over all ranks by Adasum, in place; collective, blocks.

    The result is equal on all ranks, bit by bit. Products and coefficients are float64.
    Tensors of ``lengths`` that lie one after the other are each combined as if alone.

    Raises:
        UsageError: Number of ranks, dtype or ``lengths`` cannot be.
    """
    size = communicator.size
    if size & (size - 1):
        raise UsageError(
            f"size must be a power of two for Adasum, got {size}. Use 2, 4 or 8 ranks."
        )
    if tensor.dtype not in DTYPES:
        raise UsageError(
            f"tensor must be of a floating dtype for Adasum, got {tensor.dtype}."
        )
    if lengths and sum(lengths) != tensor.numel():
        raise UsageError(
            "lengths must add up to the tensor's elements, got "
            f"{sum(lengths)} and {tensor.numel()}."
        )
    flat = dense(tensor).view(-1)
    ends = list(accumulate(lengths or (flat.numel(),), initial=0))
    bounds = [slice(*pair) for pair in pairwise(ends)]
    steps = _halve(communicator, flat, bounds)
    for step in reversed(steps):
        _exchange(communicator, step.partner, flat[step.kept], flat[step.given])
    put_back(flat.view(tensor.shape), tensor)
    return tensor


class _Halving(NamedTuple):
    partner: int
    kept: slice
    given: slice


def _halve(
    communicator: Communicator, flat: Tensor, bounds: Sequence[slice]
) -> list[_Halving]:
    """Combine until this rank holds a part of the result; return how it came to it."""
    rank = communicator.rank
    steps: list[_Halving] = []
    mine = slice(0, flat.numel())
    distance = 1
    while distance < communicator.size:
        middle = (mine.start + mine.stop) // 2
        halves = slice(mine.start, middle), slice(middle, mine.stop)
        is_upper = bool(rank & distance)
        mine, given = halves[is_upper], halves[not is_upper]
        step = _Halving(rank ^ distance, mine, given)
        theirs = torch.empty_like(flat[mine])
        _exchange(communicator, step.partner, flat[given], theirs)
        pair = (theirs, flat[mine]) if is_upper else (flat[mine], theirs)
        parts = [_overlap(mine, bound) for bound in bounds]
        products = _sum(communicator, _products(*pair, parts), 2 * distance)
        _combine(*pair, parts, products, out=flat[mine])
        steps.append(step)
        distance *= 2
    return steps


def _products(lower: Tensor, upper: Tensor, parts: Sequence[slice]) -> Tensor:
    """Return a·b, |a|² and |b|² of each part, in float64: shape (parts, 3)."""
    products = torch.zeros(len(parts), 3, dtype=torch.float64, device=lower.device)
    for index, part in enumerate(parts):
        for chunk in _chunks(part):
            a, b = lower[chunk].double(), upper[chunk].double()
            products[index] += torch.stack([a.dot(b), a.dot(a), b.dot(b)])
    return products


def _combine(
    lower: Tensor,
    upper: Tensor,
    parts: Sequence[slice],
    products: Tensor,
    *,
    out: Tensor,
) -> None:
    rows = cast("list[tuple[float, float, float]]", products.tolist())
    for part, (dot, lower_norm, upper_norm) in zip(parts, rows, strict=True):
        of_lower = _coefficient(dot, lower_norm)
        of_upper = _coefficient(dot, upper_norm)
        for chunk in _chunks(part):
            result = lower[chunk].double().mul_(of_lower)
            out[chunk].copy_(result.add_(upper[chunk].double(), alpha=of_upper))


def _coefficient(dot: float, norm: float) -> float:
    return 1.0 - dot / norm * 0.5 if norm >= _TINY else 1.0


def _sum(communicator: Communicator, values: Tensor, size: int) -> Tensor:
    """Sum over blocks of ``size`` neighbouring ranks.

    Both of a pair add the same two numbers, so all get the same bits.
    """
    distance = 1
    while distance < size:
        theirs = torch.empty_like(values)
        _exchange(communicator, communicator.rank ^ distance, values, theirs)
        values = values + theirs
        distance *= 2
    return values


def _exchange(
    communicator: Communicator, partner: int, sent: Tensor, received: Tensor
) -> None:
    sending = communicator.send(sent, partner)
    communicator.recv(received, partner).wait()
    sending.wait()


def _chunks(part: slice) -> Iterator[slice]:
    for start in range(part.start, part.stop, CHUNK):
        yield slice(start, min(start + CHUNK, part.stop))


def _overlap(mine: slice, bound: slice) -> slice:
    """Return where ``bound`` lies in ``mine``, counted from its start."""
    start = max(mine.start, bound.start)
    stop = max(start, min(mine.stop, bound.stop))
    return slice(start - mine.start, stop - mine.start)
