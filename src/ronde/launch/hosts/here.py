"""Whether a host is this machine."""

import os
from collections.abc import Sequence

from ronde.launch.hosts.host import Host


def is_here(host: Host, addresses: Sequence[str] | None = None) -> bool:
    """Say whether this machine is meant, as its user is here.

    It is not where another user is to log in, nor where a port of ssh is named: what
    answers there may be another machine, or a container.

    Args:
        host: Which.
        addresses: Its own; None has the system's resolver asked for a name that is not
            obviously this machine's, which can take as long as that takes.
    """
    if host.port or (host.user and host.user != _own_name()):
        return False
    return _is_own(host.name, addresses)


def _own_name() -> str:
    """Return this user's login name, empty where there is none."""
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
