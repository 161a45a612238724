"""Names of what can move the bytes, known without importing any of it."""

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


def _require(name: str, known: tuple[str, ...], said_by: str) -> str:
    if name not in known:
        raise WorldError(
            f"{said_by} must be one of {', '.join(known)}, got {name!r}. "
            "Leave it out to let ronde choose."
        )
    return name
