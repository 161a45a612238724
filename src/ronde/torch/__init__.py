"""The PyTorch front end: Horovod's API.

``import ronde.torch as hvd`` replaces ``import horovod.torch as hvd``.
"""

from ronde import session as session  # first, as it imports torch
from ronde.data_parallel import compression as compression
from ronde.torch import elastic, mpi_ops
from ronde.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    check_parity,
)
from ronde.torch.mpi_ops import *  # noqa: F403
from ronde.torch.optimizer import (
    DistributedOptimizer,
    _DistributedOptimizer as _DistributedOptimizer,  # pyright: ignore[reportPrivateUsage]
)
from ronde.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_parity",
    "elastic",
]
__all__ += mpi_ops.__all__
