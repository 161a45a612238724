"""Lists of hosts and their slots, as Horovod's users write them."""

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ronde.errors import UsageError

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Host:
    """A host that ranks may run on.

    Attributes:
        name: Host name or address.
        slots: Ranks that it takes.
    """

    name: str
    slots: int


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read ``h1:2,h2:4``.

    Args:
        text: Hosts, each with its slots; a host without them has one.

    Raises:
        UsageError: It is no such list.
    """
    return tuple(_host(word, ":", "-H", "h1:2,h2:4") for word in text.split(","))


def parse_hostfile(lines: Iterable[str], said_by: str) -> tuple[Host, ...]:
    """Read lines such as ``h1 slots=2``; what follows ``#`` is a comment.

    Args:
        lines: The file's.
        said_by: Its name.

    Raises:
        UsageError: A line is not of that form, or there is none.
    """
    kept = [line for line in (one.partition("#")[0].strip() for one in lines) if line]
    if not kept:
        raise UsageError(
            f"{said_by} must hold a line such as h1 slots=2 for each host, got none. "
            "Write them, or leave the option out."
        )
    return tuple(
        _host(line, r"\s+slots\s*=\s*", said_by, "h1 slots=2") for line in kept
    )


def parse_discovered(text: str, slots: int, said_by: str) -> tuple[Host, ...]:
    """Read what a discovery script prints: ``h1`` or ``h1:2`` a line.

    Args:
        text: Its output.
        slots: Of a host that comes without.
        said_by: The script's name.

    Raises:
        UsageError: A line is not of that form.
    """
    kept = [line.strip() for line in text.splitlines() if line.strip()]
    return tuple(_host(line, ":", said_by, "h1:2", slots) for line in kept)


def count_slots_here(hosts: Sequence[Host]) -> int:
    """Return the slots of all hosts, which must all be this machine.

    Raises:
        UsageError: One of them is another machine.
    """
    for host in hosts:
        if not _is_here(host.name):
            raise UsageError(
                f"hosts must be this machine ({socket.gethostname()}, localhost), got "
                f"{host.name}. This version of ronde starts ranks on one machine; "
                "name it, or leave the hosts out."
            )
    return sum(host.slots for host in hosts)


def require_slots(num_ranks: int, slots: int) -> int:
    """Return ``num_ranks``.

    Raises:
        UsageError: There are fewer slots than ranks; Horovod's words come first.
    """
    if num_ranks > slots:
        raise UsageError(
            f"Requested more processes ({num_ranks}) than there are available slots "
            f"({slots})\nGive the hosts more slots, or start fewer ranks."
        )
    return num_ranks


def _host(text: str, between: str, said_by: str, form: str, slots: int = 1) -> Host:
    match = re.fullmatch(rf"([^\s,=:]+)(?:{between}([0-9]{{1,6}}))?", text.strip())
    if match is None or match[2] == "0":
        raise UsageError(
            f"{said_by} must name hosts as {form}, got {text.strip()!r}. Correct it."
        )
    return Host(match[1], int(match[2] or slots))


def _is_here(name: str) -> bool:
    """Say whether one of this machine's own addresses is meant."""
    if name in ("localhost", socket.gethostname(), _LOOPBACK):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
