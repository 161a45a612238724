"""Whether a host is this machine."""

import os


def is_here(name: str) -> bool:
    """Say whether one of this machine's own names or addresses is meant.

    Asks the system's resolver for a name that is not obviously this machine's, which
    can take as long as that takes.

    Args:
        name: Host name or numeric address.
    """
    if name in ("localhost", "127.0.0.1", "::1", os.uname().nodename):
        return True
    # Imported where it is needed: a job on this machine starts without.
    import socket

    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    import socket

    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
