"""Host files: Horovod's, Open MPI's, MPICH's and DeepSpeed's dialects in one.

::

    line  := [ hosts { key "=" value } ] [ "#" ... | "//" ... ]
    hosts := what ``-H`` takes: n1, n1:4, user@n[01-04,7], [fd00::2]:4
    key   := slots | count | cpu | max_slots | max-slots | port | addr | user | gpus
             | label.NAME
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ronde.errors import UsageError
from ronde.launch.hosts.host import SLOTS_OPEN, Host
from ronde.launch.hosts.names import (
    MAX_SLOTS,
    check_user,
    count_repeated,
    is_address,
    parse_number,
    parse_words,
)
from ronde.world.host_lists import BLANKS

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


@dataclass(frozen=True, slots=True)
class _Value:
    """What stands after a key.

    Attributes:
        key: As it was written.
        text: The value.
        said_by: Line and column of the value.
    """

    key: str
    text: str
    said_by: str

    def number(self, lowest: int, highest: int) -> int:
        return parse_number(
            self.text, self.key, self.said_by, lowest=lowest, highest=highest
        )


def parse_hostfile(text: str, said_by: str) -> tuple[Host, ...]:
    """Read a host file; hosts stand in its order.

    Args:
        text: What is in it.
        said_by: Its name.

    Raises:
        UsageError: A line is wrong, two contradict each other, or there is none.
    """
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
    slots = _slots(host, values)
    gpus = _gpus(values["gpus"]) if "gpus" in values else ()
    if gpus and slots == SLOTS_OPEN:
        slots = len(gpus)
    return replace(
        host,
        slots=slots,
        user=_user(host.user, values["user"]) if "user" in values else host.user,
        port=values["port"].number(1, 65535) if "port" in values else 0,
        address=_address(values["addr"], num_hosts) if "addr" in values else "",
        gpus=gpus,
        labels={
            key.removeprefix(_LABEL): value.text
            for key, value in values.items()
            if key.startswith(_LABEL)
        },
    )


def _slots(host: Host, values: Mapping[str, _Value]) -> int:
    """Return the slots; nobody is started beyond them, so a maximum only limits."""
    slots = host.slots
    if "slots" in values:
        value = values["slots"]
        if slots != SLOTS_OPEN:
            raise UsageError(
                f"{value.said_by}: slots must be said once, got {host.name}:{slots} "
                f"and {value.key}={value.text}. Drop one."
            )
        slots = value.number(0, MAX_SLOTS)
    if "max_slots" in values:
        value = values["max_slots"]
        most = value.number(0, MAX_SLOTS)
        if most < slots:
            raise UsageError(
                f"{value.said_by}: {value.key} must be at least the slots, got {most} "
                f"< {slots}. Drop one."
            )
        slots = most if slots == SLOTS_OPEN else slots
    return slots


def _gpus(value: _Value) -> tuple[str, ...]:
    gpus = value.text.split(",")
    if not all(_GPU.fullmatch(gpu) for gpu in gpus) or len(set(gpus)) < len(gpus):
        raise UsageError(
            f"{value.said_by}: gpus must be different numbers or UUIDs with commas and "
            f"no blanks between them, got {value.text!r}. Type: gpus=0,2"
        )
    return tuple(gpus)


def _user(said_before: str, value: _Value) -> str:
    if said_before:
        raise UsageError(
            f"{value.said_by}: user must be said once, got {said_before}@ and "
            f"user={value.text}. Drop one."
        )
    return check_user(value.text, value.said_by)


def _address(value: _Value, num_hosts: int) -> str:
    if not is_address(value.text) or num_hosts > 1:
        raise UsageError(
            f"{value.said_by}: addr must be the numeric address of one host, got "
            f"{value.text!r} for {num_hosts}. Type: n1 addr=10.0.0.1"
        )
    return value.text
