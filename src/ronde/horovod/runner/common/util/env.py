"""What the environment says of this process."""

from ronde.world.environment import select_variables

_PAIRS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def get_env_rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; 0 and 1 where none is set.

    Raises:
        RuntimeError: Of a pair only one is set.
    """
    environ = select_variables([name for pair in _PAIRS for name in pair])
    for rank_name, size_name in _PAIRS:
        if rank_name in environ and size_name in environ:
            return int(environ[rank_name]), int(environ[size_name])
        if rank_name in environ or size_name in environ:
            raise RuntimeError(
                "Could not determine process rank and size: only one of "
                f"{rank_name} and {size_name} found in environment"
            )
    return 0, 1
