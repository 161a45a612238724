"""A host as the user names it, and whether it is this machine."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ronde.launch.frames import wait_for

SLOTS_OPEN = -1
"""Nobody said how many: the host's GPUs, else its cores where it is alone, else 1."""
SLOTS_GPUS = -2  # as many as the host has GPUs, and it must have one
SLOTS_CORES = -3  # as many as the host has cores
LIMIT_S = 6.0
"""How long all names may take: a question that is lost is asked again after 5 s."""
_READ_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Host:
    """A host that ranks may run on."""

    name: str  # host name or numeric address, as ssh is given it and as it is shown
    # ranks that it takes; 0 for a host that is kept out, ``SLOTS_OPEN`` where nobody
    # said, or another of the negative ones above
    slots: int = SLOTS_OPEN
    user: str = ""  # whom to log in as, or empty
    port: int = 0  # of its ssh, 0 for ssh's own choice
    address: str = ""  # numeric address that the ranks are to use, or empty
    # GPUs that its ranks may use, as ``CUDA_VISIBLE_DEVICES`` has them; empty for all
    gpus: tuple[str, ...] = ()
    # what the host file says of it besides
    labels: dict[str, str] = field(default_factory=dict[str, str])
    said_at: str = ""  # where it is named, for messages: ``hosts.txt line 3``


def is_here(host: Host, addresses: Sequence[str] | None = None) -> bool:
    """Say whether this machine is meant, as its user is here.

    It is not where another user is to log in, nor where a port of ssh is named: what
    answers there may be another machine, or a container.
    """
    if host.port or (host.user and host.user != _own_name()):
        return False
    return _is_own(host.name, addresses)


def _own_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return ""


def _is_own(name: str, addresses: Sequence[str] | None) -> bool:
    if name in ("localhost", "127.0.0.1", "::1", os.uname().nodename):
        return True
    if addresses is not None:
        return any(_can_bind(address) for address in addresses)
    # Imported where it is needed: a job on this machine starts without.
    import socket

    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(str(each[4][0])) for each in found)


def _can_bind(address: str) -> bool:
    import socket

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def look_up(names: Sequence[str], stop_fd: int) -> dict[str, tuple[str, ...]]:
    """Return addresses by name: none for one that does not exist.

    A name without an answer in time is not among them. The system's resolver cannot be
    called off: a process asks it, and is killed in the end.
    """
    ends_at = time.monotonic() + LIMIT_S
    asking = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("resolver.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    )
    with asking:
        if asking.stdin is None or asking.stdout is None:
            raise AssertionError("it was started with two pipes")
        # It reads all of them before it answers.
        with asking.stdin as words:
            words.write("\n".join(names).encode())
        said = _read_until(asking.stdout.fileno(), stop_fd, ends_at)
        asking.kill()
    lines = [line.decode().split() for line in said.split(b"\n")[:-1]]
    return {names[int(index)]: tuple(found) for index, *found in lines}


def _read_until(fd: int, stop_fd: int, ends_at: float) -> bytes:
    said = b""
    while (left_s := ends_at - time.monotonic()) > 0:
        ready = wait_for([fd, stop_fd], [], left_s)
        data = os.read(fd, _READ_BYTES) if ready == [fd] else b""
        if not data:
            break
        said += data
    return said
