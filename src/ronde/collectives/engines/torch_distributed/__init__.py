"""Collectives on torch's process groups: Gloo for CPU tensors, NCCL for CUDA tensors."""

from ronde.collectives.engines.torch_distributed.engine import (
    TorchDistributedCommunicator,
)

__all__ = ["TorchDistributedCommunicator"]
