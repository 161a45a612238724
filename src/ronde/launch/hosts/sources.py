"""Hosts from ``-H``, host files and Slurm's allocation.

Horovod's, Open MPI's, MPICH's and DeepSpeed's host files are read by one grammar::

    line  := [ hosts { key "=" value } ] [ "#" ... | "//" ... ]
    hosts := as in ``-H``: n1, n1:4, user@n[01-04,7], [fd00::2]:4
    key   := slots | count | cpu | max_slots | max-slots | port | addr | user | gpus
"""

import os
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ronde.addresses import family_of
from ronde.arguments import read_number
from ronde.errors import UsageError, WorldError
from ronde.launch.host import MAX_SLOTS, SLOTS_OPEN, Host
from ronde.units import counted, grouped
from ronde.world.host_lists import BLANKS, expand, expand_list, split_list
from ronde.world.launcher_env import parse_tasks_per_node

# No character that is special to a shell or ssh, and no leading dash.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_BRACKETED = re.compile(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?", re.DOTALL)
_KEYS = {
    **dict.fromkeys(("slots", "count", "cpu"), "slots"),
    **dict.fromkeys(("max_slots", "max-slots"), "max_slots"),
    **{key: key for key in ("port", "addr", "user", "gpus")},
}
_COMMENT = re.compile(r"(?:^|[ \t])(?:#|//)")
_HOSTS = re.compile(r"(?:[^ \t,\[]|\[[^\]]*\]?|[ \t]*,[ \t]*)+")
_PAIR = re.compile(r"[ \t]+([^ \t=]+)[ \t]*=[ \t]*([^ \t]*)")
_GPU = re.compile(r"[0-9]{1,4}|(?:GPU|MIG)-[A-Za-z0-9/-]+")
_CURE = "Name the hosts by -H or --hostfile."
_CORRECT = "Correct it."
_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")


def parse_hosts(text: str, option: str = "-H") -> tuple[Host, ...]:
    return _count_repeated(_parse_words(text, option, option))


def _parse_words(text: str, option: str, named_at: str) -> list[Host]:
    hosts: list[Host] = []
    for word in split_list(text, option):
        user, has_user, rest = word.rpartition("@")
        if has_user:
            _check_user(user, option)
        name, slots = _split_slots(rest, option)
        count = SLOTS_OPEN
        if slots is not None:
            subject = f"{option}: slots of {name}"
            count = read_number(subject, slots, _CORRECT, most=MAX_SLOTS)
        names = [name] if ":" in name and "[" not in name else expand(name, option)
        for one in names:
            _check_name(one, option)
            hosts.append(Host(one, count, user=user, named_at=named_at))
    if not hosts:
        raise UsageError(
            f"{option} names no host. Type names such as a:2,b:4, or leave the option "
            "out."
        )
    return hosts


def _split_slots(text: str, option: str) -> tuple[str, str | None]:
    """Split ``HOST:SLOTS``; an IPv6 address with slots must have brackets."""
    if bracketed := _BRACKETED.fullmatch(text):
        return bracketed[1], bracketed[2]
    colon = text.rfind(":")
    if colon > text.rfind("]"):
        if text.count(":") == 1:
            return text[:colon], text[colon + 1 :]
        if text[colon - 1] == "]":
            raise UsageError(
                f"{option}: {text!r} is ambiguous: slots for a list of IPv6 addresses "
                f"can only be given in a host file. Write there: {text[:colon]} "
                f"slots={text[colon + 1 :]}"
            )
    return text, None


def _count_repeated(hosts: Iterable[Host]) -> tuple[Host, ...]:
    found: list[Host] = []
    for first, *others in grouped((host.name, host) for host in hosts).values():
        for host in others:
            is_same = host._replace(named_at=first.named_at) == first
            if not is_same or host.slots != SLOTS_OPEN:
                lines = dict.fromkeys((first.named_at, host.named_at))
                raise UsageError(
                    f"{' and '.join(lines)}: host {host.name} is named twice, with "
                    "slots. Name it once, with all of its slots."
                )
        found.append(first._replace(slots=1 + len(others)) if others else first)
    return tuple(found)


def _check_name(name: str, option: str) -> None:
    if not _NAME.fullmatch(name) and not (":" in name and _is_address(name)):
        raise UsageError(
            f"{option}: a host must be a name or an address, got {name!r}. Type it as "
            "n1, n1:4, 10.0.0.1, fd00::1 or [fd00::1]:4."
        )


def _check_user(user: str, option: str) -> None:
    if not _USER.fullmatch(user):
        raise UsageError(
            f"{option}: a user must be a login name, got {user!r}. Type: user@n1"
        )


def _is_address(text: str) -> bool:
    address, has_zone, zone = text.partition("%")
    with suppress(OSError, ValueError):
        socket.inet_pton(family_of(text), address)
        return not has_zone or (":" in address and _NAME.fullmatch(zone) is not None)
    return False


class _Value(NamedTuple):
    key: str  # as written
    text: str
    where: str  # line and column

    def must_be_once(self, key: str, first: str) -> UsageError:
        return UsageError(
            f"{self.where}: {key} must be given once, got {first} and "
            f"{self.key}={self.text}. Drop one."
        )


def merge_repeated(
    hosts: Iterable[Host], *, is_counted: bool
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Merge repeated hosts; return the hosts and a warning for each repeated one.

    The smallest number of slots wins. With ``is_counted``, as in a host file, a host
    that is repeated without slots gets one slot per line, and no warning.
    """
    merged: list[Host] = []
    doubles: list[str] = []
    by_name = grouped((host.name, host) for host in hosts)
    for name, (first, *others) in by_name.items():
        slots = [h.slots for h in (first, *others) if h.slots != SLOTS_OPEN]
        count = min(slots, default=SLOTS_OPEN)
        if others and is_counted and not slots:
            count = 1 + len(others)
        elif others:
            shown = f"with {count} slots" if slots else "without slots"
            doubles.append(
                f"{first.named_at}: {name} is named {1 + len(others)} times. It counts "
                f"once, {shown}."
            )
        merged.append(first._replace(slots=count))
    return tuple(merged), tuple(doubles)


def parse_hostfile(text: str, option: str) -> tuple[Host, ...]:
    return _count_repeated(parse_lines(text, option))


def parse_lines(text: str, option: str) -> list[Host]:
    hosts: list[Host] = []
    # Not splitlines(), which splits at more characters than editors do.
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        comment = _COMMENT.search(line)
        kept = line[: comment.start()] if comment else line
        kept = kept.removesuffix("\r").rstrip(BLANKS)
        if kept.strip(BLANKS):
            hosts += _parse_line(kept, f"{option} line {number}")
    if not hosts:
        raise UsageError(
            f"{option} names no host. Write a line such as n1 slots=4 for each, or "
            "leave the option out."
        )
    return hosts


def _parse_line(line: str, named_at: str) -> list[Host]:
    start = len(line) - len(line.lstrip(BLANKS))
    named = _HOSTS.match(line, start)
    end = named.end() if named else start
    hosts = _parse_words(line[start:end], f"{named_at}, column {start + 1}", named_at)
    values: dict[str, _Value] = {}
    while end < len(line):
        match = _PAIR.match(line, end)
        if match is None:
            rest = line[end:].strip(BLANKS)
            column = len(line) - len(rest) + 1
            raise UsageError(
                f"{named_at}, column {column}: expected key=value after the host, "
                f"without blanks in the value, got {rest!r}. Type: slots=4, or # "
                "before a comment"
            )
        word, text = match.groups()
        if word not in _KEYS:
            likely = word.lower() if word.lower() in _KEYS else ""
            raise UsageError(
                f"{named_at}, column {match.start(1) + 1}: a key must be one of "
                f"{', '.join(_KEYS)}, got {word!r}. "
                f"{f'Type: {likely}=' if likely else 'Correct it or drop it.'}"
            )
        key, end = _KEYS[word], match.end()
        value = _Value(word, text, f"{named_at}, column {match.start(2) + 1}")
        if first := values.get(key):
            raise value.must_be_once(key, f"{first.key}={first.text}")
        values[key] = value
    return [_with_values(host, values, len(hosts)) for host in hosts]


def _with_values(host: Host, values: Mapping[str, _Value], num_hosts: int) -> Host:
    given = (("user", f"{host.user}@"), ("slots", f"{host.name}:{host.slots}"))
    for key, shown in given:
        if key in values and getattr(host, key) not in ("", SLOTS_OPEN):
            raise values[key].must_be_once(key, shown)
    user, address, gpus = host.user, "", tuple[str, ...]()
    if value := values.get("gpus"):
        gpus = tuple(value.text.split(","))
        if not all(map(_GPU.fullmatch, gpus)) or len(set(gpus)) < len(gpus):
            raise UsageError(
                f"{value.where}: gpus must be different numbers or UUIDs, separated by "
                f"commas without blanks, got {value.text!r}. Type: gpus=0,2"
            )
    if value := values.get("user"):
        user = value.text
        _check_user(user, value.where)
    if value := values.get("addr"):
        address = value.text
        if not _is_address(address) or num_hosts > 1:
            raise UsageError(
                f"{value.where}: addr must be the numeric address of one host, got "
                f"{address!r} for {counted(num_hosts, 'host')}. "
                "Type: n1 addr=10.0.0.1"
            )
    slots = _number(values, "slots", 0, MAX_SLOTS, host.slots)
    # No rank is started beyond the slots, so a maximum only limits.
    most = _number(values, "max_slots", 0, MAX_SLOTS, MAX_SLOTS)
    if most < slots:
        value = values["max_slots"]
        raise UsageError(
            f"{value.where}: {value.key} must be at least the slots, got {most} for "
            f"{slots} slots. Drop one of them."
        )
    if slots == SLOTS_OPEN:
        slots = most if "max_slots" in values else len(gpus) or SLOTS_OPEN
    port = _number(values, "port", 1, 65535, 0)
    return Host(host.name, slots, user, port, address, gpus, host.named_at)


def _number(
    values: Mapping[str, _Value], key: str, lowest: int, highest: int, default: int
) -> int:
    if key not in values:
        return default
    name, text, where = values[key]
    return read_number(f"{where}: {name}", text, _CORRECT, least=lowest, most=highest)


def read_allocation(environ: Mapping[str, str]) -> tuple[Host, ...] | None:
    if "SLURM_JOB_ID" not in environ:
        return None
    # Heterogeneous jobs list their hosts under other names.
    if (num_groups := environ.get("SLURM_HET_SIZE", "1")) != "1":
        raise UsageError(
            "heterogeneous Slurm jobs are not supported (SLURM_HET_SIZE is "
            f"{num_groups}). {_CURE}"
        )
    listed_at = next((name for name in _LISTS if environ.get(name)), "")
    names = expand_list(environ[listed_at], listed_at) if listed_at else []
    if not names:
        return None
    for each in names:
        _check_name(each, listed_at)
    slots = _tasks(environ, len(names), f"{listed_at}={environ[listed_at]}")
    if max(slots) <= 1:
        # Slurm gives the number of GPUs of this host. Other hosts have the same, unless
        # the job asked for a total.
        name, num_gpus = "SLURM_GPUS_ON_NODE", 0
        if name in environ and not (len(names) > 1 and "SLURM_GPUS" in environ):
            num_gpus = read_number(name, environ[name], _CURE, most=MAX_SLOTS)
        slots = [num_gpus or SLOTS_OPEN] * len(names)
    return tuple(
        Host(each, count, named_at=listed_at)
        for each, count in zip(names, slots, strict=True)
    )


def _tasks(environ: Mapping[str, str], num_hosts: int, hosts: str) -> list[int]:
    each_name, name = "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"
    # Without a request, the counts are those of CPUs.
    is_asked = "SLURM_NTASKS" in environ or each_name in environ
    if is_asked and name in environ:
        try:
            tasks = parse_tasks_per_node(environ[name], name)
        except WorldError as error:
            raise UsageError(f"{error} {_CURE}") from None
        if len(tasks) == num_hosts:
            return tasks
        # In a step on a part of the hosts, the counts are the step's.
        if "SLURM_STEP_ID" not in environ:
            raise UsageError(
                f"{name} must have {num_hosts} counts, one for each host in {hosts}, "
                f"got {len(tasks)} in {environ[name]!r}. {_CURE}"
            )
    each = environ.get(each_name, "1")
    return [read_number(each_name, each, _CURE, most=MAX_SLOTS)] * num_hosts


def is_hostfile(text: str, option: str) -> bool:
    path = os.path.realpath(text)
    if not os.path.isfile(path) or os.access(path, os.X_OK):  # noqa: PTH113  no OSError
        return False
    with suppress(OSError), Path(path).open("rb") as file:
        if file.read(2) == b"#!":
            raise UsageError(
                f"{option}: {text!r} is a script, but it is not executable. "
                f"Type: chmod +x {text}"
            )
    return True
