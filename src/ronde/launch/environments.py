"""The environment of each rank: what is taken over, what is taken away, what is new.

What is written goes into a child and never into this process.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ronde.memory import malloc_thresholds
from ronde.topology.machine import read_gpus
from ronde.world.environment import read_malloc_tuning
from ronde.world.value import World


class JobFacts(NamedTuple):
    """What every rank is told of its job.

    Attributes:
        job_id: Name of the job.
        epoch: Generation of the world.
        cookie: By which a process of the job is known.
        max_restarts: How many generations may follow the first.
    """

    job_id: str
    epoch: int
    cookie: str
    max_restarts: int = 0


class NodeFacts(NamedTuple):
    """What every rank is told of its node.

    Attributes:
        host: Its name.
        node_rank: Its index among the nodes.
        num_nodes: How many there are.
    """

    host: str
    node_rank: int
    num_nodes: int


def default_environment(num_threads: int) -> dict[str, str]:
    """Return the variables for all ranks that the user may set otherwise.

    Args:
        num_threads: For ``OMP_NUM_THREADS``.
    """
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "PYTHONUNBUFFERED": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def malloc_environment(environ: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    """Return what has glibc keep a CPU rank's memory; empty where the user tunes it.

    Args:
        environ: What the rank would have without it.
        num_ranks: How many share this machine's memory.
    """
    if not read_malloc_tuning(environ) or read_gpus("", environ):
        return {}
    thresholds = malloc_thresholds(num_ranks)
    return thresholds.environment() if thresholds else {}


def rank_environment(world: World, job: JobFacts, node: NodeFacts) -> dict[str, str]:
    """Return the variables that only this rank has.

    They are torchrun's, the further ones that Lightning, Composer and DeepSpeed read,
    Horovod's rank variables and our own; ``MASTER_ADDR`` and ``MASTER_PORT`` come when
    the ranks start.

    Args:
        world: The rank's place.
        job: Facts of the job.
        node: Facts of the rank's node.
    """
    rank, size = str(world.rank), str(world.size)
    local_rank, local_size = str(world.local_rank), str(world.local_size)
    cross_rank, cross_size = str(world.cross_rank), str(world.cross_size)
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": str(node.node_rank),
        "GROUP_WORLD_SIZE": str(node.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "TORCHELASTIC_RESTART_COUNT": str(job.epoch),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_RUN_ID": job.job_id,
        # True would make rank 0 a client of a store that nobody serves.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "NODE_RANK": str(node.node_rank),
        "LOCAL_SIZE": local_size,
        "CROSS_RANK": cross_rank,
        "CROSS_SIZE": cross_size,
        "HOROVOD_HOSTNAME": node.host,
        "HOROVOD_RANK": rank,
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_RANK": local_rank,
        "HOROVOD_LOCAL_SIZE": local_size,
        "HOROVOD_CROSS_RANK": cross_rank,
        "HOROVOD_CROSS_SIZE": cross_size,
        "RONDE_JOB_ID": job.job_id,
        "RONDE_EPOCH": str(job.epoch),
        "RONDE_COOKIE": job.cookie,
        "RONDE_HOST": node.host,
        "RONDE_NODE_RANK": str(node.node_rank),
    }
