"""What gradients look like on the wire."""

from typing import Any, Protocol

import torch
from torch import Tensor


class Compressor(Protocol):
    """A pair of static functions; any class that has them serves.

    Both must be deterministic and keep the number of elements, since the ranks' results
    are summed element by element.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what travels and whatever ``decompress`` needs to undo it."""
        ...

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:  # noqa: ANN401 - the user's own
        """Turn the reduced ``tensor`` back into the original dtype."""
        ...


class NoneCompressor:
    """Send gradients as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        """Return ``tensor`` itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: None) -> Tensor:  # noqa: ARG004 - the interface
        """Return ``tensor`` itself."""
        return tensor


class _CastCompressor:
    wire_dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Cast floating point to the wire's dtype; leave the rest alone."""
        wire = tensor
        if tensor.is_floating_point():
            wire = tensor.to(cls.wire_dtype)
        return wire, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Cast back."""
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Send floating point as float16: half the bytes, range up to 65504."""

    wire_dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Send floating point as bfloat16: half the bytes, float32's range, 8 bits."""

    wire_dtype = torch.bfloat16
