"""The JAX front end: Horovod's API for JAX's arrays.

``import ronde.jax as hvd``; collectives also work in compiled functions.
"""

from ronde import session as session  # first, as it imports torch
from ronde.errors import CollectiveError as HorovodInternalError
from ronde.jax import elastic
from ronde.jax.compilation import jit
from ronde.jax.lifetime import init, shutdown
from ronde.jax.operations import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_parameters,
    grouped_allreduce,
    reducescatter,
)
from ronde.jax.optimizer import Compression, DistributedOptimizer, value_and_grad
from ronde.session import (
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather_object,
    barrier,
    broadcast_object,
    cross_rank,
    cross_size,
    global_process_set,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    size,
    start_timeline,
    stop_timeline,
)

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "elastic",
    "global_process_set",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "jit",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "value_and_grad",
]
