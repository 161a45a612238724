"""The TensorFlow front end: Horovod's API.

``import ronde.tensorflow as hvd`` replaces ``import horovod.tensorflow as hvd``.
"""

# Horovod's users import private names.
# pyright: reportPrivateUsage=false
from importlib import import_module

from ronde import session as session  # first, as it imports torch
from ronde.lazy_exports import lazy_exports
from ronde.tensorflow import functions, mpi_ops
from ronde.tensorflow.compression import Compression
from ronde.tensorflow.functions import *  # noqa: F403
from ronde.tensorflow.gradients import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
    _DistributedOptimizer as _DistributedOptimizer,
    _make_allreduce_grads_fn as _make_allreduce_grads_fn,
)
from ronde.tensorflow.mpi_ops import *  # noqa: F403
from ronde.tensorflow.mpi_ops import (
    _allreduce as _allreduce,
    _grouped_allreduce as _grouped_allreduce,
    _grouped_reducescatter as _grouped_reducescatter,
    _reducescatter as _reducescatter,
)
from ronde.tensorflow.util import (
    _cache as _cache,
    _executing_eagerly as _executing_eagerly,
    _make_subgraph as _make_subgraph,
    refs_to_vars,
    vars_to_refs,
)

__all__ = [
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "refs_to_vars",
    "vars_to_refs",
]
__all__ += functions.__all__
__all__ += mpi_ops.__all__
# Lazy, as they load Keras, or scripts seldom need them.
_find = lazy_exports(
    __name__,
    {
        "aggregation": "LocalGradientAggregationHelper "
        "LocalGradientAggregationHelperEager",
        "sync_batch_norm": "SyncBatchNormalization",
    },
)


def __getattr__(name: str) -> object:
    if name in ("elastic", "keras"):
        return import_module(f"{__name__}.{name}")
    return _find(name)
