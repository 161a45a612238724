"""Equal parameters and buffers on all ranks of a mesh."""

import zlib
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.device_mesh import DeviceMesh

from ronde.drift import sum_of_words
from ronde.errors import UsageError

_PLAIN = (Tensor, nn.Parameter)
T = TypeVar("T")


class _State(NamedTuple):
    """The description and checksum of a tensor, for comparison between ranks."""

    form: str
    checksum: int | None  # None on the meta device.


@torch.no_grad()
def make_equal(model: nn.Module, mesh: DeviceMesh) -> None:
    """Copy the first rank's weights and buffers to all ranks, like DDP; collective.

    Only tensors with different checksums are sent. Tensors on the meta device, and
    subclasses such as ``DTensor``, are skipped.

    Raises:
        UsageError: Parameters or buffers differ in name, shape or dtype.
    """
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    groups = [group for group in groups if dist.get_backend(group) != "fake"]
    if not groups:
        return
    plain: Any = model
    named = chain(plain.named_parameters(), plain.named_buffers())
    tensors: dict[str, Tensor] = {n: t for n, t in named if type(t) in _PLAIN}
    own = {name: _state_of(tensor) for name, tensor in tensors.items()}
    for group in groups:
        digest = zlib.crc32(repr(own).encode())
        if len(set(gather_objects(digest, group))) == 1:
            continue
        of_ranks = gather_objects(own, group)
        _require_same_form(of_ranks, dist.get_process_group_ranks(group))
        for name, tensor in tensors.items():
            checksums = {each[name].checksum for each in of_ranks}
            if len(checksums) > 1 and None not in checksums:
                sent = tensor.to(mesh.device_type).contiguous()
                dist.broadcast(sent, group=group, group_src=0)
                tensor.copy_(sent)
                own[name] = _state_of(tensor)


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return a list of all ranks' values; collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def _state_of(tensor: Tensor) -> _State:
    grad = ", requires_grad" if tensor.requires_grad else ""
    form = f"{tuple(tensor.shape)} {tensor.dtype}{grad}"
    return _State(form, None if tensor.is_meta else sum_of_words(tensor))


def _require_same_form(
    of_ranks: list[dict[str, _State]], ranks: tuple[int, ...] | list[int]
) -> None:
    first = of_ranks[0]
    for rank, own in zip(ranks, of_ranks, strict=True):
        for name in chain(first, own):
            forms = [
                each[name].form if name in each else "missing" for each in (first, own)
            ]
            if forms[0] != forms[1]:
                raise UsageError(
                    f"ranks have different models: {name} is {forms[0]} on rank "
                    f"{ranks[0]}, but {forms[1]} on rank {rank}."
                )
