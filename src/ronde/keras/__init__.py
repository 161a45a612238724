"""The front end of Keras 3, on its three backends, with Horovod's API.

``import ronde.keras as hvd`` replaces ``import horovod.keras as hvd``. Optimizers of
tf-keras (Keras 2) are handed to ``ronde.tensorflow.keras``.
"""

from importlib import import_module

from ronde.lazy_exports import lazy_exports

# Lazy, as ``ronde.tensorflow.keras`` uses modules of this package without Keras 3.
_find = lazy_exports(
    __name__,
    {
        "functions": "allgather allreduce broadcast broadcast_global_variables "
        "load_model reducescatter",
        "gradients": "Compression",
        "optimizer": "DistributedOptimizer PartialDistributedOptimizer",
    },
)
SESSION_NAMES = frozenset(
    "Adasum Average Max Min ProcessSet Product Sum add_process_set allgather_object "
    "barrier broadcast_object ccl_built cross_rank cross_size cuda_built ddl_built "
    "global_process_set gloo_built gloo_enabled init is_homogeneous is_initialized "
    "join local_rank local_size mpi_built mpi_enabled mpi_threads_supported "
    "nccl_built rank remove_process_set rocm_built shutdown size start_timeline "
    "stop_timeline".split()
)
MODULES = ("callbacks", "elastic")


def __getattr__(name: str) -> object:
    if name in MODULES:
        return import_module(f"{__name__}.{name}")
    if name in SESSION_NAMES:
        return getattr(import_module("ronde.session"), name)
    return _find(name)
