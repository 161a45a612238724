"""Adasum: a sum that does not overshoot where the ranks' gradients agree.

Two vectors give (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b: their sum if they are
orthogonal, their mean if they are parallel. More vectors are combined in pairs along a
binary tree. Each level halves the vectors and doubles the distance between partners;
the dot products are summed over all ranks that hold parts of the pair.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2021.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor

from ronde.collectives.arithmetic import FLOATS, dense, put_back
from ronde.collectives.communicator import Communicator
from ronde.errors import UsageError

CHUNK = 1 << 16  # elements converted to float64 at once
_TINY = sys.float_info.min**0.5  # a squared norm below this counts as 0: coefficient 1


def adasum_all_reduce(
    communicator: Communicator, tensor: Tensor, lengths: Sequence[int] = ()
) -> Tensor:
    """Combine ``tensor`` over all ranks with Adasum, in place; block until done."""
    # The result is bitwise equal on all ranks. Products and coefficients are float64.
    # ``lengths`` are those of consecutive tensors, which are combined separately.
    size = communicator.size
    if size & (size - 1):
        raise UsageError(
            f"size must be a power of two for Adasum, got {size}. Use 2, 4 or 8 ranks."
        )
    if tensor.dtype not in FLOATS:
        raise UsageError(
            f"tensor must have a floating-point dtype for Adasum, got {tensor.dtype}."
        )
    if lengths and sum(lengths) != tensor.numel():
        raise UsageError(
            f"lengths must add up to the tensor's {tensor.numel()} elements, got "
            f"{sum(lengths)}."
        )
    flat = dense(tensor).view(-1)
    ends = list(accumulate(lengths or (flat.numel(),), initial=0))
    bounds = [slice(*pair) for pair in pairwise(ends)]
    _combine_part(communicator, flat, slice(0, flat.numel()), bounds)
    put_back(flat.view(tensor.shape), tensor)
    return tensor


def _combine_part(
    communicator: Communicator,
    flat: Tensor,
    part: slice,
    bounds: Sequence[slice],
    distance: int = 1,
) -> None:
    if distance == communicator.size:
        return
    middle = (part.start + part.stop) // 2
    halves = slice(part.start, middle), slice(middle, part.stop)
    is_upper = bool(communicator.rank & distance)
    mine, given = halves[is_upper], halves[not is_upper]
    partner = communicator.rank ^ distance
    theirs = torch.empty_like(flat[mine])
    _exchange(communicator, partner, flat[given], theirs)
    pair = (theirs, flat[mine]) if is_upper else (flat[mine], theirs)
    parts = [_overlap(mine, bound) for bound in bounds]
    products = _sum(communicator, _products(*pair, parts), 2 * distance)
    _combine(*pair, parts, products, out=flat[mine])
    _combine_part(communicator, flat, mine, bounds, 2 * distance)
    _exchange(communicator, partner, flat[mine], flat[given])


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
    for part, (dot, *norms) in zip(parts, rows, strict=True):
        of_lower, of_upper = (1 - dot / n * 0.5 if n >= _TINY else 1.0 for n in norms)
        for chunk in _chunks(part):
            result = lower[chunk].double().mul_(of_lower)
            out[chunk].copy_(result.add_(upper[chunk].double(), alpha=of_upper))


def _sum(communicator: Communicator, values: Tensor, size: int) -> Tensor:
    """Sum ``values`` over each block of ``size`` ranks; bitwise equal in a block."""
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
    """Return the overlap of the two slices, relative to the start of ``mine``."""
    start = max(mine.start, bound.start)
    stop = max(start, min(mine.stop, bound.stop))
    return slice(start - mine.start, stop - mine.start)
