"""The PyTorch front end: Horovod's API.

``import ronde.torch as hvd`` takes the place of ``import horovod.torch as hvd``.

Note [Frozen modules]
    torch's modules are 180,000 objects, which live until the process ends. Left to
    Python's garbage collector, each of its full runs looks at all of them: 0.15 s in
    the middle of a step, and again when the process ends. ``gc.freeze`` takes what is
    there now out of its hands, so that a rank ends 0.6 s sooner.
"""

import gc

from ronde.data_parallel import compression as compression
from ronde.torch import elastic, mpi_ops
from ronde.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
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
    "elastic",
]
__all__ += mpi_ops.__all__

gc.freeze()  # see Note [Frozen modules]
