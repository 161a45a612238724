"""Names of what can move the bytes, known without importing any of it."""

from collections.abc import Mapping

from ronde.errors import WorldError

ENGINES = (
    "auto",
    "shared_memory",
    "gloo",
    "nccl",
    "mpi",
    "scheduled",
    "hierarchical",
)
"""The engines that ``ronde.collectives.connect`` makes, ``auto`` first."""
ALGORITHMS = ("ring", "tree", "halving_doubling")
"""The schedules that the engine ``scheduled`` follows."""


def require_engine(name: str, said_by: str) -> str:
    """Return ``name``.

    Args:
        name: What was asked for.
        said_by: The option or variable that it came from.

    Raises:
        WorldError: No engine is called so.
    """
    return _require(name, ENGINES, said_by)


def require_algorithm(name: str, said_by: str) -> str:
    """Return ``name``, which may be empty: the engine's own choice.

    Args:
        name: What was asked for.
        said_by: The option or variable that it came from.

    Raises:
        WorldError: No algorithm is called so.
    """
    return _require(name, ALGORITHMS, said_by) if name else ""


def read_cpu_engine(environ: Mapping[str, str]) -> str:
    """Return the engine that Horovod's variables ask for; empty where none does.

    ``HOROVOD_CPU_OPERATIONS`` counts before ``HOROVOD_CONTROLLER``. Of the latter gloo
    only says to do without MPI's launcher, and asks for nothing. Neither counts where
    horovodrun itself wrote them, as it does for every job.

    Args:
        environ: The variables.

    Raises:
        WorldError: A value is none of mpi, gloo and ccl.
    """
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        return ""
    names = ("HOROVOD_CPU_OPERATIONS", "HOROVOD_CONTROLLER")
    said = {name: environ.get(name, "").strip().lower() for name in names}
    for name, value in said.items():
        if value not in ("", "mpi", "gloo", "ccl"):
            raise WorldError(
                f"{name} must be mpi or gloo, got {value!r}. Correct it, or unset it."
            )
    operations, controller = said.values()
    if operations in ("mpi", "gloo"):
        return operations
    return "mpi" if controller == "mpi" else ""


def _require(name: str, known: tuple[str, ...], said_by: str) -> str:
    if name not in known:
        raise WorldError(
            f"{said_by} must be one of {', '.join(known)}, got {name!r}. "
            "Leave it out to let ronde choose."
        )
    return name
