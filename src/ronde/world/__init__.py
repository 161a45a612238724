"""Rank, size and rendezvous of this process, as read from the environment."""

from typing import TYPE_CHECKING

from ronde.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ronde.world.launcher_env import (
        Launcher,
        Meeting,
        RankInfo,
        World,
        read_rank_info,
    )

__all__ = ["Launcher", "Meeting", "RankInfo", "World", "read_rank_info"]

__getattr__ = lazy_exports(
    __name__,
    {
        "environment": (
            "ALGORITHMS ENGINES boot_identity network_identity own_or "
            "read_cpu_engine read_engine read_malloc_tuning"
        ),
        "horovod_config": "HorovodConfig read_horovod_config report_ignored",
        "host_lists": "MAX_HOSTS expand_list",
        "launcher_env": (
            "HOROVOD Launcher LauncherEnv Meeting OPEN_MPI PLAIN PMI RONDE RankInfo "
            "TORCHRUN World parse_tasks_per_node read_rank_info"
        ),
    },
)
