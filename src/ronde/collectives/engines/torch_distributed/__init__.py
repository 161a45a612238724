"""Collectives on torch's process groups: Gloo for the CPU, NCCL for CUDA."""

from ronde.collectives.engines.torch_distributed.engine import TorchDistributedEngine

__all__ = ["TorchDistributedEngine"]
