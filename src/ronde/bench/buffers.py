"""The memory that operations work on, and the places in it that they are shifted to."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ronde.bench.catalog import Shape
from ronde.bench.dtypes import DType
from ronde.collectives import Communicator

CANARY_BYTES = 256
"""Bytes on either side of a result that nobody may touch."""

_MAX_PLACES = 16384

Allocate = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class Views:
    """One operation's arguments.

    Attributes:
        send: The input.
        receive: The result; where the operation is in place, the input is in it, or it
            in the input.
        is_in_place: Both are of one buffer.
    """

    send: Tensor
    receive: Tensor
    is_in_place: bool


class Buffers:
    """Two buffers that are allocated once and hold the largest row.

    Attributes:
        capacity_bytes: The largest row.
        unaligned_by: Elements by which both are shifted.
    """

    def __init__(
        self, allocate: Allocate, capacity_bytes: int, unaligned_by: int
    ) -> None:
        """Allocate.

        Args:
            allocate: Makes a tensor of so many bytes; collective if that is.
            capacity_bytes: The largest row.
            unaligned_by: Elements by which both are shifted.
        """
        self.capacity_bytes = capacity_bytes
        self.unaligned_by = unaligned_by
        # 8 bytes is the largest element.
        num_bytes = capacity_bytes + 2 * CANARY_BYTES + 8 * unaligned_by
        self._send = allocate(num_bytes)
        self._receive = allocate(num_bytes)

    def places(
        self, dtype: DType, shape: Shape, rank: int, *, is_in_place: bool
    ) -> Iterator[Views]:
        """Yield the arguments of the first, second, ... operation of a loop.

        Each is behind the one before by what that touched, so that small messages are
        not in the cache already, and round again; the largest row stays where it is.
        """
        step = shape.span * dtype.num_bytes
        count = min(_MAX_PLACES, self.capacity_bytes // step if step else 1)
        for index in range(max(1, count)):
            yield self.views(dtype, shape, rank, index, is_in_place=is_in_place)

    def views(
        self,
        dtype: DType,
        shape: Shape,
        rank: int,
        index: int = 0,
        *,
        is_in_place: bool,
    ) -> Views:
        """Return the arguments at the ``index``-th place."""
        receive = self._region(self._receive, dtype, shape, index)
        if not is_in_place:
            send = self._region(self._send, dtype, shape, index)
            return Views(send[: shape.send], receive[: shape.receive], is_in_place)
        start, end = rank * shape.send_offset, rank * shape.receive_offset
        return Views(
            receive[start : start + shape.send],
            receive[end : end + shape.receive],
            is_in_place,
        )

    def fill(self, pattern: Tensor, num_bytes: int) -> None:
        """Repeat the bytes of ``pattern`` through the first part of both buffers.

        Timing needs no more. What the timed operations reduce is soon infinite or has
        wrapped; that costs no more time. Zeros, or numbers that become denormal, could.

        Args:
            pattern: Bytes.
            num_bytes: What the timed operations touch, or more than there is.
        """
        end = min(num_bytes + 2 * CANARY_BYTES, self._send.numel())
        for buffer in (self._send, self._receive):
            for start in range(0, end, pattern.numel()):
                part = buffer[start : start + pattern.numel()]
                part.copy_(pattern[: part.numel()])

    def canaries(
        self, dtype: DType, shape: Shape, *, is_in_place: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the bytes on either side of what the first place's operation fills."""
        start = CANARY_BYTES + self.unaligned_by * dtype.num_bytes
        # In place the input may be beside the result.
        filled = shape.span if is_in_place else shape.receive
        end = start + filled * dtype.num_bytes
        return (
            self._receive[start - CANARY_BYTES : start],
            self._receive[end : end + CANARY_BYTES],
        )

    def _region(self, buffer: Tensor, dtype: DType, shape: Shape, index: int) -> Tensor:
        num_bytes = shape.span * dtype.num_bytes
        start = CANARY_BYTES + self.unaligned_by * dtype.num_bytes + index * num_bytes
        return buffer[start : start + num_bytes].view(getattr(torch, dtype.torch_name))


def allocator(
    communicator: Communicator, device: torch.device, *, is_foreign: bool
) -> Allocate:
    """Return what gives memory: the engine's own, or torch's like any other tensor.

    Args:
        communicator: Whose memory.
        device: Where.
        is_foreign: Take torch's.
    """

    def allocate(num_bytes: int) -> Tensor:
        if is_foreign:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return communicator.allocate(num_bytes, torch.uint8, device)

    return allocate
