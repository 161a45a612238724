"""The one place that reads the process's environment to find its world."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ronde.errors import WorldError
from ronde.world.launcher_env import (
    KnownPlace,
    LauncherReading,
    integer,
    read_launcher_env,
)
from ronde.world.rank_info import Launcher, Meeting, RankInfo


def select_variables(
    names: Sequence[str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables that are set, sorted, out of those that are asked for.

    Args:
        names: Names; one that ends in ``*`` stands for all that begin so.
        environ: The variables; None reads this process's own.
    """
    if environ is None:
        # Reading it here is this module's purpose; everybody else is given a mapping.
        environ = os.environ  # noqa: TID251
    prefixes = tuple(name.removesuffix("*") for name in names if name.endswith("*"))
    return {
        name: environ[name]
        for name in sorted(environ)
        if name in names or name.startswith(prefixes)
    }


_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def boot_identity() -> str:
    """Return what is the same for all processes of one boot of one kernel.

    Some sandboxes do not show it; there it is the host's name.
    """
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename


def network_identity() -> str:
    """Return what is the same for two processes on one machine, and else differs.

    A container with a network of its own counts as a machine: it has own addresses.
    """
    try:
        space = str(_NETWORK.stat().st_ino)
    except OSError:
        # As above; of such a sandbox the whole is one.
        space = os.uname().nodename
    return f"{boot_identity()}/{space}"


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


def resolve_conflicts(readings: list[LauncherReading]) -> LauncherReading:
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


def _is_explained(other: LauncherReading, chosen: LauncherReading) -> bool:
    if other.agrees_with(chosen):
        return True
    return other.is_complete and chosen.is_inside(other)


def _with_local_of(
    reading: LauncherReading, slurm: LauncherReading | None
) -> LauncherReading:
    """Take the local numbers from Slurm where only Slurm knows them.

    So it is with ``srun --mpi=pmi2`` and with ``RANK=$SLURM_PROCID`` by hand.
    """
    place = reading.place
    if slurm is None or not slurm.is_complete or not slurm.agrees_with(reading):
        return reading
    if place.local_rank is not None or place.local_size is not None:
        return reading
    return replace(reading, place=slurm.place)


def _partial(partial: LauncherReading, readings: list[LauncherReading]) -> WorldError:
    everything = ", ".join(name for reading in readings for name in reading.said)
    missing = " and ".join(partial.missing)
    return WorldError(
        f"variables of the world must be complete, got {everything} "
        f"and no {missing}. Set {missing}, start the program with a launcher, or unset "
        f"them all to run a world of one."
    )


def _contradiction(readings: list[LauncherReading]) -> WorldError:
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


_MEETING = ("MASTER_ADDR", "MASTER_PORT")


def read_rank_info(environ: Mapping[str, str] | None = None) -> RankInfo:
    """Read who this process is among how many from the launcher's variables.

    Understands ronde, torchrun, Horovod, Open MPI, PMI (MPICH), Slurm steps and
    ``RANK`` with ``WORLD_SIZE`` set by hand. Without any of them: a world of one.

    Variables that are left over, such as ``LOCAL_RANK=0`` alone, do not count: see
    ``LauncherReading.is_stray``. The claim lists them.

    What a launcher leaves open stays open: ``cross_rank`` and ``cross_size`` are None
    then, on all ranks alike. Where by hand nothing is said of this host,
    ``local_rank`` is 0 and ``local_size`` the least that fits; exchange hosts
    (``World.from_hosts``) before you rely on them.

    ``RONDE_ENGINE`` and ``RONDE_ALGORITHM`` say, under any launcher, how the ranks are
    to exchange tensors.

    Args:
        environ: The variables; None reads this process's own.

    Raises:
        WorldError: The variables are partial, no numbers, or contradict each other.
            They are never taken for a world of one. Or they name no engine.
    """
    if environ is None:
        # Reading it here is this module's purpose; everybody else is given a mapping.
        environ = os.environ  # noqa: TID251
    found = read_launcher_env(environ)
    readings = [reading for reading in found if not reading.is_stray]
    meeting = [f"{name}={environ[name]}" for name in _MEETING if name in environ]
    if not readings and meeting:
        # Only several ranks have to meet: a launcher has set too little.
        readings = found
    stray = [said for each in found if each not in readings for said in each.said]
    if readings:
        claim = _claim(environ, resolve_conflicts(readings), _read_meeting(environ))
    else:
        claim = RankInfo(Launcher.NONE, 0, 1, 0, 1, 0, 1)
        stray += meeting if len(meeting) < len(_MEETING) else []
    return replace(
        claim,
        stray=tuple(stray),
        engine=read_engine(environ),
        algorithm=read_algorithm(environ),
    )


def read_engine(environ: Mapping[str, str]) -> str:
    """Return the engine that ``RONDE_ENGINE`` asks for, "auto" where nobody does.

    Where it is not set, Horovod's variables count: see ``read_cpu_engine``.

    Raises:
        WorldError: No engine is called so.
    """
    asked = environ.get("RONDE_ENGINE") or read_cpu_engine(environ)
    return require_engine(asked or "auto", "RONDE_ENGINE")


def read_algorithm(environ: Mapping[str, str]) -> str:
    """Return the schedule that ``RONDE_ALGORITHM`` asks for, or empty.

    Raises:
        WorldError: No schedule is called so.
    """
    return require_algorithm(environ.get("RONDE_ALGORITHM", ""), "RONDE_ALGORITHM")


def read_malloc_tuning(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether C's allocator is to be tuned.

    It is not where ``RONDE_MALLOC_TUNING`` is 0, and where the user has tuned it: with
    any variable or tunable of glibc's allocator.

    Args:
        environ: The variables; None reads this process's own.

    Raises:
        WorldError: ``RONDE_MALLOC_TUNING`` is neither 0 nor 1.
    """
    if environ is None:
        environ = os.environ  # noqa: TID251  as above
    text = environ.get("RONDE_MALLOC_TUNING", "") or "1"
    if text not in ("0", "1"):
        raise WorldError(
            f"RONDE_MALLOC_TUNING must be 0 or 1, got {text!r}. Correct it, or unset "
            "it."
        )
    is_tuned = any(name.startswith("MALLOC_") for name in environ)
    is_tuned |= "glibc.malloc." in environ.get("GLIBC_TUNABLES", "")
    return text == "1" and not is_tuned


def read_cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Return where what can be measured anew is kept; it may not exist yet.

    Args:
        environ: The variables; None reads this process's own.
    """
    return _user_directory("XDG_CACHE_HOME", ".cache", environ)


def read_config_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Return where what the user keeps is; it may not exist yet.

    Args:
        environ: The variables; None reads this process's own.
    """
    return _user_directory("XDG_CONFIG_HOME", ".config", environ)


def _user_directory(name: str, default: str, environ: Mapping[str, str] | None) -> Path:
    """Return ronde's directory in the one that a variable names, or in the home's."""
    if environ is None:
        environ = os.environ  # noqa: TID251  as above
    base = environ.get(name, "")
    # A relative path is to be ignored. Source: XDG Base Directory Specification.
    parent = Path(base) if base.startswith("/") else _home(environ) / default
    return parent / "ronde"


def _home(environ: Mapping[str, str]) -> Path:
    if environ.get("HOME"):
        return Path(environ["HOME"])
    try:
        return Path.home()
    except RuntimeError:  # a user without a name, as containers have them
        return Path("/")


def _claim(
    environ: Mapping[str, str], reading: LauncherReading, meeting: Meeting | None
) -> RankInfo:
    place = reading.place
    if place.rank is None or place.size is None:
        raise AssertionError("settle() returned a partial reading")
    local_rank, local_size, cross_rank, cross_size = _local_and_cross(place)
    return RankInfo(
        launcher=reading.launcher,
        rank=place.rank,
        size=place.size,
        local_rank=local_rank,
        local_size=local_size,
        cross_rank=cross_rank,
        cross_size=cross_size,
        meeting=_own(environ, reading, meeting),
        store=_store(environ, reading),
        job_id=reading.job_id,
        hosts=_hosts(environ, reading),
    )


def _local_and_cross(place: KnownPlace) -> tuple[int, int, int | None, int | None]:
    """Fill in what follows from the rest, and the least that fits where nothing does.

    Whether ``cross_rank`` is known must come out alike on all ranks: where it is not,
    they exchange hosts, together.
    """
    if place.rank is not None and place.size in (place.local_size, 1):
        local_rank = place.rank if place.local_rank is None else place.local_rank
        return local_rank, place.size or 1, 0, 1
    if place.local_rank is None or place.local_size is None:
        local_rank = place.local_rank or 0
        return local_rank, place.local_size or local_rank + 1, None, None
    return place.local_rank, place.local_size, place.cross_rank, place.cross_size


def _hosts(environ: Mapping[str, str], reading: LauncherReading) -> tuple[str, ...]:
    host = environ.get("RONDE_HOST")
    is_only = reading.launcher is Launcher.RONDE and reading.place.num_nodes == 1
    return (host,) if host and is_only else ()


def _read_meeting(environ: Mapping[str, str]) -> Meeting | None:
    address, port_text = (environ.get(name) for name in _MEETING)
    if address is None and port_text is None:
        return None
    if not address or not port_text:
        here, gone = _MEETING[:: 1 if address else -1]
        raise WorldError(
            f"MASTER_ADDR and MASTER_PORT must both be set or neither, got "
            f"{here}={environ.get(here, '')} and no {gone}. "
            f"Set {gone}, or unset {here}."
        )
    port = integer(environ, "MASTER_PORT") or 0
    if not 0 < port < 65536:
        raise WorldError(
            f"MASTER_PORT must be in 1..65535, got {port_text}. "
            f"Give a port that is free on {address}."
        )
    return Meeting(address, port)


def _store(environ: Mapping[str, str], reading: LauncherReading) -> str:
    is_ours = reading.launcher is Launcher.RONDE
    return environ.get("RONDE_STORE", "") if is_ours else ""


def _own(
    environ: Mapping[str, str], reading: LauncherReading, meeting: Meeting | None
) -> Meeting | None:
    """Add to the meeting what only its own launcher can say of it."""
    if meeting is None:
        return None
    if reading.launcher is Launcher.RONDE:
        return Meeting(
            meeting.address,
            meeting.port,
            attempt=integer(environ, "RONDE_EPOCH") or 0,
        )
    if reading.launcher is Launcher.TORCHRUN:
        return Meeting(
            meeting.address,
            meeting.port,
            is_hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=integer(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
        )
    return meeting


_PIPE = "RONDE_EXIT_PIPE"
"""The agent's pipe, as this rank has it: descriptor, inode and rank, with colons."""


def send_exit_notice() -> None:
    """Write rank and time to the agent's pipe, where there is one."""
    fd, _, rest = select_variables([_PIPE]).get(_PIPE, "").partition(":")
    inode, _, rank = rest.partition(":")
    with suppress(OSError, ValueError):
        # A wrapper may have closed the pipe; the number may be another file's since.
        if str(os.fstat(int(fd)).st_ino) == inode:
            notice = f"{int(rank)} {time.monotonic()} {os.getpid()}\n"
            os.write(int(fd), notice.encode())
