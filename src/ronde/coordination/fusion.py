"""Which tensors travel together, planned purely: every rank comes to the same plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ronde.coordination.operations import Kind
from ronde.coordination.requests import Request

ALONE_BYTES = 1 << 20
"""From this size on copying a tensor costs more than a collective of its own."""


class Item(NamedTuple):
    """One tensor of a request.

    Attributes:
        request: The request's place among those that run together.
        tensor: The tensor's place in its request.
        numel: Its number of elements.
        num_bytes: Their size.
    """

    request: int
    tensor: int
    numel: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors that one collective reduces.

    Attributes:
        request: What it does; the same for all of them.
        items: The tensors.
    """

    request: Request
    items: tuple[Item, ...]

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(item.numel for item in self.items)


@dataclass(slots=True)
class _Open:
    request: Request
    items: list[Item]
    num_bytes: int = 0


def plan_batches(
    requests: Sequence[Request], threshold_bytes: int, *, is_group_alone: bool
) -> list[Batch]:
    """Gather tensors that are reduced in the same way, up to a size.

    A tensor joins the last open batch of its own kind, past others that do not fit, so
    that two dtypes in turn make two batches (Horovod's look-ahead).

    Args:
        requests: In the order in which they are to run.
        threshold_bytes: At most so many in a batch; 0 fuses nothing.
        is_group_alone: Whether groups are not mixed with others.

    Returns:
        The batches in the order in which they are to run; every tensor is in one.
    """
    planned: list[_Open] = []
    open_by_key: dict[tuple[object, ...], _Open] = {}
    for place, request in enumerate(requests):
        group = place if is_group_alone and len(request.shapes) > 1 else -1
        for tensor, shape in enumerate(request.shapes or ((),)):
            item = _item(request, place, tensor, shape)
            key = (_how(request, tensor), group)
            batch = open_by_key.get(key)
            is_small = item.num_bytes < min(ALONE_BYTES, threshold_bytes)
            if not is_small or request.kind is not Kind.ALLREDUCE:
                planned.append(_Open(request, [item]))
                continue
            if batch is None or batch.num_bytes + item.num_bytes > threshold_bytes:
                batch = open_by_key[key] = _Open(request, [])
                planned.append(batch)
            batch.items.append(item)
            batch.num_bytes += item.num_bytes
    return [Batch(each.request, tuple(each.items)) for each in planned]


def _how(request: Request, tensor: int) -> tuple[object, ...]:
    return (
        request.dtypes[tensor] if request.dtypes else "",
        request.device,
        request.number,
        request.prescale,
        request.postscale,
    )


def _item(request: Request, place: int, tensor: int, shape: tuple[int, ...]) -> Item:
    if not request.dtypes:
        return Item(place, tensor, 0, 0)
    numel = 1
    for extent in shape:
        numel *= max(extent, 0)
    dtype: torch.dtype = getattr(torch, request.dtypes[tensor])
    return Item(place, tensor, numel, numel * dtype.itemsize)
