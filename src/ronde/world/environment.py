"""Environment variables besides rank and size, and identities of this host."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ronde.errors import WorldError

Environ = Mapping[str, str]

_FIXED_ENGINES = ("shared_memory", "gloo", "nccl", "mpi", "scheduled", "hierarchical")
ENGINES = ("auto", *_FIXED_ENGINES)
ALGORITHMS = ("ring", "tree", "halving_doubling")
MAX_STATUS_BYTES = 8 << 10
"""The longest line with a rank's status; a socket accepts it whole or not at all."""
"""The schedules that the engine ``scheduled`` follows."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_CHANNEL = "RONDE_CHANNEL"
_RANK = "RONDE_RANK"  # of a rank's children: the rank's pid and identity


def own_or(environ: Environ | None) -> Environ:
    # Reading it here is this module's purpose; other modules are given a mapping.
    return os.environ if environ is None else environ  # noqa: TID251


def read_engine(environ: Environ) -> str:
    engine = environ.get("RONDE_ENGINE") or read_cpu_engine(environ) or "auto"
    return require_engine(engine, "RONDE_ENGINE")


def read_algorithm(environ: Environ) -> str:
    name = "RONDE_ALGORITHM"
    return require_algorithm(environ.get(name, ""), name)


def require_engine(name: str, source: str, known: tuple[str, ...] = ENGINES) -> str:
    if name not in known:
        raise WorldError(
            f"{source} must be one of {', '.join(known)}, got {name!r}. "
            "Leave it out to let ronde choose."
        )
    return name


def require_algorithm(name: str, source: str) -> str:
    return require_engine(name, source, ALGORITHMS) if name else ""


def read_cpu_engine(environ: Environ) -> str:
    """Return the engine that Horovod's variables name, or an empty text.

    ``HOROVOD_CPU_OPERATIONS`` has precedence over ``HOROVOD_CONTROLLER``. The value
    gloo of the latter only means that no MPI launcher is used.
    """
    engine = ""
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        return engine  # horovodrun itself wrote them
    for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"):
        value = environ.get(name, "").strip().lower()
        if value not in ("", "mpi", "gloo", "ccl"):
            cure = "Correct it, or unset it."
            raise WorldError(f"{name} must be mpi or gloo, got {value!r}. {cure}")
        if value == "mpi" or (value == "gloo" and name == "HOROVOD_CPU_OPERATIONS"):
            engine = value
    return engine


def read_malloc_tuning(environ: Environ | None = None) -> bool:
    """Return False if the user has tuned malloc, or has turned ronde's tuning off."""
    environ = own_or(environ)
    name = "RONDE_MALLOC_TUNING"
    text = environ.get(name) or "1"
    if text not in ("0", "1"):
        cure = "Correct it, or unset it."
        raise WorldError(f"{name} must be 0 or 1, got {text!r}. {cure}")
    is_tuned = any(name.startswith("MALLOC_") for name in environ)
    is_tuned |= "glibc.malloc." in environ.get("GLIBC_TUNABLES", "")
    return text == "1" and not is_tuned


def read_drift(environ: Environ | None = None) -> str:
    """Return the mode of drift checks: ``off``, ``warn`` or ``error``."""
    mode = own_or(environ).get("RONDE_DRIFT") or "warn"
    if mode not in ("off", "warn", "error"):
        raise WorldError(f"RONDE_DRIFT must be off, warn or error, got {mode!r}.")
    return mode


def read_config_directory(environ: Environ | None = None) -> Path:
    """Return the directory of the user's configuration, which may not exist."""
    return _user_directory("XDG_CONFIG_HOME", ".config", own_or(environ))


def _user_directory(name: str, default: str, environ: Environ) -> Path:
    base = environ.get(name, "")
    # Relative paths must be ignored. Source: XDG Base Directory Specification.
    if base.startswith("/"):
        return Path(base) / "ronde"
    home = Path(environ.get("HOME") or "/")  # a user without a name has no home
    with suppress(RuntimeError):
        home = home if environ.get("HOME") else Path.home()
    return home / default / "ronde"


def select_variables(
    names: Sequence[str], environ: Environ | None = None
) -> dict[str, str]:
    """Return the variables in ``names`` that are set; ``NCCL_*`` matches a prefix."""
    prefixes = tuple(name.removesuffix("*") for name in names if name.endswith("*"))
    variables = own_or(environ)
    found = {name for name in names if name in variables}
    if prefixes:  # reading all of them takes long
        found.update(name for name in variables if name.startswith(prefixes))
    return {name: variables[name] for name in sorted(found)}


def boot_identity() -> str:
    """Return an identifier of the running kernel, equal in all of its processes."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:  # a sandbox hides it
        return os.uname().nodename


def network_identity() -> str:
    """Return an identifier of the network namespace of this machine or container."""
    space = os.uname().nodename  # if a sandbox hides the namespace
    with suppress(OSError):
        space = str(_NETWORK.stat().st_ino)
    return f"{boot_identity()}/{space}"


class AgentChannel(NamedTuple):
    """A rank's end of the socket to its agent.

    Note [One channel a rank]
        ``RONDE_CHANNEL`` holds its descriptor, its inode, the worker id, and
        ``elastic`` or ``plain``. Each line begins with its kind: ``exit``, ``status``
        or ``member``; the agent ignores all others. Several processes may write to it,
        because the kernel accepts a line of less than 16 KiB whole or not at all.

        Stacks do not use the channel: a signal requests them, and they go to a file in
        memory (Note [Stacks] in ``launch.agent.diagnostics``). A rank that hangs in C,
        or holds the interpreter, cannot write to a socket.
    """

    fd: int  # -1 if it was closed
    worker: int
    is_elastic: bool


def read_channel() -> AgentChannel | None:
    """Return this process's channel; None if ``ronde run`` did not start it."""
    with suppress(ValueError):
        text, inode, worker, kind = own_or(None).get(_CHANNEL, "").split(":")
        fd = int(text)
        try:
            # A wrapper may have closed it, and the number may be another file's now.
            is_there = os.fstat(fd).st_ino == int(inode)
        except OSError:
            is_there = False
        return AgentChannel(fd if is_there else -1, int(worker), kind == "elastic")
    return None


def send_to_agent(line: str) -> bool:
    """Write a line of at most 8 KiB; return False if it cannot be written now."""
    channel, data = read_channel(), line.encode() + b"\n"
    if channel is None or channel.fd < 0:
        return False
    with suppress(OSError):
        sock = socket.socket(fileno=channel.fd)
        try:
            sock.settimeout(None)  # the program may have set a default
            return sock.send(data, socket.MSG_DONTWAIT) == len(data)
        finally:
            sock.detach()
    return False


def send_exit_notice() -> None:
    """Report to the launcher that this process has begun to exit.

    Its peers often end before it does, and would be mistaken for the cause.
    """
    send_to_agent(f"exit {time.monotonic()} {os.getpid()}")


def mark_rank(identity: str) -> None:
    """Mark this process as a rank in the environment of its children."""
    os.environ[_RANK] = f"{os.getpid()}:{identity}"  # noqa: TID251  as above


def unmark_rank() -> None:
    os.environ.pop(_RANK, None)  # noqa: TID251  as above


def is_child_of_rank(identity: str) -> bool:
    """Return True in a child process of the rank with this identity.

    A launcher that a rank has started gives its own ranks another identity.
    """
    pid, _, found = own_or(None).get(_RANK, "").partition(":")
    return found == identity and pid != str(os.getpid())


def read_is_joining() -> bool:
    """Return True if this process joins ranks that already train."""
    return bool(own_or(None).get("RONDE_JOINS"))
