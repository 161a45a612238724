"""The session of a rank between ``init()`` and ``shutdown()``, for every front end.

Process sets, named collectives, handles and objects are implemented here; a front end
only converts its own arrays to torch tensors and back.
"""

from ronde.lazy_exports import lazy_exports
from ronde.memory import import_torch

import_torch()  # before other modules import it

__getattr__ = lazy_exports(
    __name__,
    {
        "connecting": "Connector",
        "elastic": "HostUpdateResult HostsUpdatedInterrupt ObjectState State "
        "WorkerNotificationManager notification_manager run run_fn source",
        "elastic_arrays": "ArrayState KerasState elastic_callbacks run_compiled",
        "frameworks": "import_framework",
        "lifetime": "init reform shutdown start_timeline stop_timeline",
        "operations": "Adasum Allgather Allreduce Alltoall Average Broadcast Max Min "
        "NamedCollective Product Reducescatter Splits Sum allgather_object barrier "
        "broadcast_object choose_op join poll synchronize",
        "process_sets": "add_process_set remove_process_set",
        "session": "ProcessSet ccl_built cross_rank cross_size cuda_built "
        "current_session ddl_built global_process_set gloo_built gloo_enabled "
        "is_homogeneous is_initialized local_rank local_size mpi_built mpi_enabled "
        "mpi_threads_supported nccl_built rank rocm_built size",
    },
)
