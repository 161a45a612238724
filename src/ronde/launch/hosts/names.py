"""One word for one host or several: ``user@n[1-3]:2``, ``[fd00::2]:4``."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from ronde.errors import UsageError
from ronde.launch.hosts.host import SLOTS_OPEN, Host
from ronde.world.host_lists import expand, split_list

MAX_SLOTS = 1 << 16

# Nothing that a shell or ssh would read as more than a name, and no leading dash.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_BRACKETED = re.compile(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?", re.DOTALL)


def parse_hosts(text: str, said_by: str = "-H") -> tuple[Host, ...]:
    """Read ``a:2,b:4``: hosts, each with its slots or without.

    A host that stands several times, always without slots, has that many.

    Args:
        text: What was given.
        said_by: By which option.

    Raises:
        UsageError: It is no such list.
    """
    hosts = parse_words(text, said_by, said_by)
    return count_repeated(hosts)


def parse_words(text: str, said_by: str, said_at: str) -> list[Host]:
    """Read a list of hosts.

    Args:
        text: ``a:2,user@b[1-3]``.
        said_by: Where it stands, for messages about this list.
        said_at: Where its hosts are named, for later messages about them.

    Raises:
        UsageError: It is no such list, or it is empty.
    """
    words = split_list(text, said_by)
    hosts = [host for word in words for host in _parse_word(word, said_by, said_at)]
    if not hosts:
        raise UsageError(
            f"{said_by}: hosts must be names such as a:2,b:4, got none. Name them, or "
            "leave the option out."
        )
    return hosts


def count_repeated(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Give a host that stands several times without slots that many.

    Raises:
        UsageError: A host stands several times and says more than its name.
    """
    times: Counter[str] = Counter()
    kept: dict[str, Host] = {}
    for host in hosts:
        first = kept.setdefault(host.name, host)
        times[host.name] += 1
        if first is not host and not _is_repeated(first, host):
            places = dict.fromkeys((first.said_at, host.said_at))
            raise UsageError(
                f"{' and '.join(places)}: a host that has slots must be named once, "
                f"got {host.name} twice. Name it once, with all of its slots."
            )
    return tuple(
        host if times[name] == 1 else replace(host, slots=times[name])
        for name, host in kept.items()
    )


def _is_repeated(first: Host, host: Host) -> bool:
    is_same = replace(host, said_at=first.said_at) == first
    return is_same and host.slots == SLOTS_OPEN


def check_name(name: str, said_by: str) -> str:
    """Return ``name``, which is a host's or a numeric address.

    Raises:
        UsageError: It is not, or ssh could take it for an option.
    """
    if not _NAME.fullmatch(name) and not (":" in name and is_address(name)):
        raise UsageError(
            f"{said_by}: a host must be a name or an address, got {name!r}. Type it as "
            "n1, n1:4, 10.0.0.1, fd00::1 or [fd00::1]:4."
        )
    return name


def check_user(user: str, said_by: str) -> str:
    """Return ``user``, which is a login name.

    Raises:
        UsageError: It is not.
    """
    if not _USER.fullmatch(user):
        raise UsageError(
            f"{said_by}: a user must be a login name, got {user!r}. Type: user@n1"
        )
    return user


def is_address(text: str) -> bool:
    """Say whether it is a numeric IPv4 or IPv6 address, with or without a zone."""
    import socket

    address, has_zone, zone = text.partition("%")
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    try:
        socket.inet_pton(family, address)
    except (OSError, ValueError):
        return False
    return not has_zone or (":" in address and _NAME.fullmatch(zone) is not None)


def parse_number(
    text: str, name: str, said_by: str, *, lowest: int = 0, highest: int
) -> int:
    """Read a whole number.

    Args:
        text: Its digits.
        name: What it is.
        said_by: Where it stands.
        lowest: That it may be.
        highest: That it may be.

    Raises:
        UsageError: It is none.
    """
    is_number = re.fullmatch(r"[0-9]{1,9}", text)
    if not is_number or not lowest <= int(text) <= highest:
        raise UsageError(
            f"{said_by}: {name} must be a whole number from {lowest} to {highest}, got "
            f"{text!r}. Correct it."
        )
    return int(text)


def _parse_word(word: str, said_by: str, said_at: str) -> list[Host]:
    user, has_user, rest = word.rpartition("@")
    if has_user:
        check_user(user, said_by)
    name, slots = _split_slots(rest, said_by)
    count = SLOTS_OPEN
    if slots is not None:
        count = parse_number(slots, f"slots of {name}", said_by, highest=MAX_SLOTS)
    names = [name] if ":" in name and "[" not in name else expand(name, said_by)
    return [
        Host(check_name(one, said_by), count, user=user, said_at=said_at)
        for one in names
    ]


def _split_slots(text: str, said_by: str) -> tuple[str, str | None]:
    """Take ``:4`` off the end, which an address with colons has after brackets only."""
    if bracketed := _BRACKETED.fullmatch(text):
        return bracketed[1], bracketed[2]
    colon = text.rfind(":")
    if colon <= text.rfind("]"):
        return text, None
    if text.count(":") == 1:
        return text[:colon], text[colon + 1 :]
    if text[colon - 1] == "]":
        raise UsageError(
            f"{said_by}: slots of a list of IPv6 addresses must stand in a host file, "
            f"got {text!r}. Write there: {text[:colon]} slots={text[colon + 1 :]}"
        )
    return text, None
