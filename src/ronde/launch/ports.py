"""The port for programs that make a store of torch's: bound early, and held."""

import errno
import os
import socket
from pathlib import Path

from ronde.addresses import family_of, source_towards
from ronde.errors import LaunchError, UsageError

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_FIRST_EPHEMERAL = 32768
_NUM_BELOW = 16384
_NUM_TRIES = 64


def hold_port(address: str, port: int = 0) -> socket.socket:
    """Bind a TCP port, not listening, so that nobody else gets it.

    The socket has ``SO_REUSEADDR``, so a program that binds the same port itself, with
    that option as servers do, still can, while no program that asks the kernel for any
    port gets this one. Another user's that wants this very one can have it too: torch
    offers no way to keep him off, and ``ronde.torch`` does not use it.

    A port chosen here lies below the kernel's ephemeral range, out of the way of
    outgoing connections.

    Args:
        address: Numeric IPv4 or IPv6 address to bind; never a wildcard.
        port: Port wanted, or 0 for any.

    Raises:
        UsageError: The port wanted is in use or may not be bound, or the address is
            none of this host's.
        LaunchError: No free port was found.
    """
    _require_own(address)
    if port:
        try:
            return _bind_wanted(address, port)
        except OSError as error:
            raise UsageError(
                f"--master-port must be a port that is free on {address}, got {port} "
                f"({os.strerror(error.errno or 0).lower()}). "
                "Choose another, or leave the option out."
            ) from None
    first_ephemeral = _first_ephemeral_port()
    lowest = max(1024, first_ephemeral - _NUM_BELOW)
    for _ in range(_NUM_TRIES):
        held = None
        if lowest < first_ephemeral:
            wish = int.from_bytes(os.urandom(4), "big") % (first_ephemeral - lowest)
            held = _bind_alone(address, lowest + wish)
        held = held or _bind_alone(address, 0)
        if held is not None:
            return held
    raise LaunchError(
        f"a free TCP port must exist on {address}, got none in {_NUM_TRIES} tries. "
        "Name one with --master-port."
    )


def _require_own(address: str) -> None:
    """Refuse names, and the wildcards, on which every network could connect."""
    if not address or source_towards(address) != address:
        raise UsageError(
            "address to meet at must be one address of this host, in numbers, got "
            f"{address!r}. Name one with addr= in the host file, or its network with "
            "--interface."
        )


def _first_ephemeral_port() -> int:
    try:
        return int(_RANGE_FILE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _DEFAULT_FIRST_EPHEMERAL


def _bind_alone(address: str, port: int) -> socket.socket | None:
    """Bind while nobody else has the port bound, then let rank 0 bind it too.

    With the option set before, two jobs could bind one port at the same time.
    """
    held = socket.socket(family_of(address))
    try:
        held.bind((address, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return held


def _bind_wanted(address: str, port: int) -> socket.socket:
    held = _bind_alone(address, port)
    if held is not None:
        return held
    # Perhaps only connections of an earlier job that are not forgotten yet.
    held = socket.socket(family_of(address))
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, port))
    except OSError:
        held.close()
        raise
    return held
