"""Compression of gradients for sending, with Horovod's names."""

from typing import Any, Protocol

import torch
from torch import Tensor

from ronde.collectives import Communicator, ReduceOp, Work
from ronde.data_parallel.buckets import GradientBucket, Sum
from ronde.errors import UsageError


class Compressor(Protocol):
    """Protocol of a deterministic compression that preserves the number of elements."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and a context for ``decompress``."""
        ...

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor: ...  # noqa: ANN401 - the user's


class NoneCompressor:
    """Sends gradients unchanged."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: None) -> Tensor:  # noqa: ARG004 - the interface
        return tensor


class FP16Compressor:
    """Sends floating-point gradients as float16; values above 65504 overflow."""

    wire_dtype = torch.float16

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        wire = tensor.to(cls.wire_dtype) if tensor.is_floating_point() else tensor
        return wire, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        return tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Sends floating-point gradients as bfloat16, with 8 bits of precision."""

    wire_dtype = torch.bfloat16


class Compression:
    """The formats for sending gradients.

    ========  ====================================================================
    ``none``  the gradient itself
    ``fp16``  float16: half of float32's bytes; values above 65504 become infinite,
              those below 6e-8 zero
    ``bf16``  bfloat16: half the bytes, float32's range, 8 bits of mantissa
    ========  ====================================================================
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def require_compressor(compression: object) -> None:
    if not hasattr(compression, "compress") or not hasattr(compression, "decompress"):
        raise UsageError(
            "compression must be Compression.none, fp16, bf16 or a class with compress "
            f"and decompress, got {compression!r}."
        )


def sum_compressed(
    compressor: type[Compressor], bucket: GradientBucket, communicator: Communicator
) -> Sum:
    """Sum a compressed bucket over all ranks."""
    # Control numbers are sent with the values if the compressor is one of ours, which
    # keep small integers exact, and the sum does not scale the values.
    prescale, values = bucket.prescale, bucket.values
    works: list[Work[Tensor]] = []
    is_ours = compressor in (NoneCompressor, FP16Compressor, BF16Compressor)
    if is_ours and prescale is None:
        values = bucket.memory
    else:
        works.append(communicator.all_reduce(bucket.control, ReduceOp.SUM))
        if not values.numel():
            compressor = NoneCompressor
    context: Any
    wire, context = compressor.compress(values)
    works.append(communicator.all_reduce(wire, ReduceOp.SUM, prescale=prescale or 1.0))
    yield works if values.is_cpu else ()
    results = [work.wait() for work in works]
    result = compressor.decompress(results[-1], context)
    if result is not values:
        values.copy_(result)
    yield ()
