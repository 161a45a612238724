"""Lists of hosts (``-H``) and host files, in four dialects at once.

Horovod's, Open MPI's, MPICH's and DeepSpeed's host files are read by one grammar::

    line  := [ hosts { key "=" value } ] [ "#" ... | "//" ... ]
    hosts := what ``-H`` takes: n1, n1:4, user@n[01-04,7], [fd00::2]:4
    key   := slots | count | cpu | max_slots | max-slots | port | addr | user | gpus
             | label.NAME
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ronde.errors import UsageError
from ronde.launch.hosts.host import SLOTS_OPEN, Host
from ronde.world.host_lists import BLANKS, expand, split_list

MAX_SLOTS = 1 << 16
# Nothing that a shell or ssh would read as more than a name, and no leading dash.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_BRACKETED = re.compile(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?", re.DOTALL)
_KEYS = {
    "slots": "slots",
    "count": "slots",
    "cpu": "slots",
    "max_slots": "max_slots",
    "max-slots": "max_slots",
    "port": "port",
    "addr": "addr",
    "user": "user",
    "gpus": "gpus",
}
_LABEL = "label."
_COMMENT = re.compile(r"(?:^|[ \t])(?:#|//)")
_HOSTS = re.compile(r"(?:[^ \t,\[]|\[[^\]]*\]?|[ \t]*,[ \t]*)+")
_PAIR = re.compile(r"[ \t]+([^ \t=]+)[ \t]*=[ \t]*([^ \t]*)")
_GPU = re.compile(r"[0-9]{1,4}|(?:GPU|MIG)-[A-Za-z0-9/-]+")


def parse_hosts(text: str, said_by: str = "-H") -> tuple[Host, ...]:
    """Read ``a:2,b:4``: hosts, each with its slots or without."""
    hosts = parse_words(text, said_by, said_by)
    return count_repeated(hosts)


def parse_words(text: str, said_by: str, said_at: str) -> list[Host]:
    """Read a list of hosts."""
    words = split_list(text, said_by)
    hosts = [host for word in words for host in _parse_word(word, said_by, said_at)]
    if not hosts:
        raise UsageError(
            f"{said_by}: hosts must be names such as a:2,b:4, got none. Name them, or "
            "leave the option out."
        )
    return hosts


def count_repeated(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Give a host that stands several times without slots that many."""
    times: Counter[str] = Counter()
    kept: dict[str, Host] = {}
    for host in hosts:
        first = kept.setdefault(host.name, host)
        times[host.name] += 1
        is_same = replace(host, said_at=first.said_at) == first
        if first is not host and not (is_same and host.slots == SLOTS_OPEN):
            places = dict.fromkeys((first.said_at, host.said_at))
            raise UsageError(
                f"{' and '.join(places)}: a host that has slots must be named once, "
                f"got {host.name} twice. Name it once, with all of its slots."
            )
    return tuple(
        host if times[name] == 1 else replace(host, slots=times[name])
        for name, host in kept.items()
    )


def check_name(name: str, said_by: str) -> str:
    """Return ``name``, which is a host's or a numeric address."""
    if not _NAME.fullmatch(name) and not (":" in name and is_address(name)):
        raise UsageError(
            f"{said_by}: a host must be a name or an address, got {name!r}. Type it as "
            "n1, n1:4, 10.0.0.1, fd00::1 or [fd00::1]:4."
        )
    return name


def check_user(user: str, said_by: str) -> str:
    """Return ``user``, which is a login name."""
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
    """Read a whole number."""
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


@dataclass(frozen=True, slots=True)
class _Value:
    key: str  # as it was written
    text: str
    said_by: str  # line and column of the value

    def number(self, lowest: int, highest: int) -> int:
        return parse_number(
            self.text, self.key, self.said_by, lowest=lowest, highest=highest
        )


def parse_hostfile(text: str, said_by: str) -> tuple[Host, ...]:
    """Read a host file; hosts stand in its order."""
    hosts: list[Host] = []
    # Not splitlines(): that counts lines that no editor shows.
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        comment = _COMMENT.search(line)
        kept = line[: comment.start()] if comment else line
        kept = kept.removesuffix("\r").rstrip(BLANKS)
        if kept.strip(BLANKS):
            hosts += _parse_line(kept, f"{said_by} line {number}")
    if not hosts:
        raise UsageError(
            f"{said_by} must hold a line such as n1 slots=4 for each host, got none. "
            "Write them, or leave the option out."
        )
    return count_repeated(hosts)


def _parse_line(line: str, said_at: str) -> list[Host]:
    start = len(line) - len(line.lstrip(BLANKS))
    named = _HOSTS.match(line, start)
    end = named.end() if named else start
    hosts = parse_words(line[start:end], f"{said_at}, column {start + 1}", said_at)
    values: dict[str, _Value] = {}
    while end < len(line):
        match = _PAIR.match(line, end)
        if match is None:
            rest = line[end:].strip(BLANKS)
            column = len(line) - len(rest) + 1
            raise UsageError(
                f"{said_at}, column {column}: after a host must stand key=value with "
                f"no blanks in the value, got {rest!r}. Type: slots=4, or # before a "
                "comment"
            )
        value = _Value(match[1], match[2], f"{said_at}, column {match.start(2) + 1}")
        key = _known_key(match[1], f"{said_at}, column {match.start(1) + 1}")
        if key in values:
            raise UsageError(
                f"{value.said_by}: {key} must be said once, got {values[key].key}="
                f"{values[key].text} and {value.key}={value.text}. Drop one."
            )
        values[key] = value
        end = match.end()
    return [_with_values(host, values, len(hosts)) for host in hosts]


def _known_key(key: str, said_by: str) -> str:
    if key in _KEYS:
        return _KEYS[key]
    if key.startswith(_LABEL) and key != _LABEL:
        return key
    likely = key.lower() if key.lower() in _KEYS else ""
    raise UsageError(
        f"{said_by}: a key must be one of {', '.join(_KEYS)} or label.NAME, got "
        f"{key!r}. {f'Type: {likely}=' if likely else 'Correct it or drop it.'}"
    )


def _with_values(host: Host, values: Mapping[str, _Value], num_hosts: int) -> Host:
    slots, user, address = _slots_of(host, values), host.user, ""
    gpus: tuple[str, ...] = ()
    if value := values.get("gpus"):
        gpus = tuple(value.text.split(","))
        if not all(map(_GPU.fullmatch, gpus)) or len(set(gpus)) < len(gpus):
            raise UsageError(
                f"{value.said_by}: gpus must be different numbers or UUIDs with commas "
                f"and no blanks between them, got {value.text!r}. Type: gpus=0,2"
            )
    if value := values.get("user"):
        if user:
            raise UsageError(
                f"{value.said_by}: user must be said once, got {user}@ and "
                f"user={value.text}. Drop one."
            )
        user = check_user(value.text, value.said_by)
    if value := values.get("addr"):
        address = value.text
        if not is_address(address) or num_hosts > 1:
            raise UsageError(
                f"{value.said_by}: addr must be the numeric address of one host, got "
                f"{address!r} for {num_hosts}. Type: n1 addr=10.0.0.1"
            )
    return replace(
        host,
        slots=len(gpus) if gpus and slots == SLOTS_OPEN else slots,
        user=user,
        port=values["port"].number(1, 65535) if "port" in values else 0,
        address=address,
        gpus=gpus,
        labels={
            key.removeprefix(_LABEL): value.text
            for key, value in values.items()
            if key.startswith(_LABEL)
        },
    )


def _slots_of(host: Host, values: Mapping[str, _Value]) -> int:
    """Return the slots; nobody is started beyond them, so a maximum only limits."""
    slots = host.slots
    if value := values.get("slots"):
        if slots != SLOTS_OPEN:
            raise UsageError(
                f"{value.said_by}: slots must be said once, got {host.name}:{slots} "
                f"and {value.key}={value.text}. Drop one."
            )
        slots = value.number(0, MAX_SLOTS)
    if value := values.get("max_slots"):
        most = value.number(0, MAX_SLOTS)
        if most < slots:
            raise UsageError(
                f"{value.said_by}: {value.key} must be at least the slots, got {most} "
                f"< {slots}. Drop one."
            )
        slots = most if slots == SLOTS_OPEN else slots
    return slots
