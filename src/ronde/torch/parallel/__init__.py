"""Sharded training with torch's own classes, from a one-line layout."""

from ronde.parallel.layout import Layout
from ronde.torch.parallel.checkpoints import load, save
from ronde.torch.parallel.estimate import estimate
from ronde.torch.parallel.parity import Parity, check_parity
from ronde.torch.parallel.pipelining import StagedModel, pipeline
from ronde.torch.parallel.sharding import find_units, init_mesh, parallelize
from ronde.torch.parallel.tensor_plans import tensor_parallel_plan

__all__ = [
    "Layout",
    "Parity",
    "StagedModel",
    "check_parity",
    "estimate",
    "find_units",
    "init_mesh",
    "load",
    "parallelize",
    "pipeline",
    "save",
    "tensor_parallel_plan",
]
