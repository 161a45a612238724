"""Memory in which small tensors travel side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ronde.collectives import Communicator
from ronde.coordination.fusion import Batch
from ronde.coordination.requests import Request


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the tensors of a batch lie.

    Attributes:
        flat: All of them.
        views: Each, in its own shape.
    """

    flat: Tensor
    views: list[Tensor]


class FusionBuffer:
    """One stretch of memory for each dtype and device, as large as was ever needed.

    It lies where the communicator reduces it without a copy.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def pack(self, batch: Batch, requests: Sequence[Request]) -> Packing:
        """Give the tensors of a batch their places; collective.

        What was packed before is overwritten by whoever writes to the places.
        """
        numel = batch.numel
        flat = self._at_least(numel, batch)[:numel]
        views: list[Tensor] = []
        start = 0
        for item in batch.items:
            shape = requests[item.request].shapes[item.tensor]
            views.append(flat[start : start + item.numel].view(shape))
            start += item.numel
        return Packing(flat, views)

    def _at_least(self, numel: int, batch: Batch) -> Tensor:
        first = batch.items[0]
        dtype, device = batch.request.dtypes[first.tensor], batch.request.device
        buffer = self._buffers.get((dtype, device))
        if buffer is None or buffer.numel() < numel:
            room = 1 << max(numel - 1, 1).bit_length()
            where = torch.device(device)
            if where.type == "cuda":
                where = torch.device("cuda", torch.cuda.current_device())
            buffer = self._communicator.allocate(room, getattr(torch, dtype), where)
            self._buffers[dtype, device] = buffer
        return buffer
