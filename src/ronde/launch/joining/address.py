"""Where the head listens, and where nodes look for it."""

import socket
from collections.abc import Sequence

from ronde.addresses import InterfaceAddress, family_of, is_loopback, read_interfaces
from ronde.errors import UsageError

_WILDCARDS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - to be warned of


def is_wildcard(address: str) -> bool:
    """Say whether listening there would be listening on all networks."""
    return address in _WILDCARDS


def with_port(address: str, port: int) -> str:
    """Return address and port as one types them."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def parse_endpoint(text: str, option: str) -> tuple[str, int]:
    """Read ``HOST:PORT``, ``[IPV6]:PORT`` or ``PORT``, whose host is empty.

    Raises:
        UsageError: It is none of these.
    """
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_number = port.isascii() and port.isdecimal() and int(port) <= 65535
    is_host = is_bracketed or ":" not in host
    if not is_number or not is_host or bool(colon) != bool(host.strip("[]")):
        raise UsageError(
            f"{option} must be HOST:PORT or [IPV6]:PORT, got {text!r}. "
            f"Type: {option} node1:29400"
        )
    return host.strip("[]"), int(port)


def choose_address(host: str, interface: str = "") -> str:
    """Return the one numeric address to listen on.

    Args:
        host: What the user named, or empty: then it is the address that this machine's
            own name stands for, or else the only one that it has.
        interface: Where not empty, the network interface that has the address.

    Raises:
        UsageError: There is no such address, or more than one.
    """
    if host:
        return _resolve(host)
    own = [a for a in read_interfaces() if interface in ("", a.interface)]
    named = [] if interface else _resolve_all(socket.gethostname())
    for each in own:
        if each.address in named:
            return each.address
    first_of_each = {each.interface: each.address for each in reversed(own)}
    if len(first_of_each) == 1:
        return first_of_each.popitem()[1]
    raise UsageError(
        f"--listen must say one address of this machine, got a port alone, and there "
        f"{_several(own)}. Type: --listen ADDRESS:PORT"
    )


def _several(own: Sequence[InterfaceAddress]) -> str:
    if not own:
        return "is none that others could reach"
    names = ", ".join(f"{each.address} ({each.interface})" for each in own)
    return f"are several: {names}"


def _resolve(host: str) -> str:
    found = _resolve_all(host)
    # A name may stand for its loopback address besides the real one.
    found = [a for a in found if not is_loopback(a)] or found
    if not found:
        raise UsageError(
            f"--listen must be an address of this machine, got {host!r}, which no "
            "address is known for. Type: --listen ADDRESS:PORT"
        )
    return found[0]


def _resolve_all(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def listen(address: str, port: int, backlog: int) -> socket.socket:
    """Return a non-blocking socket that listens there and nowhere else.

    Raises:
        UsageError: The address is not this machine's, or the port is not free.
    """
    try:
        sock = socket.create_server(
            (address, port), family=family_of(address), backlog=backlog
        )
    except OSError as error:
        raise UsageError(
            f"--listen must be an address of this machine with a free port, got "
            f"{with_port(address, port)}: {error.strerror or error}."
        ) from None
    sock.settimeout(0)
    return sock
