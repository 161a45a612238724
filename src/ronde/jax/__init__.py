"""The JAX front end: Horovod's API for JAX's arrays.

``import ronde.jax as hvd``; collectives also work in compiled functions.
"""

from ronde import session as session  # first, as it imports torch
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
from ronde.session import allgather_object, broadcast_object, front_end
from ronde.session.front_end import *  # noqa: F403

__all__: list[str] = ["Compression", "DistributedOptimizer", "allgather"]
__all__ += ["allgather_object", "allreduce", "alltoall", "broadcast"]
__all__ += ["broadcast_object", "broadcast_parameters", "elastic", "grouped_allreduce"]
__all__ += ["init", "jit", "reducescatter", "shutdown", "value_and_grad"]
__all__ += front_end.__all__
