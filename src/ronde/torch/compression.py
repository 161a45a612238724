"""Compressors, under the name that Horovod's scripts import them by."""

from ronde.data_parallel import Compression, Compressor
from ronde.data_parallel.compression import (
    BF16Compressor,
    FP16Compressor,
    NoneCompressor,
)

__all__ = [
    "BF16Compressor",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "NoneCompressor",
]
