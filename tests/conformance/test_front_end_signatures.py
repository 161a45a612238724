"""``ronde.torch`` has the names and signatures of ``horovod.torch``."""

import inspect

import ronde.torch as hvd
from ronde.torch import compression, functions, mpi_ops, optimizer, sync_batch_norm

NAMES = """
init shutdown is_initialized size local_size cross_size rank local_rank cross_rank
start_timeline stop_timeline mpi_threads_supported mpi_enabled mpi_built gloo_enabled
gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built Average Sum Adasum Min
Max Product ProcessSet global_process_set add_process_set remove_process_set poll
synchronize join barrier Compression HorovodInternalError DistributedOptimizer
SyncBatchNorm elastic broadcast_parameters broadcast_optimizer_state broadcast_object
allgather_object allreduce allreduce_async allreduce_ allreduce_async_
grouped_allreduce grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_
sparse_allreduce_async allgather allgather_async grouped_allgather
grouped_allgather_async broadcast broadcast_async broadcast_ broadcast_async_ alltoall
alltoall_async reducescatter reducescatter_async grouped_reducescatter
grouped_reducescatter_async
"""

# The order of parameters is part of the interface: scripts give them by position.
_REDUCE = "average name {}op prescale_factor postscale_factor process_set"
_SCATTER = "name {}op process_set prescale_factor postscale_factor"
PARAMETERS = {
    "init": "comm process_sets",
    "allreduce": "tensor " + _REDUCE.format("compression "),
    "grouped_allreduce": "tensors " + _REDUCE.format("compression "),
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name process_set",
    "allgather_async": "tensor name process_set",
    "grouped_allgather": "tensors name process_set",
    "grouped_allgather_async": "tensors name process_set",
    "alltoall": "tensor splits name process_set",
    "alltoall_async": "tensor splits name process_set",
    "reducescatter": "tensor " + _SCATTER.format("compression "),
    "reducescatter_async": "tensor " + _SCATTER.format(""),
    "grouped_reducescatter": "tensors " + _SCATTER.format("compression "),
    "grouped_reducescatter_async": "tensors " + _SCATTER.format(""),
    "poll": "handle",
    "synchronize": "handle",
    "join": "device",
    "barrier": "process_set",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name",
    "SyncBatchNorm": "num_features eps momentum affine track_running_stats",
    **{
        f"{group}allreduce{form}": f"tensor{'s' * bool(group)} " + _REDUCE.format("")
        for group in ("", "grouped_")
        for form in ("_", "_async", "_async_")
    },
    **{
        f"broadcast{form}": "tensor root_rank name process_set"
        for form in ("", "_", "_async", "_async_")
    },
}


def test_all_names_are_exported():
    assert set(NAMES.split()) <= set(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)


def test_parameters_are_in_horovods_order():
    for name, words in PARAMETERS.items():
        expected = words.split()
        parameters = list(inspect.signature(getattr(hvd, name)).parameters)
        assert parameters[: len(expected)] == expected, name  # ronde's own come last


def test_modules_that_scripts_import_from():
    assert hvd.mpi_ops is mpi_ops
    assert mpi_ops.synchronize is hvd.synchronize
    assert mpi_ops.is_homogeneous
    assert mpi_ops.HorovodInternalError is hvd.HorovodInternalError
    assert compression.Compressor
    assert compression.Compression is hvd.Compression
    assert functions.broadcast_parameters is hvd.broadcast_parameters
    assert optimizer.DistributedOptimizer is hvd.DistributedOptimizer
    assert sync_batch_norm.SyncBatchNorm is hvd.SyncBatchNorm
