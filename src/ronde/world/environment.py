"""The one place that reads the process's environment to find its world."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ronde.errors import WorldError
from ronde.world.launcher_env import (
    Launcher,
    LauncherReading,
    Meeting,
    RankInfo,
    integer,
    read_launcher_env,
)

Environ = Mapping[str, str]

_FIXED_ENGINES = ("shared_memory", "gloo", "nccl", "mpi", "scheduled", "hierarchical")
ENGINES = ("auto", *_FIXED_ENGINES)
ALGORITHMS = ("ring", "tree", "halving_doubling")
"""The schedules that the engine ``scheduled`` follows."""
_MEETING = ("MASTER_ADDR", "MASTER_PORT")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_EXIT_PIPE = "RONDE_EXIT_PIPE"  # of the agent: descriptor, inode and rank, with colons


def _own(environ: Environ | None) -> Environ:
    # Reading it here is this module's purpose; everybody else is given a mapping.
    return os.environ if environ is None else environ  # noqa: TID251


def read_rank_info(environ: Environ | None = None) -> RankInfo:
    """Read who this process is among how many from the launcher's variables.

    Without any of them: a world of one. Variables that are left over, such as
    ``LOCAL_RANK=0`` alone, are ignored and listed in the result.

    Where nothing describes this host, ``local_rank`` is 0 and ``local_size`` the least
    that fits; exchange hosts (``World.from_hosts``) before you rely on them.

    Raises:
        WorldError: The variables are partial, no numbers, contradict each other, or
            name no engine. They are never taken for a world of one.
    """
    environ = _own(environ)
    found = read_launcher_env(environ)
    readings = [reading for reading in found if not reading.is_stray]
    meeting = [f"{name}={environ[name]}" for name in _MEETING if name in environ]
    if not readings and meeting:
        # Only several ranks have to meet: a launcher has set too little.
        readings = found
    stray = [text for each in found if each not in readings for text in each.found]
    if readings:
        rank_info = _rank_info(environ, _resolve_conflicts(readings))
    else:
        rank_info = RankInfo(Launcher.NONE, 0, 1, 0, 1, 0, 1)
        stray += meeting if len(meeting) < len(_MEETING) else []
    engine, name = read_engine(environ), "RONDE_ALGORITHM"
    algorithm = require_algorithm(environ.get(name, ""), name)
    return replace(rank_info, stray=tuple(stray), engine=engine, algorithm=algorithm)


def read_engine(environ: Environ) -> str:
    """Return the engine that ``RONDE_ENGINE`` names, else Horovod's variables."""
    engine = environ.get("RONDE_ENGINE") or read_cpu_engine(environ) or "auto"
    return require_engine(engine, "RONDE_ENGINE")


def require_engine(name: str, source: str, known: tuple[str, ...] = ENGINES) -> str:
    """Return ``name``, from an option or variable, if an engine is called so."""
    if name not in known:
        raise WorldError(
            f"{source} must be one of {', '.join(known)}, got {name!r}. "
            "Leave it out to let ronde choose."
        )
    return name


def require_algorithm(name: str, source: str) -> str:
    return require_engine(name, source, ALGORITHMS) if name else ""


def read_cpu_engine(environ: Environ) -> str:
    """Return the engine that Horovod's variables name; empty where none does.

    ``HOROVOD_CPU_OPERATIONS`` counts before ``HOROVOD_CONTROLLER``, of which gloo only
    means no MPI launcher.
    """
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        return ""  # horovodrun itself wrote them
    values: list[str] = []
    for name in ("HOROVOD_CPU_OPERATIONS", "HOROVOD_CONTROLLER"):
        values.append(environ.get(name, "").strip().lower())
        if values[-1] not in ("", "mpi", "gloo", "ccl"):
            raise WorldError(
                f"{name} must be mpi or gloo, got {values[-1]!r}. Correct it, or unset "
                "it."
            )
    if values[0] in ("mpi", "gloo"):
        return values[0]
    return "mpi" if values[1] == "mpi" else ""


def read_malloc_tuning(environ: Environ | None = None) -> bool:
    """Return whether C's allocator is to be tuned, which the user has not done."""
    environ = _own(environ)
    text = environ.get("RONDE_MALLOC_TUNING", "") or "1"
    if text not in ("0", "1"):
        raise WorldError(
            f"RONDE_MALLOC_TUNING must be 0 or 1, got {text!r}. Correct it, or unset "
            "it."
        )
    is_tuned = any(name.startswith("MALLOC_") for name in environ)
    is_tuned |= "glibc.malloc." in environ.get("GLIBC_TUNABLES", "")
    return text == "1" and not is_tuned


def read_cache_directory(environ: Environ | None = None) -> Path:
    """Return where what can be measured anew is kept; it may not exist yet."""
    return _user_directory("XDG_CACHE_HOME", ".cache", _own(environ))


def read_config_directory(environ: Environ | None = None) -> Path:
    """Return where what the user keeps is; it may not exist yet."""
    return _user_directory("XDG_CONFIG_HOME", ".config", _own(environ))


def _user_directory(name: str, default: str, environ: Environ) -> Path:
    base = environ.get(name, "")
    # A relative path is to be ignored. Source: XDG Base Directory Specification.
    if base.startswith("/"):
        return Path(base) / "ronde"
    home = Path(environ.get("HOME") or "/")  # users without a name have none
    with suppress(RuntimeError):
        home = home if environ.get("HOME") else Path.home()
    return home / default / "ronde"


def select_variables(
    names: Sequence[str], environ: Environ | None = None
) -> dict[str, str]:
    """Return the variables set, sorted, out of ``names``; ``NCCL_*`` stands for all."""
    environ = _own(environ)
    prefixes = tuple(name.removesuffix("*") for name in names if name.endswith("*"))
    return {
        name: environ[name]
        for name in sorted(environ)
        if name in names or name.startswith(prefixes)
    }


def boot_identity() -> str:
    """Return what is the same for all processes of one boot of one kernel."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:  # a sandbox hides it
        return os.uname().nodename


def network_identity() -> str:
    """Return what names this machine, or a container with a network of its own."""
    space = os.uname().nodename  # of such a sandbox the whole is one
    with suppress(OSError):
        space = str(_NETWORK.stat().st_ino)
    return f"{boot_identity()}/{space}"


def send_exit_notice() -> None:
    """Report to the launcher that this process has begun to exit.

    Ranks that lose it often end before it does, and would be taken for the cause.
    """
    fd, _, rest = _own(None).get(_EXIT_PIPE, "").partition(":")
    inode, _, rank = rest.partition(":")
    with suppress(OSError, ValueError):
        # A wrapper may have closed the pipe; the number may be another file's since.
        if str(os.fstat(int(fd)).st_ino) == inode:
            notice = f"{int(rank)} {time.monotonic()} {os.getpid()}\n"
            os.write(int(fd), notice.encode())


def _resolve_conflicts(readings: list[LauncherReading]) -> LauncherReading:
    """Choose the first reading that all others agree with or explain.

    Slurm's variables under another launcher describe that launcher's daemon, not the
    rank. One launcher a node, started by another (torchrun under ``mpirun``), is the
    inner one's world. All else that differs is refused.
    """
    slurm = next((r for r in readings if r.launcher is Launcher.SLURM), None)
    if any(reading.is_above_slurm for reading in readings):
        readings = [r for r in readings if r is not slurm]
    for reading in readings:
        if not reading.missing and all(
            other.agrees_with(reading)
            or (not other.missing and reading.is_inside(other))
            for other in readings
        ):
            is_local = {"local_rank", "local_size"} & reading.place.keys()
            if is_local or not slurm or slurm.missing or not slurm.agrees_with(reading):
                return reading
            # Only Slurm knows the local numbers: with ``srun --mpi=pmi2``, and with
            # RANK=$SLURM_PROCID by hand.
            return reading._replace(place=slurm.place)
    for reading in readings:
        if reading.missing:
            everything = ", ".join(text for each in readings for text in each.found)
            missing = " and ".join(reading.missing)
            raise WorldError(
                f"variables of the world must be complete, got {everything} "
                f"and no {missing}. Set {missing}, start the program with a launcher, "
                "or unset them all to run a world of one."
            )
    views = [readings[0], *(r for r in readings if not r.agrees_with(readings[0]))]
    shown = " but ".join(
        f"{r.launcher.value} has {r.place['rank']} of {r.place['size']} "
        f"({', '.join(r.found)})"
        for r in views
    )
    unset = (" ".join(text.partition("=")[0] for text in r.found) for r in views)
    raise WorldError(
        f"rank and size must be the same in every launcher's variables: {shown}. "
        f"Start the program with one launcher, or unset {' or '.join(unset)}."
    )


def _rank_info(environ: Environ, reading: LauncherReading) -> RankInfo:
    """Fill in what follows from the rest, and the least that fits where nothing does.

    Whether ``cross_rank`` is known must come out alike on all ranks.
    """
    place, is_ours = reading.place, reading.launcher is Launcher.RONDE
    rank, size = place["rank"], place["size"]
    local_rank, local_size = place.get("local_rank"), place.get("local_size")
    cross = (place.get("cross_rank"), place.get("cross_size"))
    if size in (local_size, 1):
        local_rank = rank if local_rank is None else local_rank
        local_size, cross = size, (0, 1)
    elif local_rank is None or local_size is None:
        local_rank = local_rank or 0
        local_size, cross = local_size or local_rank + 1, (None, None)
    return RankInfo(
        *(reading.launcher, rank, size, local_rank, local_size, *cross),
        meeting=_read_meeting(environ, reading.launcher),
        store=environ.get("RONDE_STORE", "") if is_ours else "",
        job_id=reading.job_id,
    )


def _read_meeting(environ: Environ, launcher: Launcher) -> Meeting | None:
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
    is_torchrun, attempt = launcher is Launcher.TORCHRUN, 0
    if is_torchrun or launcher is Launcher.RONDE:
        name = "TORCHELASTIC_RESTART_COUNT" if is_torchrun else "RONDE_EPOCH"
        attempt = integer(environ, name) or 0
    is_hosted = is_torchrun and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Meeting(address, port, is_hosted, attempt)
