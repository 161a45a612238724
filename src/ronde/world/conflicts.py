"""Which launcher counts when several speak: agreement, nesting, or a refusal."""

from dataclasses import replace

from ronde.errors import WorldError
from ronde.world.reading import Reading
from ronde.world.value import Launcher


def resolve_conflicts(readings: list[Reading]) -> Reading:
    """Choose the one reading that all others agree with or explain.

    Slurm's variables under another launcher tell of that launcher's daemon, not of the
    rank, and do not count. One launcher a node, started by another (torchrun under
    ``mpirun``), is the inner one's world. All else that differs is refused.

    Args:
        readings: At least one, the one that counts most first.

    Raises:
        WorldError: All are partial, or two contradict each other.
    """
    slurm = next((r for r in readings if r.launcher is Launcher.SLURM), None)
    if any(reading.is_above_slurm for reading in readings):
        readings = [r for r in readings if r is not slurm]
    complete = [reading for reading in readings if reading.is_complete]
    for reading in complete:
        if all(_is_explained(other, reading) for other in readings):
            return _with_local_of(reading, slurm)
    for reading in readings:
        if not reading.is_complete:
            raise _partial(reading, readings)
    raise _contradiction(readings)


def _is_explained(other: Reading, chosen: Reading) -> bool:
    if other.agrees_with(chosen):
        return True
    return other.is_complete and chosen.is_inside(other)


def _with_local_of(reading: Reading, slurm: Reading | None) -> Reading:
    """Take the local numbers from Slurm where only Slurm knows them.

    So it is with ``srun --mpi=pmi2`` and with ``RANK=$SLURM_PROCID`` by hand.
    """
    place = reading.place
    if slurm is None or not slurm.is_complete or not slurm.agrees_with(reading):
        return reading
    if place.local_rank is not None or place.local_size is not None:
        return reading
    return replace(reading, place=slurm.place)


def _partial(partial: Reading, readings: list[Reading]) -> WorldError:
    everything = ", ".join(name for reading in readings for name in reading.said)
    missing = " and ".join(partial.missing)
    return WorldError(
        f"variables of the world must be complete, got {everything} "
        f"and no {missing}. Set {missing}, start the program with a launcher, or unset "
        f"them all to run a world of one."
    )


def _contradiction(readings: list[Reading]) -> WorldError:
    first = readings[0]
    others = [r for r in readings if not r.agrees_with(first)]
    claims = " but ".join(
        f"{r.launcher.value} says {r.place.rank} of {r.place.size} "
        f"({', '.join(r.said)})"
        for r in (first, *others)
    )
    unset = " or ".join(
        " ".join(name.partition("=")[0] for name in r.said) for r in (first, *others)
    )
    return WorldError(
        f"rank and size must be the same in every launcher's variables: {claims}. "
        f"Start the program with one launcher, or unset {unset}."
    )
