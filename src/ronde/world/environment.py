"""The one place that reads the process's environment to find its world."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ronde.errors import WorldError
from ronde.world.conflicts import resolve_conflicts
from ronde.world.engines import read_cpu_engine, require_algorithm, require_engine
from ronde.world.launcher_env import read_launcher_env
from ronde.world.reading import Place, Reading, integer
from ronde.world.value import Launcher, Meeting, RankInfo

_MEETING = ("MASTER_ADDR", "MASTER_PORT")


def read_rank_info(environ: Mapping[str, str] | None = None) -> RankInfo:
    """Read who this process is among how many from the launcher's variables.

    Understands ronde, torchrun, Horovod, Open MPI, PMI (MPICH), Slurm steps and
    ``RANK`` with ``WORLD_SIZE`` set by hand. Without any of them: a world of one.

    Variables that are left over, such as ``LOCAL_RANK=0`` alone, do not count: see
    ``Reading.is_stray``. The claim lists them.

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
    environ: Mapping[str, str], reading: Reading, meeting: Meeting | None
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


def _local_and_cross(place: Place) -> tuple[int, int, int | None, int | None]:
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


def _hosts(environ: Mapping[str, str], reading: Reading) -> tuple[str, ...]:
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


def _store(environ: Mapping[str, str], reading: Reading) -> str:
    is_ours = reading.launcher is Launcher.RONDE
    return environ.get("RONDE_STORE", "") if is_ours else ""


def _own(
    environ: Mapping[str, str], reading: Reading, meeting: Meeting | None
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
